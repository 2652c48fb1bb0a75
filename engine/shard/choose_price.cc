// What the choices cost, by the cost model: arithmetic, and the reshards of its operands.
#include <algorithm>
#include <numeric>

#include "cost/cost.h"
#include "ops/cost.h"
#include "shard/chooser.h"
#include "task/window.h"

namespace whale {

Price& Price::operator+=(const Price& other) {
  compute_seconds += other.compute_seconds;
  move_seconds += other.move_seconds;
  moved_bytes += other.moved_bytes;
  return *this;
}

// Of unlike replicas each has its share.
double CutChooser::ways(size_t a, int32_t stage) const {
  const MeshAxis& axis = axes_.mesh_axis(a, stage);
  if (axis.only < 0) return static_cast<double>(axis.size);
  const double own = axis.shares[static_cast<size_t>(axis.only)];
  return std::accumulate(axis.shares.begin(), axis.shares.end(), 0.0) / std::max(own, 1e-6);
}

// Replicas that take whole micro-batches share them.
double CutChooser::runs(const Sharding& sharding, int32_t stage) const {
  if (sharding.axes[kTime].placement == Placement::kReplicate) return 1;
  auto n = static_cast<double>(out_.micro_batches);
  for (size_t a = 1; a < axes(); ++a)
    if (axes_.by_micro_batch(a)) n /= static_cast<double>(axes_.size(a, stage));
  return n;
}

// Each micro-batch does its part of what is cut along time: over the step it is the whole.
void CutChooser::charge_compute(const Op& op, OpId number) {
  double parts = 1;
  const auto cut_along = [&](size_t a) { return out_.cuts[a][static_cast<size_t>(number)].present(); };
  for (size_t a = 1; a < axes(); ++a)
    if (cut_along(a) || (axes_.by_micro_batch(a) && cut_along(kTime))) parts *= ways(a, op.stage);
  price_->compute_seconds += op_seconds(cost_of(g_, op), axes_.tasks.cost.device) / parts;
}

void CutChooser::charge_move(TensorId id, const Op& reader, const Sharding& from, size_t a, const AxisSharding& to) {
  const AxisSharding& now = from.axes[a];
  if (a == kTime || now.placement == Placement::kReplicate) return;  // in the device's own memory
  const int64_t n = size(a, reader);
  const bool in_body = from.axes[kTime].placement == Placement::kShard;
  const double times = runs(from, reader.stage);
  // Of one run: a micro-batch has its part of what is cut along time.
  const double whole = bytes(reader, id, from, a) / (in_body ? static_cast<double>(out_.micro_batches) : 1);
  const LinkRates& link = axes_.tasks.cost.link;
  const Reshard reshard{now.placement == Placement::kPartial, to.placement == Placement::kShard};
  double received = received_bytes(reshard, whole, n), seconds = reshard_seconds(reshard, whole, n, link);
  if (to.window.present()) {
    received = whole * static_cast<double>(halo_of(to.window, axes_.mesh_axis(a, reader.stage))) /
               static_cast<double>(std::max<int64_t>(to.window.source, 1));
    seconds = link_seconds(received, 1, link);
  }
  *price_ += {0, times * seconds, times * received};
}

void CutChooser::charge_transfer(TensorId id, const Form& copy) {
  double received = static_cast<double>(element_count(g_.tensor(id).dims) * size_of(g_.tensor(id).dtype));
  for (size_t a = 1; a < axes(); ++a)
    if (copy.sharding.axes[a].placement == Placement::kShard) received /= ways(a, copy.stage);
  const double times = runs(copy.sharding, copy.stage);
  if (copy.sharding.axes[kTime].placement == Placement::kShard) received /= static_cast<double>(out_.micro_batches);
  *price_ += {0, times * link_seconds(received, 1, axes_.tasks.cost.link), times * received};
}

Price price_of_step(const Graph& graph, const TaskGraphs& tasks, const Choices& choices) {
  std::vector<Price> of_mesh(tasks.meshes.size());
  for (size_t i = 0; i < graph.ops.size(); ++i)
    of_mesh[static_cast<size_t>(tasks.mesh_of_stage[static_cast<size_t>(graph.ops[i].stage)])] += choices.prices[i];
  return *std::max_element(of_mesh.begin(), of_mesh.end(),
                           [](const Price& a, const Price& b) { return a.seconds() < b.seconds(); });
}

}  // namespace whale
