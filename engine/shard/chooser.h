// The walk behind choose.h, internal to its files: op by op in order, where each value lies and how the next reader
// gets it, with nothing inserted.
#pragma once

#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "shard/choose.h"
#include "shard/cuts.h"

namespace whale {

class CutChooser {
 public:
  CutChooser(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options);
  Choices run();

 private:
  // How whoever reads a tensor now gets it: a partial value that was reduced once is reduced for all later readers.
  struct Form {
    Sharding sharding;
    int32_t stage = 0;
    bool late = false;   // it exists only after the body: made of sums over micro-batches
    int reductions = 0;  // a value that was is another one: copies of it are made anew
  };
  struct Operand {
    Form* form = nullptr;  // null: kNone, or a form of this reader's own
    Sharding sharding;
    bool late = false;
  };

  size_t axes() const { return axes_.axes(); }
  int64_t size(size_t a, const Op& op) const { return axes_.size(a, op.stage); }
  Form& form(TensorId id) { return forms_[static_cast<size_t>(id)]; }
  const Form& form(TensorId id) const { return forms_[static_cast<size_t>(id)]; }

  // choose.cc
  void prepare();
  bool sums_of_unlike(TensorId id);  // over an unlike replica's samples: another one has others
  void choose_splits();
  void place_inputs();
  void choose_op(OpId number);
  OpCut choose(const Placed& placed, OpId number, size_t a) const;
  // Its readers pair its rows with samples, though perhaps no input feeds it: it is cut along time as they are.
  bool has_own_rows(OpId number) const;
  bool whole_for_gradients(const Placed& p, size_t a) const;
  void settle_gradient(const Op& op, TensorId id);
  void to_storage_sharding(const Variable& variable);

  // choose_storage.cc
  // The sub-axis along which state is cut over replicas: the outermost dimension that is long enough and free.
  SubAxis state_sub_axis(TensorId id, size_t axis, int64_t ways) const;
  void place_variables();
  void follow_owner(const Variable& state);                            // cut where its parameter is
  void live_at(TensorId id, const StorageSharding& storage_sharding);  // another entry's storage sharding; there the
                                                                       // first reader may be in another stage
  void place_parameter(TensorId id, OpId user);
  void cut_state(TensorId id, OpId user);
  // ZeRO: an unscaled gradient lies as the state that it goes into.
  OpCut cut_of_state(const Placed& placed, size_t a) const;

  // choose_cheapest.cc
  double bytes(const Op& reader, TensorId id, const Sharding& sharding, size_t a) const;  // on a device, not cut by `a`
  // Where the results are wanted: a gradient where its parameter lives, or as the value whose gradient it is; a
  // variable's next value at its storage sharding.
  std::vector<const AxisSharding*> wanted_results(const Op& op, size_t a) const;
  // `comes`: per operand, how it comes to lie for another reader anyway; empty: no operand does.
  double moved_bytes(const Placed& placed, const Factor* f, const OpCut& cut,
                     const std::vector<const AxisSharding*>& wanted, const std::vector<SubAxis>& comes, size_t a) const;
  bool of_parameters(TensorId gradient) const;
  double held_bytes(const Placed& placed, const Factor* f, size_t a) const;
  double added_bytes(const Placed& placed, const Factor* f, size_t a) const;
  // Of all ways that the operands (or the storage sharding of a parameter whose gradient this makes) suggest, the one
  // that moves and computes least.
  OpCut cheapest_cut(const Placed& placed, size_t a) const;
  OpCut cheapest_cut(const Placed& placed, const std::vector<SubAxis>& comes, size_t a) const;
  // The gradients of one forward op read the same gradient: what one that is chosen later takes by itself is free for
  // this one.
  std::vector<SubAxis> comes_for_others(const Placed& placed, size_t a) const;

  // choose_price.cc: charged to the op that is being chosen for
  double ways(size_t a, int32_t stage) const;                  // that divide what is cut along the axis
  double runs(const Sharding& sharding, int32_t stage) const;  // in a step
  void charge_compute(const Op& op, OpId number);
  void charge_move(TensorId id, const Op& reader, const Sharding& from, size_t a, const AxisSharding& to);
  void charge_transfer(TensorId id, const Form& copy);

  // choose_operands.cc: what the reshards of insert.h make of an operand
  Operand operand(TensorId id, const Op& reader);
  Form& at_stage(TensorId id, const Op& reader);
  void hoist(std::vector<Operand>& operands, const Op& op, OpId number) const;
  void reduce_over_time(Sharding& sharding, Form* form) const;
  void reduce(Operand& operand, TensorId id, const Op& reader, size_t a);
  void move(Operand& operand, TensorId id, const Op& reader, size_t a, const AxisSharding& to);
  void to_sharding(Operand& operand, TensorId id, const Op& reader, size_t a, const AxisSharding& want);
  bool combine_gradient(Operand& operand, TensorId id, const Op& reader, size_t a);
  TensorId gradient_in(TensorId id) const;  // the parameter's gradient that this is; kNone: it is none

  const Graph& g_;
  const ShardOptions& options_;
  Choices out_;
  Price* price_ = nullptr;
  Axes axes_;
  mutable OpFactors factors_;  // as a cache
  std::vector<Form> forms_;
  std::vector<OpId> first_user_;
  std::vector<std::vector<OpId>> gradients_of_;  // per op: those of the backward pass that are its gradients
  std::vector<char> constant_;                   // per tensor: made of constants and the step's scalars
  std::vector<OpCut> samples_;                   // per op: along a replica axis
  std::vector<std::vector<OpCut>> splits_;       // per axis and forward op: along a split axis
  std::map<TensorId, TensorId> parameter_of_;    // of a gradient
  std::map<TensorId, TensorId> settles_;         // of a gradient, or of a stage's term of it, that is summed at once
  std::unordered_map<TensorId, std::vector<TensorId>> states_of_;  // of a parameter
  // Per tensor, kNone: it is no such thing.
  std::vector<TensorId> next_of_;                              // of the next value of a variable
  std::vector<TensorId> adjoint_of_;                           // of a result of the backward pass: the forward tensor
  std::map<std::tuple<TensorId, int32_t, int>, Form> copies_;  // in other stages, by reductions before
  using Moved = std::tuple<const Form*, int, size_t, Placement, int, int64_t, int64_t, bool, WindowRead>;
  std::map<Moved, Form> moved_;  // along an axis
};

}  // namespace whale
