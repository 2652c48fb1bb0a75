#include "shard/mixed_samples.h"

#include <algorithm>

#include "base/error.h"
#include "shard/cuts.h"
#include "shard/origins.h"

namespace whale {

SourceOps::SourceOps(Graph& graph) : ops(std::move(graph.ops)) {
  graph.ops.clear();
  for (const Tensor& t : graph.tensors) producers.push_back(t.producer);
}

// The forward op, behind a sum over samples, that is to blame.
static OpId nonlinear_behind(const ReshardBuilder& b, const SourceOps& source, const Choices& choices,
                             TensorId gradient) {
  const auto of_backward = [&](TensorId x) {
    return x != kNone && source.producer(x) != kNone && source.op(source.producer(x)).phase == Phase::kBackward;
  };
  // Of a product the gradient is the other factor: the forward op that reads both is to blame, not who is handed it.
  const auto blamed = [&](const Op& backward, TensorId x) {
    const auto has = [x](const TensorIds& ids) { return std::ranges::count(ids, x) > 0; };
    const Op& forward = source.op(backward.origin);
    if (has(forward.inputs) || (has(forward.outputs) && std::ranges::any_of(backward.inputs, of_backward)))
      return backward.origin;
    const auto product = std::ranges::find_if(source.ops, [&](const Op& op) {
      return op.phase == Phase::kForward && has(op.inputs) &&
             std::ranges::count_if(op.inputs, [&](TensorId t) { return t != kNone && mixes(b, t); }) > 1;
    });
    return product == source.ops.end() ? backward.origin : static_cast<OpId>(product - source.ops.begin());
  };
  OpId found = kNone;
  each_maker(b, gradient, [&](TensorId t) {
    if (found != kNone || source.producer(t) == kNone) return found == kNone;
    const Op& op = source.op(source.producer(t));
    if (op.phase != Phase::kBackward || op.origin == kNone) return true;
    for (const TensorId x : op.inputs) {
      if (x == kNone || source.producer(x) == kNone || of_backward(x)) continue;
      const bool rows = choices.shardings[x].axes[kTime].placement == Placement::kShard;
      if (!rows && mixes(b, x)) found = blamed(op, x);
    }
    return found == kNone;
  });
  return found;
}

void refuse_mixed(const ReshardBuilder& b, const SourceOps& source, const Choices& choices, const Op& user,
                  TensorId id) {
  const OpId behind = user.phase == Phase::kBackward ? nonlinear_behind(b, source, choices, id) : kNone;
  const Op& op = behind == kNone ? user : source.op(behind);
  const std::string where = op.location.empty() ? "" : op.location + ": ";
  if (behind != kNone)
    throw invalid(
        "{}op '{}' ({}) stands behind a sum or mean over all samples of the batch and is not linear in it: the "
        "gradient of every sample needs the whole sum, and with {} micro-batches no more than a part of it is there. "
        "Apply it to each sample's own loss, before the mean, where that is meant; otherwise plan with one micro-batch "
        "(accumulation 1; micro_batches=1 of a pipeline)",
        where, op.name, def(op.code).name, b.out.micro_batches)
        .at_op(op.name)
        .at_scope(written_scope(b.out.graph, b.out.tasks, user));
  const char* advice = def(user.code).micro_batch_advice;
  throw invalid(
      "{}op '{}' ({}) uses '{}', which mixes all samples of the batch, before the loss; with {} micro-batches no more "
      "than a part of them is there. Plan with one micro-batch (accumulation 1; micro_batches=1 of a pipeline){}",
      where, op.name, def(op.code).name, b.out.graph.tensor(id).name, b.out.micro_batches,
      advice ? ", or " + fmt::format(fmt::runtime(advice), b.out.micro_batches) : "")
      .at_op(op.name)
      .at_scope(written_scope(b.out.graph, b.out.tasks, user));
}

}  // namespace whale
