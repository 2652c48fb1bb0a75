// The walk behind propagate.h, internal to its files: one pass over the program in order, each op with its operands
// brought into a layout that it allows, on every axis of its mesh.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel/bridges.h"
#include "parallel/propagate.h"

namespace whale {

inline constexpr int kDeepest = 64;    // of chains that are produced again
inline constexpr int64_t kSpread = 8;  // times more elements than what is spread
inline constexpr bool kSamples = true;

inline AxisLayout shard(const Digit& digit, bool state = false, bool samples = false) {
  return {.placement = Placement::kShard, .digit = digit, .state = state, .samples = samples};
}

class Propagator {
 public:
  Propagator(const Graph& graph, const TaskGraphs& tasks, const PropagateOptions& options)
      : options_(options), b_(graph, tasks, options.micro_batches) {
    b_.out.exact = options.exact && b_.out.micro_batches > 1;
  }
  LayoutGraph run();

 private:
  // What an op is to be cut by along some axes when none of its operands says so.
  using Forced = std::vector<std::pair<size_t, OpCut>>;

  Graph& g() { return b_.out.graph; }
  const Graph& g() const { return b_.out.graph; }
  const TaskGraphs& tasks() const { return b_.out.tasks; }
  // Around the op, as the user wrote it: a pipeline's cut divides scopes.
  std::string written_scope(const Op& op) const {
    const auto scope = static_cast<size_t>(op.scope);
    return g().scope_path(scope < tasks().written.size() ? tasks().written[scope] : op.scope);
  }
  size_t axes() const { return b_.out.axes(); }
  int64_t micro_batches() const { return b_.out.micro_batches; }
  int64_t size(size_t a, const Op& op) const { return b_.out.size(a, op.stage); }
  Placement placement(TensorId id, size_t a) const {
    return id == kNone ? Placement::kReplicate : b_.out.at(id, a).placement;
  }
  AxisRole role(const Op& op, size_t a) const { return tasks().task(op).roles[a - 1]; }

  // propagate.cc
  void find_stages();  // ops carry the stage of their scope; those without one join what they read
  // Which forward tensor a result of the backward pass is the gradient of, or a part of it: the operand of the forward
  // op that has its shape, one that the backward op does not read before others.
  void find_adjoints(const std::vector<Op>& ops);
  void choose_splits();
  void lay_input(TensorId id, const Op& reader);  // samples are cut where the first reader is replicated
  void place_input(TensorId id);
  void place_steps();
  // Brings the operands into legal layouts, gives the results theirs, and appends the op. `number`: in the graph before
  // (kNone: made here).
  void place(Op op, OpId number, const Forced& forced);

  // propagate_homes.cc
  // The digit along which state is cut over replicas: the outermost dimension that is long enough and free.
  Digit state_digit(TensorId id, size_t axis, int64_t ways) const;
  void place_variables();
  void follow_owner(const Variable& state);     // cut where its parameter is
  void live_at(TensorId id, const Home& home);  // another entry's home; there the first reader may be in another stage
  void place_parameter(TensorId id, OpId user);
  void cut_state(TensorId id, OpId user);
  // ZeRO 2: a gradient goes to its owner's part as soon as it is there, before micro-batches are summed.
  void cut_gradient(TensorId id);
  // ZeRO: an unscaled gradient lies as the state that it goes into.
  OpCut cut_of_state(const Op& op, const Factors& factors, size_t a) const;

  // propagate_cuts.cc
  OpCut choose(const Op& op, const Factors& factors, size_t a, OpId number);
  // Its readers pair its rows with samples, though perhaps no input feeds it: it is cut along time as they are.
  bool has_own_rows(const Op& op, OpId number) const;
  bool fits(const Op& op, const Factor& f, const SubDigit& sub, size_t a) const;  // beside what earlier axes cut
  // Cuts that operands have along the axis, as factors of the op; with the operand.
  std::vector<std::pair<OpCut, size_t>> cuts_of_operands(const Op& op, const Factors& factors, size_t a) const;
  OpCut largest_cut(const Op& op, const Factors& factors, size_t a) const;  // that of the largest operand
  double bytes(TensorId id, size_t a) const;  // of the tensor on one device, were it not cut along axis `a`
  // Where the results are wanted: a gradient where its parameter lives, or as the value whose gradient it is; a
  // variable's next value at home.
  struct Wanted {
    bool given = false;
    AxisLayout layout;
  };
  std::vector<Wanted> wanted_results(const Op& op, size_t a) const;
  double moved_bytes(const Op& op, const Factor* f, const OpCut& cut, const std::vector<Wanted>& wanted,
                     size_t a) const;
  double held_bytes(const Op& op, const Factor* f, size_t a) const;
  // Of all ways that the operands (or the home of a parameter whose gradient this makes) suggest, the one that moves
  // and computes least.
  OpCut cheapest_cut(const Op& op, const Factors& factors, size_t a) const;
  void apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut);
  void pass_partial(Op& op, const Factors& factors, size_t a);

