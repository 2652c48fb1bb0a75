#include "rewrite/prefetch.h"

#include <algorithm>
#include <numeric>

#include "cost/cost.h"
#include "ops/cost.h"
#include "rewrite/order.h"

namespace whale {
namespace {

double parts_of(const ShardedGraph& lg, TensorId id) {
  double n = 1;
  for (size_t a = 0; id != kNone && a < lg.axes(); ++a)
    if (lg.at(id, a).placement == Placement::kShard) n *= static_cast<double>(lg.size(a, lg.stage(id)));
  return n;
}

// Of computing a device's part of an op, in one micro-batch.
double local_seconds(const ShardedGraph& lg, const Op& op) {
  const OpCost cost = cost_of(lg.graph, op);
  double parts = 1;
  for (const TensorIds* ids : {&op.inputs, &op.outputs})
    for (const TensorId id : *ids) parts = std::max(parts, parts_of(lg, id));
  return op_seconds({cost.flops / parts, cost.bytes / parts}, lg.tasks.cost.device);
}

// What a device of the stage holds beside its variables while each op runs, when gathers start with their readers.
std::vector<double> bytes_held(const ShardedGraph& lg, const Lists& readers, const Lists& overwrites,
                               const std::vector<Gather>& gathers) {
  const Graph& g = lg.graph;
  const int32_t stage = g.op(gathers[0].op).stage;
  std::vector<OpId> at(g.ops.size());
  std::iota(at.begin(), at.end(), 0);
  for (const Gather& gather : gathers) at[gather.op] = gather.reader;
  std::vector<double> held(g.ops.size() + 1);
  for (size_t i = 0; i < g.ops.size(); ++i) {
    if (g.ops[i].stage != stage || is_view(g.ops[i].code) || !overwrites[i].empty()) continue;
    for (const TensorId y : g.ops[i].outputs) {
      if (y == kNone) continue;
      const auto r = readers[y];
      held[at[i]] += local_bytes(lg, y);
      held[static_cast<size_t>(r.empty() ? at[i] : std::max(at[i], r.back())) + 1] -= local_bytes(lg, y);
    }
  }
  std::partial_sum(held.begin(), held.end(), held.begin());
  return held;
}

}  // namespace

double local_bytes(const ShardedGraph& lg, TensorId id) {
  return static_cast<double>(bytes_of(lg.graph.tensor(id))) / parts_of(lg, id);
}

std::vector<Start> start_gathers(const ShardedGraph& lg, const Lists& readers, const Lists& overwrites,
                                 std::vector<Gather> gathers, int64_t ahead) {
  std::sort(gathers.begin(), gathers.end());
  std::vector<Start> starts;
  for (const Gather& gather : gathers) starts.push_back({gather.op, 0});
  if (ahead > 0) {
    for (size_t k = static_cast<size_t>(ahead); k < gathers.size(); ++k)
      starts[k].before = gathers[k - static_cast<size_t>(ahead)].reader;
    return starts;
  }
  const Graph& g = lg.graph;
  const int32_t stage = g.op(gathers[0].op).stage;
  std::vector<double> held = bytes_held(lg, readers, overwrites, gathers);
  const double most = *std::max_element(held.begin(), held.end());
  std::vector<double> bytes, seconds;
  for (const Gather& gather : gathers) {
    const Op& op = g.op(gather.op);
    bytes.push_back(0);
    for (const TensorId y : op.outputs) bytes.back() += local_bytes(lg, y);
    const auto group = static_cast<size_t>(attr_int(op.attrs, "group"));
    seconds.push_back(all_gather_seconds(bytes.back(), lg.size(group + 1, stage), lg.tasks.link(stage, group)));
  }
  std::vector<double> begin(g.ops.size());
  for (const Phase phase : {Phase::kForward, Phase::kBackward, Phase::kUpdate}) {
    const auto reads = [&](const Gather& gather) { return g.op(gather.reader).phase == phase; };
    if (std::ranges::none_of(gathers, reads)) continue;
    // When each op begins if all start at once: a reader waits for its gather and those before it.
    double now = 0, gathered = 0;
    size_t next = 0;
    for (size_t i = 0; i < g.ops.size(); ++i) {
      for (; next < gathers.size() && gathers[next].reader <= static_cast<OpId>(i); ++next)
        if (reads(gathers[next])) now = std::max(now, gathered += seconds[next]);
      begin[i] = now;
      const Op& op = g.ops[i];
      if (op.stage != stage || op.phase != phase || is_view(op.code)) continue;
      if (!has_flag(op.code, kCollective) && op.code != OpCode::k_transfer) now += local_seconds(lg, op);
    }
    // Then from the last to the first, each over before its reader begins and before the next one starts.
    for (size_t k = gathers.size(); k-- > 0;) {
      if (!reads(gathers[k])) continue;
      auto at = static_cast<size_t>(gathers[k].reader);
      now = std::min(now, begin[at]) - seconds[k];
      for (; at > 0 && begin[at] > now && held[at - 1] + bytes[k] <= most; --at) held[at - 1] += bytes[k];
      starts[k].before = static_cast<OpId>(at);
    }
  }
  return starts;
}

}  // namespace whale
