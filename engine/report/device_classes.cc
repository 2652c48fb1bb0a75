#include "report/device_classes.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/format.h"
#include "cluster/devices.h"
#include "plan/figures.h"

namespace whale {
namespace {

std::string axis_text(const MeshAxis& axis, size_t a, const Plan& plan, const Entry& entry, const DeviceClass& c) {
  std::vector<int32_t> places;
  for (const int32_t d : c.devices) places.push_back(static_cast<int32_t>(entry.rows[d].coordinates[a]));
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  const Ints& at = entry.rows[c.first].coordinates;
  const std::vector<MeshAxis>& axes = plan.meshes[entry.rows[c.first].mesh].axes;
  const int64_t row = axis.ragged() ? row_of(axes, a, at) : 0;
  const std::string text = fmt::format("{} {} of {}", axis.name, devices_text(places, 3), axis.members(row));
  if (axis.shares.empty()) return text + ", equal parts";
  double sum = 0;
  std::vector<double> shares;
  for (int64_t k = 0; k < axis.members(row); ++k) {
    shares.push_back(axis.shares[row * axis.size + k]);
    sum += shares.back();
  }
  std::string all = fmt::format("{}", fmt::join(shares, ","));
  if (shares.size() > 12) all = fmt::format("{} of them", shares.size());
  const double mine = shares[at[a]];
  return fmt::format("{}: {} of {} by the shares ({})", text, mine, sum, all);
}

}  // namespace

std::string kind_text(const DeviceSpec& device) {
  const std::string text = to_string(device);
  return text.substr(0, text.find('@'));
}

std::vector<DeviceClass> classes_of(const Plan& plan, const Entry& entry, const StepTimes* times) {
  const auto by = [&](bool clock) {
    using Key = std::tuple<int32_t, int32_t, std::string, int64_t, int64_t>;
    std::map<Key, size_t> numbers;
    std::vector<DeviceClass> out;
    for (size_t d = 0; d < entry.rows.size(); ++d) {
      const DeviceRow& row = entry.rows[d];
      const DeviceSpec& spec = plan.devices[d];
      const Key key{row.program, clock ? times->classes[d] : 0, kind_text(spec), spec.memory_bytes,
                    samples_of(entry, row)};
      const auto [at, fresh] = numbers.try_emplace(key, out.size());
      if (fresh) out.push_back({static_cast<int32_t>(d), row.program, {}});
      out[at->second].devices.push_back(static_cast<int32_t>(d));
    }
    return out;
  };
  std::vector<DeviceClass> out = by(times != nullptr);
  // Devices that do the same at other times are drawn apart only where that is a page.
  return out.size() > kMostClasses ? by(false) : out;
}

std::vector<std::string> parts_of(const Plan& plan, const Entry& entry, const DeviceClass& devices) {
  const DeviceRow& first = entry.rows[devices.first];
  const std::vector<MeshAxis>& axes = plan.meshes[first.mesh].axes;
  std::vector<std::string> out;
  for (size_t a = 0; a < axes.size(); ++a)
    if (axes[a].size > 1) out.push_back(axis_text(axes[a], a, plan, entry, devices));
  return out;
}

}  // namespace whale
