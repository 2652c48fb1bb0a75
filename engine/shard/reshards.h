// The sharded graph under construction: appending ops with their regions, and the reshards (semantics.md section 4),
// each made once. Who asks for one again gets what it has become: a part of a sum may have been reduced since.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shard/sharded_graph.h"

namespace whale {

class ReshardBuilder {
 public:
  // `graph`: without ops; nothing is cut yet.
  ReshardBuilder(Graph graph, const TaskGraphs& tasks, int64_t batch, int64_t micro_batches);

  ShardedGraph out;

  OpId append(Op op);                // its results' shardings are set already; finds its region
  OpId producer(TensorId id) const;  // kNone: not made by an op
  Region region(TensorId id) const;  // of the op that makes it; inputs and variables are there from the prologue on
  TensorId like(TensorId id, const char* suffix);  // a new tensor of the same type, replicated, in the same stage
  TensorId latest(TensorId id) const;              // after a partial value was reduced, everyone uses the reduced one

  // The type that a sum over micro-batches is kept in; by default that of what is summed, to which it is cast at its
  // end.
  void sum_over_time_in(std::function<DType(TensorId)> dtype) { dtype_over_time_ = std::move(dtype); }
  // Of a sum that was cast at its end, or once more by a collective: what was cast; else the tensor itself.
  TensorId before_cast(TensorId id) const {
    const auto known = cast_sums_.find(id);
    return known == cast_sums_.end() ? id : known->second;
  }

  void replace(TensorId id, TensorId by) { reduced_[id] = by; }
  TensorId reduce(TensorId id, size_t axis);  // partial -> replicate: accumulate over time, all_reduce over devices
  TensorId reduce_to(TensorId id, size_t axis, const AxisSharding& to);  // partial -> shard: reduce_scatter
  TensorId gather(TensorId id, size_t axis, int use = 0);                // shard -> replicate: all_gather; one per use
  TensorId slice(TensorId id, size_t axis, const AxisSharding& to);      // replicate -> shard: local_slice
  TensorId exchange(TensorId id, size_t axis, const AxisSharding& to);   // shard -> shard: all_to_all
  TensorId cast(TensorId id, DType dtype, Phase phase);                  // the same sharding
  TensorId adasum(TensorId id, size_t axis);                             // partial -> replicate, not by a sum
  // Groups that cut in ways of their own and compute copies of one value, each for itself, round it in ways of their
  // own: everyone takes the first group's. For what a variable becomes. Parts of a sum are left as they are where
  // groups differ in size; the sum is taken then.
  TensorId alike(TensorId id);
  TensorId halo(TensorId id, size_t axis, const AxisSharding& to);  // shard -> the same with a halo: a transfer
  TensorId rearrange(TensorId id, Sharding to);  // cut or whole, to any sharding: transfers between boxes
  // Where groups along the axis cut the tensor in ways of their own (an axis inside is ragged), or have members that
  // others lack, no collective along it fits: the same reshards made of transfers between intersecting boxes.
  bool cut_apart(TensorId id, size_t axis) const;
  // Of a sum made so: what it sums, and along which axis; kNone: it is none.
  std::pair<TensorId, size_t> summed(TensorId id) const {
    const auto known = sums_.find(id);
    return known == sums_.end() ? std::pair<TensorId, size_t>{kNone, 0} : known->second;
  }
  // To another stage, for a reader of that phase; partial values along axes of other sizes are not allowed.
  TensorId transfer(TensorId id, int32_t stage, Phase reader);
  TensorId input_form(TensorId id, int32_t stage, bool whole);  // of an input: in another stage, not cut along time

  void finish();  // drops what nobody reads; moves what only the epilogue reads there

 private:
  Attrs over_time(TensorId id, Combine combine) const;
  bool parts_differ(TensorId id, size_t axis) const;
  TensorId sum_in_groups(TensorId id, size_t axis);  // along axes inside of `axis` whose groups differ in size
  TensorId sum_of_parts(TensorId id, size_t axis);
  TensorId from_first(TensorId id, size_t axis);
  uint32_t unlike_after(const Op& op) const;
  TensorId reshard(OpCode code, TensorIds inputs, TensorId id, const char* suffix, Attrs attrs, size_t axis,
                   AxisSharding to);
  // In the scope and phase of what makes `id`.
  void append_behind(TensorId id, OpCode code, TensorIds inputs, TensorId made, Attrs attrs, int32_t stage);
  using Key = std::tuple<TensorId, size_t, int, int, int64_t, int64_t, bool, WindowRead>;
  static Key key(TensorId id, size_t axis, int what, const AxisSharding& to) {
    return {id, axis, what, to.sub_axis.dim, to.sub_axis.outer, to.sub_axis.inner, to.state, to.window};
  }
  TensorId sum_over_time(TensorId id, Combine combine);
  std::function<DType(TensorId)> dtype_over_time_;
  std::map<TensorId, TensorId> cast_sums_;
  std::map<TensorId, TensorId> reduced_;
  std::vector<std::pair<TensorId, TensorId>> moves_;  // by rearrange
  std::map<TensorId, std::pair<TensorId, size_t>> sums_;
  std::map<std::tuple<TensorId, int32_t, bool>, TensorId> forms_;
  std::map<Key, TensorId> made_;
  std::vector<OpId> producer_;
  std::vector<uint32_t>
      unlike_;  // per tensor, a bit an axis: whole along it, and perhaps of other bits from group to group
};

Attrs sub_axis_attr(const char* name, const SubAxis& sub_axis);

}  // namespace whale
