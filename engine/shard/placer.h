// The walk behind insert.h: op by op in order, each with its operands moved to where it reads them, on every axis of
// its mesh. Moving an operand may make ops again, which are placed in turn: hence one class.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shard/cuts.h"
#include "shard/gradients.h"
#include "shard/insert.h"
#include "shard/mixed_samples.h"

namespace whale {

class Placer {
 public:
  Placer(Graph graph, const TaskGraphs& tasks, const ShardOptions& options, const Choices& choices);

  void place_all();
  TensorId at_stage(TensorId id, const Op& reader);
  TensorId to_sharding(const Op& reader, TensorId id, size_t axis, const AxisSharding& want);
  TensorId as_update_reads(TensorId gradient) const;  // the gradient itself where no update does

  ReshardBuilder& builder() { return b_; }
  const ShardOptions& options() const { return options_; }
  const Sharding& storage_sharding(TensorId variable) const { return choices_.shardings[variable]; }

 private:
  // What an op that is made here is to be cut by along some axes.
  using Forced = std::vector<std::pair<size_t, OpCut>>;

  Graph& g() { return b_.out.graph; }
  const Graph& g() const { return b_.out.graph; }
  const TaskGraphs& tasks() const { return b_.out.tasks; }
  std::string written_scope(const Op& op) const { return whale::written_scope(g(), tasks(), op); }
  size_t axes() const { return b_.out.axes(); }
  int64_t micro_batches() const { return b_.out.micro_batches; }
  Placement placement(TensorId id, size_t a) const { return b_.out.placement(id, a); }

  // placer.cc
  Placed placed(const Op& op, const Factors& factors) const;  // until the next reshard
  // Moves the operands to the shardings that its cuts ask for, gives the results theirs, and appends the op. `number`:
  // in the graph before (kNone: made here, cut as `forced` or as its operands lie).
  void place(Op op, OpId number, const Forced& forced);
  void apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut);
  void pass_partial(Op& op, const Factors& factors, size_t a);
  void settle(TensorId id);

  // placer_operands.cc
  // As the options say that gradients are combined between replicas; kNone: by a sum in its own type, as any other.
  TensorId combine_gradient(const Op& reader, TensorId id, size_t a, const AxisSharding& want);
  bool is_summed_over_replicas(TensorId id, size_t a);  // a parameter's gradient, that is to be
  // What a split's devices made of a gradient goes to where its parameter lives there first, so that replicas, which
  // are farther from each other, sum parts. Where those sum in fewer bits it does so anyway, in its own type: it has
  // terms that cancel in the sum, and would be rounded by their size. `want`: along the axis of replicas that comes
  // next.
  TensorId summed_over_splits(const Op& reader, TensorId id, size_t a, const AxisSharding& want);
  TensorId sliced(const Op& op, TensorId id, size_t a, const AxisSharding& want);
  // Can the producer make it cut from operands that are there (or free themselves)?
  OpCut cut_of_result(const Op& op, const SubAxis& sub_axis, size_t a);
  bool is_free(TensorId id, const SubAxis& sub_axis, int depth, size_t a);
  TensorId produce_cut(TensorId id, size_t a, const AxisSharding& want);

  // placer_stages.cc
  TensorId made_again_at(TensorId id, const Op& reader);

  // placer_time.cc
  // An op with operands that differ from micro-batch to micro-batch belongs to the body. Operands that exist only after
  // the body (sums over micro-batches) are then computed from the whole batch in the prologue, unless that would
  // compute with samples and parameters twice: parameters may join what has become of the samples.
  void hoist_operands(Op& op, OpId number);
  TensorId whole_in_time(const Op& op, TensorId id);
  TensorId whole(const Op& user, TensorId id, int depth);
  TensorId make_whole(const Op& user, TensorId id, int depth);

  FactorTable factors_;
  const ShardOptions& options_;
  const Choices& choices_;
  const Gradients gradients_;
  const SourceOps source_;
  ReshardBuilder b_;
  // What was made already: of a gradient, as its update reads it; in other stages; in parts; of all micro-batches.
  std::map<TensorId, TensorId> used_;
  std::set<std::pair<TensorId, int32_t>> input_forms_;
  std::map<std::pair<TensorId, int32_t>, TensorId> copies_;
  std::map<std::tuple<TensorId, size_t, int, int64_t, int64_t, bool, WindowRead>, TensorId> slices_;
  std::map<TensorId, TensorId> wholes_;
};

}  // namespace whale