  // propagate_operands.cc
  TensorId bring(const Op& op, TensorId id, size_t a, const AxisLayout& want);
  TensorId gradient_in(TensorId id) const;  // the parameter's gradient that this is, also on its way; kNone: it is none
  void check_tied(const Op& reader, TensorId id, size_t a, const MeshAxis& here, const MeshAxis& there) const;
  Error tied_unlike(const Op& reader, int32_t stage, const MeshAxis& here, const MeshAxis& there) const;
  void check_came_alike(const Op& reader,
                        TensorId id) const;  // from a stage with as many replicas, if from another one
  static bool passes_on(const Op& op);       // one value, to elsewhere
  // As the options say that gradients are combined between replicas; kNone: by a sum in its own type, as any other.
  OpId summed_replicas(TensorId id) const;  // the backward sum over replicas that it comes from; kNone: it does not
  // Adasum: refuses a gradient of which replicas' parts were added before anything that they all have was (a penalty).
  void check_adasum() const;
  TensorId combine_gradient(const Op& reader, TensorId id, size_t a, const AxisLayout& want);
  // What a split's devices made of a gradient, in its own type: a part of it has terms that cancel in the sum, and
  // would be rounded by their size. `want`: along the axis of replicas that comes next.
  TensorId summed_over_splits(const Op& reader, TensorId id, const AxisLayout& want);
  bool same_shares(size_t a, const Op& op, const AxisLayout& x, const AxisLayout& y) const;
  TensorId whole_in_time(const Op& op, TensorId id);
  TensorId sliced(const Op& op, TensorId id, size_t a, const AxisLayout& want);
  // Can the producer make it cut from operands that are there (or free themselves)?
  OpCut cut_of_result(const Op& op, const Digit& digit, size_t a);
  bool is_free(TensorId id, const Digit& digit, int depth, size_t a);
  TensorId produce_cut(TensorId id, size_t a, const AxisLayout& want);

  // propagate_stages.cc
  bool same_devices(int32_t a, int32_t b) const {
    return tasks().mesh_of_stage[static_cast<size_t>(a)] == tasks().mesh_of_stage[static_cast<size_t>(b)];
  }
  bool is_constant(TensorId id, int depth = 0);  // made of constants and the step's scalars: made again, not moved
  bool is_spread(TensorId id);                   // something small spread over a large tensor: what is small moves
  TensorId at_stage(TensorId id, const Op& reader);

  // propagate_time.cc
  // An op with operands that differ from micro-batch to micro-batch belongs to the body. Operands that exist only after
  // the body (sums over micro-batches) are then computed from the whole batch in the prologue, unless that would
  // compute with samples and parameters twice.
  void hoist_operands(Op& op, OpId number);
  TensorId whole(const Op& user, TensorId id, int depth);
  TensorId make_whole(const Op& user, TensorId id, int depth);
  bool depends_on(TensorId id, TensorKind kind);

  // propagate_ends.cc
  Op reader_of(TensorId id, int32_t stage);  // stands for whoever reads it at the end of the step, in messages
  bool takes_detour(TensorId id, const Layout& to) const;
  TensorId lying(TensorId id, const Layout& layout, int32_t stage);
  TensorId everywhere(TensorId id);
  TensorId fetchable(
      TensorId id);  // sums are finished; samples stay where they are and are put together by the session
  void finish();

  const PropagateOptions& options_;
  BridgeBuilder b_;
  std::vector<OpId> first_user_;
  std::vector<OpCut> samples_;                 // per op: along a replica axis
  std::vector<std::vector<OpCut>> cuts_;       // per axis and op: along a split axis
  std::map<TensorId, Layout> home_;            // of variables
  std::map<TensorId, TensorId> parameter_of_;  // of a gradient
  std::map<TensorId, TensorId> used_;          // of a gradient: as its update reads it
  std::map<TensorId, TensorId> next_of_;       // of the next value of a variable
  std::map<TensorId, TensorId> adjoint_of_;    // of a result of the backward pass: the forward tensor
  std::set<std::pair<TensorId, int32_t>> input_forms_;
  std::map<std::pair<TensorId, int32_t>, TensorId> copies_;
  std::map<std::tuple<TensorId, size_t, int, int64_t, int64_t, bool, WindowRead>, TensorId> slices_;
  std::map<TensorId, TensorId> wholes_;
};

}  // namespace whale
