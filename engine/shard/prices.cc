#include "shard/prices.h"

#include <algorithm>
#include <numeric>

#include "cost/cost.h"
#include "ops/cost.h"
#include "task/window.h"

namespace whale {
namespace {

// That divide what is cut along the axis; of unlike replicas each has its share.
double ways(const Axes& axes, size_t a, int32_t stage) {
  const MeshAxis& axis = axes.mesh_axis(a, stage);
  if (axis.only < 0) return static_cast<double>(axis.size);
  const double own = axis.shares[axis.only];
  return std::accumulate(axis.shares.begin(), axis.shares.end(), 0.0) / std::max(own, 1e-6);
}

// In a step; replicas that take whole micro-batches share them.
double runs(const Axes& axes, const Sharding& sharding, int32_t stage) {
  if (sharding.axes[kTime].placement == Placement::kReplicate) return 1;
  auto n = static_cast<double>(axes.micro_batches);
  for (size_t a = 1; a < axes.axes(); ++a)
    if (axes.by_micro_batch(a)) n /= static_cast<double>(axes.size(a, stage));
  return n;
}

double whole_bytes(const Graph& graph, TensorId id) {
  const Tensor& t = graph.tensor(id);
  return static_cast<double>(element_count(t.dims) * size_of(t.dtype));
}

}  // namespace

Price& Price::operator+=(const Price& other) {
  compute_seconds += other.compute_seconds;
  move_seconds += other.move_seconds;
  moved_bytes += other.moved_bytes;
  return *this;
}

double bytes_beside(const CutProblem& p, TensorId id, const Sharding& sharding, int32_t stage, size_t a) {
  double n = whole_bytes(p.graph, id);
  for (size_t b = 1; b < p.axes.axes(); ++b)
    if (b != a && sharding.axes[b].placement == Placement::kShard) n /= ways(p.axes, b, stage);
  return n;
}

// Each micro-batch does its part of what is cut along time: over the step it is the whole.
Price price_of_op(const CutProblem& p, const Op& op, const std::vector<OpCut>& cuts) {
  double parts = 1;
  for (size_t a = 1; a < p.axes.axes(); ++a)
    if (cuts[a].present() || (p.axes.by_micro_batch(a) && cuts[kTime].present())) parts *= ways(p.axes, a, op.stage);
  return {.compute_seconds = op_seconds(cost_of(p.graph, op), p.axes.tasks.cost.device) / parts};
}

Price price_of_move(const CutProblem& p, TensorId id, const Sharding& from, int32_t stage, size_t a,
                    const AxisSharding& to) {
  const AxisSharding& now = from.axes[a];
  if (a == kTime || now.placement == Placement::kReplicate) return {};  // in the device's own memory
  const int64_t n = p.axes.size(a, stage);
  const bool in_body = from.axes[kTime].placement == Placement::kShard;
  const double times = runs(p.axes, from, stage);
  // Of one run: a micro-batch has its part of what is cut along time.
  const double whole = bytes_beside(p, id, from, stage, a) / (in_body ? static_cast<double>(p.micro_batches) : 1);
  const LinkRates& link = p.axes.tasks.link(stage, a - 1);
  const Reshard reshard{now.placement == Placement::kPartial, to.placement == Placement::kShard};
  double received = received_bytes(reshard, whole, n), seconds = reshard_seconds(reshard, whole, n, link);
  if (to.window.present()) {
    received = whole * static_cast<double>(halo_of(to.window, p.axes.mesh_axis(a, stage))) /
               static_cast<double>(std::max<int64_t>(to.window.source, 1));
    seconds = link_seconds(received, 1, link);
  }
  return {0, times * seconds, times * received};
}

Price price_of_transfer(const CutProblem& p, TensorId id, const Sharding& sharding, int32_t stage) {
  double received = bytes_beside(p, id, sharding, stage, kTime);
  const double times = runs(p.axes, sharding, stage);
  if (sharding.axes[kTime].placement == Placement::kShard) received /= static_cast<double>(p.micro_batches);
  return {0, times * link_seconds(received, 1, p.axes.tasks.cost.link), times * received};
}

Price price_of_step(const Graph& graph, const TaskGraphs& tasks, const Choices& choices) {
  std::vector<Price> of_mesh(tasks.meshes.size());
  for (size_t i = 0; i < graph.ops.size(); ++i) of_mesh[tasks.mesh_of_stage[graph.ops[i].stage]] += choices.prices[i];
  return *std::max_element(of_mesh.begin(), of_mesh.end(),
                           [](const Price& a, const Price& b) { return a.seconds() < b.seconds(); });
}

}  // namespace whale
