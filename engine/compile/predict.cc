#include <algorithm>

#include "base/text.h"
#include "compile/automatic.h"
#include "compile/checks.h"
#include "grad/passes.h"

namespace whale {

Json predict(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             const std::vector<int64_t>& counts, const std::vector<int64_t>& batches) {
  Json rows = Json::array();
  for (const int64_t batch : batches.empty() ? std::vector<int64_t>{batch_of(graph)} : batches) {
    const Graph sized = batch == batch_of(graph) ? graph : rebatch(graph, batch);
    for (const int64_t count : counts) {
      if (count < 1 || count > std::ssize(devices))
        throw invalid("{} device(s) are asked for, the cluster has {}", count, devices.size());
      const std::vector<DeviceSpec> first(devices.begin(), devices.begin() + count);
      Json row{{"devices", count}, {"batch", batch}};
      const Found found = search(sized, first, options);
      if (found.fits()) {
        const Judged& best = found.winner();
        row.update(json_of(best, first));
        row["devices"] = count;
        row["samples_per_second"] = json_value(static_cast<double>(batch) / best.seconds);
        row.erase("lost"), row.erase("missing_bytes");
      } else {
        row["error"] = found.list.empty() ? "no strategy cuts this model so" : found.list.front().lost;
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace whale
