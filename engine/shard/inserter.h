// The walk behind insert.h, internal to its files: one pass over the program in order, each op with its operands
// moved to where it reads them, on every axis of its mesh.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shard/reshards.h"
#include "shard/cuts.h"
#include "shard/insert.h"

namespace whale {

inline constexpr int kDeepest = 64;  // of chains that are produced again

class Inserter {
 public:
  Inserter(Graph graph, const TaskGraphs& tasks, const ShardOptions& options, const Choices& choices);
  ShardedGraph run();

 private:
  // What an op that is made here is to be cut by along some axes.
  using Forced = std::vector<std::pair<size_t, OpCut>>;

  Graph& g() { return b_.out.graph; }
  const Graph& g() const { return b_.out.graph; }
  const TaskGraphs& tasks() const { return b_.out.tasks; }
  std::string written_scope(const Op& op) const { return whale::written_scope(g(), tasks(), op); }
  size_t axes() const { return b_.out.axes(); }
  int64_t micro_batches() const { return b_.out.micro_batches; }
  int64_t size(size_t a, const Op& op) const { return b_.out.size(a, op.stage); }
  Placement placement(TensorId id, size_t a) const {
    return id == kNone ? Placement::kReplicate : b_.out.at(id, a).placement;
  }
  AxisRole role(const Op& op, size_t a) const { return b_.out.role(op, a); }

  // insert.cc
  Placed placed(const Op& op, const Factors& factors) const;  // until the next reshard
  // Moves the operands to the shardings that its cuts ask for, gives the results theirs, and appends the op. `number`:
  // in the graph before (kNone: made here, cut as `forced` or as its operands lie).
  void place(Op op, OpId number, const Forced& forced);
  void apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut);
  void pass_partial(Op& op, const Factors& factors, size_t a);
  void settle(TensorId id);
  const Sharding& storage_sharding(TensorId variable) const {
    return choices_.shardings[static_cast<size_t>(variable)];
  }

  // insert_operands.cc
  TensorId to_sharding(const Op& op, TensorId id, size_t a, const AxisSharding& want);
  bool is_parameter(TensorId id) const;     // or its copy of another type
  TensorId gradient_in(TensorId id) const;  // the parameter's gradient that this is, also on its way; kNone: it is none
  bool term_in(TensorId id) const;          // it is a parameter's gradient or one of its terms, also on its way
  template <class Found>
  TensorId on_its_way(TensorId id, Found found) const;  // the first of what it was moved, summed and cast from
  void check_tied(const Op& reader, TensorId id, size_t a, const MeshAxis& here, const MeshAxis& there) const;
  Error tied_unlike(const Op& reader, int32_t stage, const MeshAxis& here, const MeshAxis& there) const;
  void check_came_alike(const Op& reader,
                        TensorId id) const;  // from a stage with as many replicas, if from another one
  static bool passes_on(const Op& op);       // one value, to elsewhere
  // As the options say that gradients are combined between replicas; kNone: by a sum in its own type, as any other.
  OpId summed_replicas(TensorId id) const;  // the backward sum over replicas that it comes from; kNone: it does not
  // Adasum: refuses a gradient of which replicas' parts were added before anything that they all have was (a penalty).
  void check_adasum() const;
  TensorId combine_gradient(const Op& reader, TensorId id, size_t a, const AxisSharding& want);
  // What a split's devices made of a gradient, in its own type: a part of it has terms that cancel in the sum, and
  // would be rounded by their size. `want`: along the axis of replicas that comes next.
  TensorId summed_over_splits(const Op& reader, TensorId id, const AxisSharding& want);
  bool same_shares(size_t a, const Op& op, const AxisSharding& x, const AxisSharding& y) const;
  TensorId whole_in_time(const Op& op, TensorId id);
  TensorId sliced(const Op& op, TensorId id, size_t a, const AxisSharding& want);
  // Can the producer make it cut from operands that are there (or free themselves)?
  OpCut cut_of_result(const Op& op, const SubAxis& sub_axis, size_t a);
  bool is_free(TensorId id, const SubAxis& sub_axis, int depth, size_t a);
  TensorId produce_cut(TensorId id, size_t a, const AxisSharding& want);

  // insert_stages.cc
  bool sums_of_unlike(TensorId id) const;        // over an unlike replica's samples: another one has others
  bool is_constant(TensorId id, int depth = 0);  // made of constants and the step's scalars: made again, not moved
  TensorId at_stage(TensorId id, const Op& reader);

  // insert_time.cc
  // An op with operands that differ from micro-batch to micro-batch belongs to the body. Operands that exist only after
  // the body (sums over micro-batches) are then computed from the whole batch in the prologue, unless that would
  // compute with samples and parameters twice: parameters may join what has become of the samples.
  void hoist_operands(Op& op, OpId number);
  TensorId whole(const Op& user, TensorId id, int depth);
  TensorId make_whole(const Op& user, TensorId id, int depth);
  template <class Deeper>
  void each_maker(TensorId id, Deeper deeper) const;  // what it is made of, nearest first; whose makers too: deeper(it)
  bool depends_on(TensorId id, TensorKind kind) const;
  bool mixes(TensorId id) const { return depends_on(id, TensorKind::kVariable) && depends_on(id, TensorKind::kInput); }
  bool has_mixed_rows(TensorId id) const;  // rows of samples that depend on parameters are among what it is made of
  OpId nonlinear_behind(TensorId gradient) const;  // the forward op, behind a sum over samples, that is to blame
  [[noreturn]] void refuse_mixed(const Op& user, TensorId id) const;

  // insert_ends.cc
  Op reader_of(TensorId id, int32_t stage);  // stands for whoever reads it at the end of the step, in messages
  bool takes_detour(TensorId id, const Sharding& to) const;
  TensorId to_sharding(TensorId id, const Sharding& sharding, int32_t stage);
  TensorId replicated(TensorId id);
  TensorId fetchable(
      TensorId id);  // sums are finished; samples stay where they are and are put together by the session
  void finish();

  // The program as it was.
  struct Source {
    std::vector<Op> ops;
    std::vector<OpId> producers;  // per tensor
    // kNone: no op makes it, or it is of a reshard.
    OpId producer(TensorId id) const {
      return static_cast<size_t>(id) < producers.size() ? producers[static_cast<size_t>(id)] : kNone;
    }
    const Op& op(OpId id) const { return ops[static_cast<size_t>(id)]; }
  };
  static Source source_of(Graph& graph);  // takes its ops

  FactorTable factors_;
  const ShardOptions& options_;
  const Choices& choices_;
  std::map<TensorId, TensorId> parameter_of_;  // of a gradient
  std::set<TensorId> terms_;  // gradients and what they are sums of, where they have a type of their own
  Source source_;
  ReshardBuilder b_;
  std::map<TensorId, TensorId> used_;  // of a gradient: as its update reads it
  std::set<std::pair<TensorId, int32_t>> input_forms_;
  std::map<std::pair<TensorId, int32_t>, TensorId> copies_;
  std::map<std::tuple<TensorId, size_t, int, int64_t, int64_t, bool, WindowRead>, TensorId> slices_;
  std::map<TensorId, TensorId> wholes_;
};

}  // namespace whale
