#include "parallel/propagate.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "cost/cost.h"
#include "parallel/bridges.h"
#include "parallel/digits.h"
#include "parallel/split.h"
#include "parallel/window.h"

namespace whale {
namespace {

constexpr int kDeepest = 64;       // of chains that are produced again
constexpr int64_t kFreeFlops = 8;  // an element, of ops that are cheaper made again than moved
constexpr int64_t kSpread = 8;     // times more elements than what is spread

AxisLayout shard(const Digit& digit, bool state = false, bool samples = false) {
  return {.placement = Placement::kShard, .digit = digit, .state = state, .samples = samples};
}
constexpr bool kSamples = true;

class Propagator {
 public:
  Propagator(const Graph& graph, const TaskGraphs& tasks, const PropagateOptions& options)
      : options_(options), b_(graph, tasks, options.micro_batches) {
    b_.out.exact = options.exact && b_.out.micro_batches > 1;
  }

  LayoutGraph run() {
    find_stages();
    samples_ = follow_samples(g());
    choose_splits();
    place_variables();
    for (const TensorId id : std::vector<TensorId>(g().inputs)) place_input(id);
    place_steps();
    for (const NamedTensor& t : g().gradients) {
      parameter_of_[t.tensor] = variable_named(t.name);
      const OpId made = g().tensor(t.tensor).producer;  // with the loss scale still in it
      if (made != kNone && g().op(made).code == OpCode::k_unscale)
        parameter_of_[g().op(made).inputs[0]] = parameter_of_[t.tensor];
    }
    std::vector<Op> ops;
    std::swap(ops, g().ops);
    find_adjoints(ops);
    for (size_t i = 0; i < ops.size(); ++i) place(std::move(ops[i]), static_cast<OpId>(i), {});
    finish();
    return std::move(b_.out);
  }

 private:
  Graph& g() { return b_.out.graph; }
  const Graph& g() const { return b_.out.graph; }
  const TaskGraphs& tasks() const { return b_.out.tasks; }
  size_t axes() const { return b_.out.axes(); }
  int64_t micro_batches() const { return b_.out.micro_batches; }
  int64_t size(size_t a, const Op& op) const { return b_.out.size(a, op.stage); }
  Placement placement(TensorId id, size_t a) const {
    return id == kNone ? Placement::kReplicate : b_.out.at(id, a).placement;
  }
  AxisRole role(const Op& op, size_t a) const { return tasks().task(op).roles[a - 1]; }

  // ---- before the walk --------------------------------------------------------------------------------------------
  // Ops carry the stage of their scope; those without one join what they read.
  void find_stages() {
    first_user_.assign(g().tensors.size(), kNone);
    for (size_t i = 0; i < g().ops.size(); ++i) {
      Op& op = g().ops[i];
      const auto scope = static_cast<size_t>(op.scope);
      int32_t stage = scope < tasks().stage_of_scope.size() ? tasks().stage_of_scope[scope] : -1;
      if (stage < 0) {
        stage = 0;
        for (const TensorId id : op.inputs)
          if (id != kNone && g().tensor(id).producer != kNone)
            stage = std::max(stage, g().op(g().tensor(id).producer).stage);
      }
      op.stage = stage;
      for (const TensorId id : op.inputs)
        if (id != kNone && first_user_[static_cast<size_t>(id)] == kNone)
          first_user_[static_cast<size_t>(id)] = static_cast<OpId>(i);
    }
  }

  // Which forward tensor a result of the backward pass is the gradient of, or a part of it: the operand of the forward
  // op that has its shape, one that the backward op does not read before others.
  void find_adjoints(const std::vector<Op>& ops) {
    for (const Op& op : ops) {
      if (op.phase != Phase::kBackward || op.origin == kNone || static_cast<size_t>(op.origin) >= ops.size()) continue;
      const Op& forward = ops[static_cast<size_t>(op.origin)];
      for (const TensorId id : op.outputs) {
        if (id == kNone) continue;
        TensorId best = kNone;
        for (const TensorId x : forward.inputs) {
          if (x == kNone || g().tensor(x).dims != g().tensor(id).dims || !is_float(g().tensor(x).dtype)) continue;
          const bool read = std::find(op.inputs.begin(), op.inputs.end(), x) != op.inputs.end();
          if (best == kNone || !read) best = x;
          if (!read) break;
        }
        if (best != kNone) adjoint_of_[id] = best;
      }
    }
  }

  void choose_splits() {
    cuts_.assign(axes(), std::vector<OpCut>(g().ops.size()));
    std::vector<std::vector<OpCut>> taken;
    const std::vector<OpCut> nothing(g().ops.size());
    for (size_t a = 1; a < axes(); ++a) {
      if (b_.out.by_micro_batch(a)) {
        taken.push_back(nothing);
        continue;
      }
      const SplitProblem problem{.graph = g(),
                                 .tasks = tasks(),
                                 .axis = a,
                                 .samples = b_.out.batch > 1 ? samples_ : nothing,
                                 .taken = taken,
                                 .homes = options_.homes,
                                 .trains = !g().gradients.empty()};
      cuts_[a] = choose_split(problem);
      taken.push_back(cuts_[a]);
    }
  }

  TensorId variable_named(const std::string& name) const {
    for (const Variable& v : g().variables)
      if (g().tensor(v.tensor).name == name) return v.tensor;
    return kNone;
  }

  // The digit along which state is cut over replicas: the outermost dimension that is long enough and free.
  Digit state_digit(TensorId id, size_t axis, int64_t ways) const {
    const Dims& dims = g().tensor(id).dims;
    for (size_t d = 0; d < dims.size(); ++d) {
      const Digit digit{static_cast<int>(d), 1, 1};
      bool free = dims[d] >= ways;
      for (size_t a = 1; a < axes() && free; ++a)
        if (a != axis && placement(id, a) == Placement::kShard)
          free = b_.out.at(id, a).digit.dim != digit.dim || (a < axis && b_.out.at(id, a) == shard(digit, true));
      if (free) return digit;
    }
    return {};
  }

  void place_variables() {
    std::map<TensorId, OpId> user;
    for (const Variable& v : g().variables) {
      const TensorId owner = v.owner == kNone ? v.tensor : v.owner;
      OpId first = first_user_[static_cast<size_t>(owner)];
      if (first == kNone) first = first_user_[static_cast<size_t>(v.tensor)];
      user[v.tensor] = first;
      if (first != kNone) b_.out.stages[static_cast<size_t>(v.tensor)] = g().op(first).stage;
    }
    if (options_.homes) {
      for (const Variable& v : g().variables)
        if (const auto home = options_.homes->find(g().tensor(v.tensor).name); home != options_.homes->end())
          live_at(v.tensor, home->second);
    } else {
      for (const Variable& v : g().variables)
        if (v.owner == kNone && user[v.tensor] != kNone) place_parameter(v.tensor, user[v.tensor]);
      for (const Variable& v : g().variables) {
        if (v.owner == kNone) continue;
        if (g().tensor(v.tensor).dims == g().tensor(v.owner).dims)
          b_.out.layouts[static_cast<size_t>(v.tensor)] = b_.out.layouts[static_cast<size_t>(v.owner)];
        if (options_.zero >= 1 && user[v.tensor] != kNone) cut_state(v.tensor, user[v.tensor]);
      }
      if (options_.zero >= 3)
        for (const Variable& v : g().variables)
          if (v.role == Role::kParameter && v.trainable && user[v.tensor] != kNone) cut_state(v.tensor, user[v.tensor]);
    }
    for (const Variable& v : g().variables) home_[v.tensor] = b_.out.layouts[static_cast<size_t>(v.tensor)];
  }

  // The home of another entry: there the first reader may be in another stage.
  void live_at(TensorId id, const Home& home) {
    b_.out.layouts[static_cast<size_t>(id)] = home.layout;
    const auto& meshes = tasks().mesh_of_stage;
    if (meshes[static_cast<size_t>(b_.out.stage(id))] != home.mesh)
      b_.out.stages[static_cast<size_t>(id)] =
          static_cast<int32_t>(std::find(meshes.begin(), meshes.end(), home.mesh) - meshes.begin());
  }

  void place_parameter(TensorId id, OpId user) {
    const Op& op = g().op(user);
    const Factors factors = factors_of(g(), op);
    for (size_t a = 1; a < axes(); ++a) {
      const OpCut& cut = cuts_[a][static_cast<size_t>(user)];
      if (size(a, op) == 1 || !cut.present() || role(op, a) == AxisRole::kReplica) continue;
      const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
      for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
        if (op.inputs[i] == id && f.inputs[i].present()) b_.out.at(id, a) = shard(sub_digit(f.inputs[i], cut.sub));
    }
  }

  void cut_state(TensorId id, OpId user) {
    const Op& op = g().op(user);
    for (size_t a = 1; a < axes(); ++a) {
      if (size(a, op) == 1 || role(op, a) != AxisRole::kReplica || placement(id, a) != Placement::kReplicate) continue;
      if (const Digit digit = state_digit(id, a, size(a, op)); digit.present()) b_.out.at(id, a) = shard(digit, true);
    }
  }

  // Samples of an input are cut where its first reader is replicated.
  void lay_input(TensorId id, const Op& reader) {
    const int dim = g().tensor(id).batch_dim;
    if (dim < 0 || b_.out.batch <= 1) return;
    if (micro_batches() > 1) b_.out.at(id, kTime) = shard({dim, 1, 1}, false, kSamples);
    for (size_t a = 1; a < axes(); ++a)
      b_.out.at(id, a) = size(a, reader) > 1 && role(reader, a) == AxisRole::kReplica && !b_.out.by_micro_batch(a)
                             ? shard({dim, 1, 1}, false, kSamples)
                             : AxisLayout{};
  }
  void place_input(TensorId id) {
    const OpId user = first_user_[static_cast<size_t>(id)];
    if (user == kNone) {
      if (g().tensor(id).batch_dim >= 0 && b_.out.batch > 1 && micro_batches() > 1)
        b_.out.at(id, kTime) = shard({g().tensor(id).batch_dim, 1, 1}, false, kSamples);
      return;
    }
    b_.out.stages[static_cast<size_t>(id)] = g().op(user).stage;
    lay_input(id, g().op(user));
  }
  void place_steps() {
    for (size_t t = 0; t < g().tensors.size(); ++t)
      if (g().tensors[t].kind == TensorKind::kStep && first_user_[t] != kNone)
        b_.out.stages[t] = g().op(first_user_[t]).stage;
  }

  // ---- one op -----------------------------------------------------------------------------------------------------
  // What an op is to be cut by along some axes when none of its operands says so.
  using Forced = std::vector<std::pair<size_t, OpCut>>;

  // Brings the operands into legal layouts, gives the results theirs, and appends the op. `number`: in the graph before
  // (kNone: made here).
  void place(Op op, OpId number, const Forced& forced) {
    for (TensorId& id : op.inputs) id = b_.latest(id);
    if (tasks().stages() > 1)
      for (TensorId& id : op.inputs)
        if (id != kNone) id = at_stage(id, op);
    hoist_operands(op);
    const Factors factors = factors_of(g(), op);
    for (size_t a = 0; a < axes(); ++a) {
      if (size(a, op) == 1) continue;
      OpCut cut;
      bool given = false;
      for (const auto& [at, wanted] : forced)
        if (at == a) cut = wanted, given = true;
      if (!given) cut = choose(op, factors, a, number);
      if (cut.present())
        apply_cut(op, factors, a, cut);
      else
        pass_partial(op, factors, a);
    }
    const std::vector<TensorId> results = op.outputs;
    b_.append(std::move(op));
    if (options_.zero >= 2 && !options_.adasum)
      for (const TensorId id : results) cut_gradient(id);
  }

  // ZeRO 2: a gradient goes to its owner's part as soon as it is there, before micro-batches are summed.
  void cut_gradient(TensorId id) {
    const auto p = parameter_of_.find(id);
    if (id == kNone || p == parameter_of_.end() || p->second == kNone) return;
    const Op& op = g().op(b_.producer(id));
    for (size_t a = 1; a < axes(); ++a) {
      if (placement(b_.latest(id), a) != Placement::kPartial || role(op, a) != AxisRole::kReplica) continue;
      AxisLayout want = home_.at(p->second).axes[a];
      if (want.placement != Placement::kShard) {
        const Digit digit = state_digit(p->second, a, size(a, op));
        if (!digit.present()) continue;
        want = shard(digit, true);
      }
      const TensorId from = b_.latest(id);
      b_.replace(from, bring(op, from, a, want));
    }
  }

  // No result is partial: every element is computed as in the whole.
  static bool is_map(const Factor& f) {
    return f.kind == FactorKind::kMap && std::find(f.partial.begin(), f.partial.end(), true) == f.partial.end();
  }

  OpCut choose(const Op& op, const Factors& factors, size_t a, OpId number) {
    if (a == kTime) return largest_cut(op, factors, a);
    if (b_.out.by_micro_batch(a)) {
      if (number != kNone && samples_[static_cast<size_t>(number)].present()) return {};
      const OpCut cut = largest_cut(op, factors, a);
      return options_.exact && cut.present() && !is_map(factors.list[static_cast<size_t>(cut.factor)]) ? OpCut{} : cut;
    }
    const AxisRole what = role(op, a);
    if (what == AxisRole::kReplica) {
      if (number != kNone && b_.out.batch > 1 && samples_[static_cast<size_t>(number)].present())
        return samples_[static_cast<size_t>(number)];
      if (op.code == OpCode::k_unscale && placement(op.inputs[0], a) == Placement::kPartial)
        if (const OpCut cut = cut_of_state(op, factors, a); cut.present()) return cut;
      return largest_cut(op, factors, a);
    }
    if (number != kNone && op.phase == Phase::kForward) return cuts_[a][static_cast<size_t>(number)];
    return cheapest_cut(op, factors, a);
  }

  // ZeRO: an unscaled gradient lies as the state that it goes into.
  OpCut cut_of_state(const Op& op, const Factors& factors, size_t a) const {
    const auto p = parameter_of_.find(op.outputs[0]);
    if (p == parameter_of_.end() || p->second == kNone) return {};
    const Dims& dims = g().tensor(op.outputs[0]).dims;
    for (const Variable& v : g().variables) {
      if (v.owner != p->second || g().tensor(v.tensor).dims != dims) continue;
      const AxisLayout& l = home_.at(v.tensor).axes[a];
      if (l.placement != Placement::kShard || !l.state) continue;
      for (size_t k = 0; k < factors.list.size(); ++k) {
        OpCut cut{static_cast<int>(k), {}, true};
        const Factor& f = factors.list[k];
        if (find_sub_digit(f.inputs[0], f.extent, l.digit, extent_of(dims, l.digit), cut.sub) &&
            fits(op, f, cut.sub, a))
          return cut;
      }
    }
    return {};
  }

  bool fits(const Op& op, const Factor& f, const SubDigit& sub, size_t a) const {
    if (!can_cut(op, f, sub)) return false;
    if (a == kTime && f.kind == FactorKind::kLookup) return false;
    const bool window = f.kind == FactorKind::kWindow;
    if (window && (a == kTime || !window_fits(f.window, b_.out.mesh_axis(a, op.stage)))) return false;
    // Beside what the axes before cut already.
    const auto clash = [&](TensorId id, const Digit& whole) {
      if (id == kNone || !whole.present()) return false;
      const Digit digit = sub_digit(whole, sub);
      for (size_t b = 0; b < a; ++b)
        if (placement(id, b) == Placement::kShard && (!compatible(g().tensor(id).dims, b_.out.at(id, b).digit, digit) ||
                                                      (window && b_.out.at(id, b).digit.dim == digit.dim)))
          return true;
      return false;
    };
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (clash(op.inputs[i], f.inputs[i])) return false;
    for (size_t o = 0; o < op.outputs.size() && o < f.outputs.size(); ++o)
      if (clash(op.outputs[o], f.outputs[o])) return false;
    return true;
  }

  // Cuts that operands have along the axis, as factors of the op; with the operand.
  std::vector<std::pair<OpCut, size_t>> cuts_of_operands(const Op& op, const Factors& factors, size_t a) const {
    std::vector<std::pair<OpCut, size_t>> out;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (placement(op.inputs[i], a) != Placement::kShard) continue;
      const AxisLayout& l = b_.out.at(op.inputs[i], a);
      for (size_t k = 0; k < factors.list.size(); ++k) {
        const Factor& f = factors.list[k];
        OpCut cut{static_cast<int>(k), {}, l.state, l.samples};
        if (f.kind == FactorKind::kWindow && (l.samples || l.state)) continue;
        if (cut_of_operand(f, i, l.digit, extent_of(g().tensor(op.inputs[i]).dims, l.digit), cut.sub) &&
            fits(op, f, cut.sub, a)) {
          out.emplace_back(cut, i);
          break;
        }
      }
    }
    return out;
  }

  // That of the largest operand that is cut and can stay so.
  OpCut largest_cut(const Op& op, const Factors& factors, size_t a) const {
    OpCut best;
    int64_t most = -1;
    for (const auto& [cut, operand] : cuts_of_operands(op, factors, a))
      if (const int64_t n = element_count(g().tensor(op.inputs[operand]).dims); n > most) best = cut, most = n;
    return best;
  }

  // Bytes of the tensor on one device, were it not cut along axis `a`.
  double bytes(TensorId id, size_t a) const {
    const Tensor& t = g().tensor(id);
    double n = static_cast<double>(element_count(t.dims) * size_of(t.dtype));
    for (size_t b = 1; b < axes(); ++b)
      if (b != a && placement(id, b) == Placement::kShard) n /= static_cast<double>(b_.out.size(b, b_.out.stage(id)));
    return n;
  }

  // Of all ways that the operands (or the home of a parameter whose gradient this makes) suggest, the one that moves
  // and computes least.
  OpCut cheapest_cut(const Op& op, const Factors& factors, size_t a) const {
    const auto n = static_cast<double>(size(a, op));
    std::vector<OpCut> tries{{}};
    const auto enter = [&](const OpCut& cut) {
      if (std::find(tries.begin(), tries.end(), cut) == tries.end()) tries.push_back(cut);
    };
    for (const auto& [cut, operand] : cuts_of_operands(op, factors, a)) enter(cut);
    // A gradient goes where its parameter lives, or lies as the value whose gradient it is.
    std::vector<AxisLayout> wanted(op.outputs.size());
    std::vector<char> is_gradient(op.outputs.size());
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      const auto p = parameter_of_.find(op.outputs[o]);
      const auto x = adjoint_of_.find(op.outputs[o]);
      if (p != parameter_of_.end() && p->second != kNone)
        wanted[o] = home_.at(p->second).axes[a];
      else if (x != adjoint_of_.end() && same_devices(b_.out.stage(b_.latest(x->second)), op.stage))
        wanted[o] = b_.out.at(b_.latest(x->second), a);
      else
        continue;
      is_gradient[o] = 1;
      if (wanted[o].placement != Placement::kShard) continue;
      for (size_t k = 0; k < factors.list.size(); ++k) {
        const Factor& f = factors.list[k];
        OpCut cut{static_cast<int>(k), {}, false};
        const Digit& d = wanted[o].digit;
        if (o < f.outputs.size() &&
            find_sub_digit(f.outputs[o], f.extent, d, extent_of(g().tensor(op.outputs[o]).dims, d), cut.sub) &&
            fits(op, f, cut.sub, a))
          enter(cut);
      }
    }
    if (tries.size() == 1) return {};
    const LinkRates link;
    const double work = op_seconds(cost_of(view_of(g(), op)), DeviceRates{});
    OpCut best;
    double least = 0;
    for (size_t t = 0; t < tries.size(); ++t) {
      const OpCut& cut = tries[t];
      const Factor* f = cut.present() ? &factors.list[static_cast<size_t>(cut.factor)] : nullptr;
      double cost = f ? work / n : work, moved = 0;
      for (size_t i = 0; i < op.inputs.size(); ++i) {
        const TensorId id = op.inputs[i];
        if (id == kNone) continue;
        const bool carries = f && i < f->inputs.size() && f->inputs[i].present();
        const AxisLayout& now = b_.out.at(id, a);
        const double whole = bytes(id, a) * (n - 1) / n;
        if (now.placement == Placement::kPartial)
          moved += carries ? whole : 2 * whole;
        else if (now.placement == Placement::kShard && !(carries && now.digit == sub_digit(f->inputs[i], cut.sub)))
          moved += carries ? whole / n : whole;
        if (carries && f->reads_through(i))
          moved += bytes(id, a) * static_cast<double>(halo_of(f->window, b_.out.mesh_axis(a, op.stage))) /
                   static_cast<double>(std::max<int64_t>(f->window.source, 1));
      }
      for (size_t o = 0; o < op.outputs.size(); ++o) {
        const TensorId id = op.outputs[o];
        if (id == kNone || !f) continue;
        const double whole = bytes(id, a) * (n - 1) / n;
        const bool carries = o < f->outputs.size() && f->outputs[o].present();
        const bool to_shard = is_gradient[o] && wanted[o].placement == Placement::kShard;
        if (!carries)
          moved += to_shard ? whole : 2 * whole;
        else if (is_gradient[o] && !(to_shard && wanted[o].digit == sub_digit(f->outputs[o], cut.sub)))
          moved += to_shard ? whole / n : whole;
      }
      cost += moved / link.bytes_per_second;
      if (t == 0 || cost < least * (1 - 1e-9)) best = cut, least = cost;
    }
    return best;
  }

  void apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut) {
    const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone) continue;
      const bool carries = i < f.inputs.size() && f.inputs[i].present();
      AxisLayout want;
      if (carries && f.reads_through(i))
        want = read_layout(f, f.inputs[i], b_.out.mesh_axis(a, op.stage));
      else if (carries)
        want = shard(sub_digit(f.inputs[i], cut.sub), cut.state, cut.samples);
      op.inputs[i] = bring(op, op.inputs[i], a, want);
    }
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      AxisLayout& l = b_.out.at(op.outputs[o], a);
      if (o < f.outputs.size() && f.outputs[o].present())
        l = shard(sub_digit(f.outputs[o], cut.sub), cut.state, cut.samples);
      else
        l = {.placement = Placement::kPartial,
             .digit = {},
             .state = false,
             .samples = false,
             .combine = f.combine_of(o)};
    }
  }

  void pass_partial(Op& op, const Factors& factors, size_t a) {
    std::vector<int> partial;
    bool sum = true, narrows = false;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (placement(op.inputs[i], a) == Placement::kShard) op.inputs[i] = bring(op, op.inputs[i], a, {});
      if (placement(op.inputs[i], a) != Placement::kPartial) continue;
      partial.push_back(static_cast<int>(i));
      sum &= b_.out.at(op.inputs[i], a).combine == Combine::kSum;
      for (const TensorId o : op.outputs)  // sums stay in the wider type
        if (o != kNone) narrows |= size_of(g().tensor(o).dtype) < size_of(g().tensor(op.inputs[i]).dtype);
    }
    if (partial.empty()) return;
    // Exact mode adds each use of a parameter over time for itself: stages may lie between uses.
    const bool passes = sum && !narrows && !(b_.out.exact && a == kTime) &&
                        std::find(factors.linear.begin(), factors.linear.end(), partial) != factors.linear.end();
    if (!passes) {
      for (const int i : partial)
        op.inputs[static_cast<size_t>(i)] = bring(op, op.inputs[static_cast<size_t>(i)], a, {});
      return;
    }
    for (const TensorId o : op.outputs)
      if (o != kNone)
        b_.out.at(o, a) = {.placement = Placement::kPartial, .digit = {}, .state = false, .samples = false};
  }

  // ---- bridges of one operand -----------------------------------------------------------------------------------
  TensorId bring(const Op& op, TensorId id, size_t a, const AxisLayout& want) {
    id = b_.latest(id);
    const AxisLayout now = b_.out.at(id, a);
    const bool cut = want.placement == Placement::kShard;
    if (want.window.present()) {
      // Cut once, beside nothing else in this dimension; then the neighbours' rows are added.
      AxisLayout plain = want;
      plain.window = {};
      for (size_t b = axes(); b-- > a + 1;)
        if (placement(id, b) == Placement::kShard && b_.out.at(id, b).digit.dim == want.digit.dim)
          id = b_.gather(id, b);
      if (now.placement == Placement::kReplicate) return sliced(op, id, a, want);
      return b_.halo(bring(op, id, a, plain), a, want);
    }
    if (now.placement == want.placement && (!cut || (now.digit == want.digit && same_shares(a, op, now, want))))
      return id;
    if (a == kTime) {
      const TensorId whole = whole_in_time(op, id);
      return cut ? sliced(op, whole, a, want) : whole;
    }
    // An inner cut of the same digit, or of one that overlaps, is taken back first; its own axis comes later.
    for (size_t b = axes(); b-- > a + 1;) {
      if (placement(id, b) != Placement::kShard) continue;
      const Digit& inner = b_.out.at(id, b).digit;
      const Dims& dims = g().tensor(id).dims;
      if ((now.placement == Placement::kShard && (inner == now.digit || !compatible(dims, inner, now.digit))) ||
          (cut && (inner == want.digit || !compatible(dims, inner, want.digit))))
        id = b_.gather(id, b);
    }
    switch (now.placement) {
      case Placement::kReplicate: return sliced(op, id, a, want);
      case Placement::kPartial:
        if (const TensorId made = combine_gradient(op, id, a, want); made != kNone) return made;
        return cut && now.combine == Combine::kSum ? b_.reduce_to(id, a, want)
               : cut                               ? sliced(op, b_.reduce(id, a), a, want)
                                                   : b_.reduce(id, a);
      case Placement::kShard:
        if (cut && now.digit.dim != want.digit.dim && !now.state && !want.state) return b_.exchange(id, a, want);
        // Parameters that live in parts are gathered once for each pass, so that no copy lives between the passes.
        const int use = g().tensor(id).kind == TensorKind::kVariable && op.phase != Phase::kForward ? 1 : 0;
        const TensorId whole = b_.gather(id, a, use);
        return cut ? sliced(op, whole, a, want) : whole;
    }
    return id;
  }

  // ---- gradients of parameters between replicas, where options say how they are combined
  bool is_gradient(TensorId id) const {
    while (id != kNone && !parameter_of_.contains(id)) {
      const OpId made = b_.producer(id);
      if (made == kNone) return false;
      const Op& op = g().op(made);
      if (op.code == OpCode::k_accumulate)
        id = op.inputs[1];
      else if (has_flag(op.code, kCollective) || op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice ||
               op.code == OpCode::k_cast)
        id = op.inputs[0];
      else
        return false;
    }
    return id != kNone;
  }

  // kNone: by a sum in its own type, as any other partial value.
  TensorId combine_gradient(const Op& reader, TensorId id, size_t a, const AxisLayout& want) {
    const DType exact = g().tensor(id).dtype;
    const bool narrow = options_.gradient_dtype && *options_.gradient_dtype != exact;
    if (!(narrow || options_.adasum) || b_.out.at(id, a).combine != Combine::kSum || !is_gradient(id) ||
        role(g().op(b_.producer(id)), a) != AxisRole::kReplica)
      return kNone;
    const bool cut = want.placement == Placement::kShard;
    if (options_.adasum) {
      // A replica's gradient is whole first: over its micro-batches, and over the replicas inside of it.
      if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
      for (size_t b = axes(); b-- > a + 1;)
        if (placement(id, b) == Placement::kPartial) id = bring(reader, id, b, {});
      const TensorId made = b_.adasum(id, a);
      return cut ? sliced(reader, made, a, want) : made;
    }
    const TensorId low = b_.cast(id, *options_.gradient_dtype, g().op(b_.producer(id)).phase);
    const TensorId made = b_.cast(cut ? b_.reduce_to(low, a, want) : b_.reduce(low, a), exact, Phase::kUpdate);
    if (!cut) b_.replace(id, made);
    return made;
  }

  bool same_shares(size_t a, const Op& op, const AxisLayout& x, const AxisLayout& y) const {
    if (a == kTime || x.state == y.state) return true;
    const MeshAxis& axis = b_.out.mesh_axis(a, op.stage);
    return axis.shares == axis.state_shares;
  }

  TensorId whole_in_time(const Op& op, TensorId id) {
    if (placement(id, kTime) == Placement::kReplicate) return id;
    if (placement(id, kTime) == Placement::kPartial) return b_.reduce(id, kTime);
    throw invalid(
        "op '{}' ({}) needs all samples of '{}' at once, which {} micro-batches do not have; plan with one micro-batch "
        "(accumulation 1), or keep samples apart in this op",
        op.name, def(op.code).name, g().tensor(id).name, micro_batches())
        .at_op(op.name)
        .at_scope(g().scope_path(op.scope));
  }

  TensorId sliced(const Op& op, TensorId id, size_t a, const AxisLayout& want) {
    const auto key =
        std::make_tuple(id, a, want.digit.dim, want.digit.outer, want.digit.inner, want.state, want.window);
    if (const auto known = slices_.find(key); known != slices_.end()) return known->second;
    TensorId out = kNone;
    const OpId producer = b_.producer(id);
    if (!want.window.present() && is_free(id, want.digit, 0, a)) {
      out = produce_cut(id, a, want);
    } else if (a == kTime && producer != kNone && g().op(producer).code == OpCode::k_transfer) {
      // Cut where it is made, and sent piece by piece.
      out = at_stage(sliced(op, g().op(producer).inputs[0], a, want), op);
    } else if (a != kTime) {
      out = b_.slice(id, a, want);
    } else {
      throw unimplemented(
          "op '{}' ({}): operand '{}' has a value for every sample but does not come from a batched input; cutting it "
          "into {} micro-batches is not implemented: declare it as an input with a batch dimension",
          op.name, def(op.code).name, g().tensor(id).name, micro_batches())
          .at_op(op.name)
          .at_scope(g().scope_path(op.scope));
    }
    return slices_[key] = out;
  }

  // Can the producer make it cut from operands that are there (or free themselves)?
  OpCut cut_of_result(const Op& op, const Digit& digit, size_t a) {
    if (has_flag(op.code, kCollective) || has_flag(op.code, kUpdateOp) || op.outputs.size() != 1 ||
        op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice || op.code == OpCode::k_accumulate)
      return {};
    const Factors factors = factors_of(g(), op);
    for (size_t k = 0; k < factors.list.size(); ++k) {
      OpCut cut{static_cast<int>(k), {}, false};
      const Factor& f = factors.list[k];
      if (f.kind == FactorKind::kMap &&
          find_sub_digit(f.outputs[0], f.extent, digit, extent_of(g().tensor(op.outputs[0]).dims, digit), cut.sub) &&
          fits(op, f, cut.sub, a))
        return cut;
    }
    return {};
  }
  bool is_free(TensorId id, const Digit& digit, int depth, size_t a) {
    const OpId producer = b_.producer(id);
    if (producer == kNone || depth > kDeepest) return false;
    const Op op = g().op(producer);
    const OpCut cut = cut_of_result(op, digit, a);
    if (!cut.present()) return false;
    for (size_t b = 0; b < axes(); ++b)
      if (placement(id, b) == Placement::kPartial) return false;
    const int64_t n = element_count(g().tensor(id).dims);
    // Along time there is no other way.
    if (a != kTime && cost_of(view_of(g(), op)).flops > static_cast<double>(kFreeFlops * n)) return false;
    const Factor f = factors_of(g(), op).list[static_cast<size_t>(cut.factor)];
    // Where nothing carries the digit, something small is spread (or made from nothing); along time there is no other
    // way.
    const bool carried = std::any_of(f.inputs.begin(), f.inputs.end(), [](const Digit& d) { return d.present(); });
    for (const TensorId x : op.inputs)
      if (a != kTime && !carried && x != kNone && element_count(g().tensor(x).dims) * kSpread > n) return false;
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (op.inputs[i] != kNone && f.inputs[i].present() &&
          !is_free(op.inputs[i], sub_digit(f.inputs[i], cut.sub), depth + 1, a))
        return false;
    return true;
  }
  TensorId produce_cut(TensorId id, size_t a, const AxisLayout& want) {
    Op op = g().op(b_.producer(id));
    OpCut cut = cut_of_result(op, want.digit, a);
    cut.state = want.state, cut.samples = want.samples;
    op.name += ".cut";
    op.outputs = {b_.like(id, ".cut")};
    // Along the other axes the layout stays what it was.
    Forced forced{{a, cut}};
    for (size_t other = 0; other < axes(); ++other) {
      if (other == a) continue;
      OpCut kept;
      if (placement(id, other) == Placement::kShard) {
        kept = cut_of_result(op, b_.out.at(id, other).digit, other);
        kept.state = b_.out.at(id, other).state, kept.samples = b_.out.at(id, other).samples;
      }
      forced.emplace_back(other, kept);
    }
    const TensorId out = op.outputs[0];
    place(std::move(op), kNone, forced);
    return out;
  }

  // ---- stages ---------------------------------------------------------------------------------------------------
  bool same_devices(int32_t a, int32_t b) const {
    return tasks().mesh_of_stage[static_cast<size_t>(a)] == tasks().mesh_of_stage[static_cast<size_t>(b)];
  }

  // Made of constants and the step's scalars alone: cheaper made again than moved.
  bool is_constant(TensorId id, int depth = 0) {
    if (g().tensor(id).kind == TensorKind::kStep) return true;
    const OpId producer = b_.producer(id);
    if (producer == kNone || depth > kDeepest || has_flag(g().op(producer).code, kCollective)) return false;
    const std::vector<TensorId> inputs = g().op(producer).inputs;
    return std::all_of(inputs.begin(), inputs.end(),
                       [&](TensorId x) { return x == kNone || is_constant(x, depth + 1); });
  }
  // Something small spread over a large tensor: what is small moves.
  bool is_spread(TensorId id) {
    const OpId producer = b_.producer(id);
    if (producer == kNone || has_flag(g().op(producer).code, kCollective)) return false;
    const Op& op = g().op(producer);
    if (op.outputs.size() != 1 || op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice ||
        op.code == OpCode::k_accumulate || has_flag(op.code, kUpdateOp) || has_flag(op.code, kRandom))
      return false;
    int64_t from = 0;
    for (const TensorId x : op.inputs) from += x == kNone ? 0 : element_count(g().tensor(x).dims);
    for (size_t a = 0; a < axes(); ++a)
      if (placement(id, a) != Placement::kReplicate) return false;
    return from > 0 && from * kSpread <= element_count(g().tensor(id).dims);
  }

  TensorId at_stage(TensorId id, const Op& reader) {
    id = b_.latest(id);
    if (same_devices(b_.out.stage(id), reader.stage)) {
      // Another chunk of the same devices runs at another time.
      return b_.out.stage(id) != reader.stage && placement(id, kTime) == Placement::kPartial ? b_.reduce(id, kTime)
                                                                                             : id;
    }
    const TensorKind kind = g().tensor(id).kind;
    if (kind == TensorKind::kInput || kind == TensorKind::kStep) {
      const bool fresh = !input_forms_.contains({id, reader.stage});
      const TensorId form = b_.input_form(id, reader.stage, false);
      if (fresh && kind == TensorKind::kInput) lay_input(form, reader);
      input_forms_.insert({id, reader.stage});
      return form;
    }
    if (is_constant(id) || is_spread(id)) {
      const auto known = copies_.find({id, reader.stage});
      if (known != copies_.end()) return known->second;
      Op op = g().op(b_.producer(id));
      const auto at = static_cast<size_t>(std::find(op.outputs.begin(), op.outputs.end(), id) - op.outputs.begin());
      op.name += fmt::format(".at{}", reader.stage);
      op.stage = reader.stage;
      op.scope = reader.scope;
      for (TensorId& o : op.outputs)
        if (o != kNone) o = b_.like(o, fmt::format(".at{}", reader.stage).c_str());
      const TensorId out = op.outputs[at];
      Forced whole;
      for (size_t a = 0; a < axes(); ++a) whole.emplace_back(a, OpCut{});
      place(std::move(op), kNone, whole);
      return copies_[{id, reader.stage}] = out;
    }
    // Sums over micro-batches move once, when they are whole: a stage never waits for a later one's parts.
    if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
    for (size_t a = 1; a < axes(); ++a) {
      if (b_.out.size(a, b_.out.stage(id)) == b_.out.size(a, reader.stage)) continue;
      if (placement(id, a) == Placement::kPartial) id = bring(reader, id, a, {});
    }
    return b_.latest(b_.transfer(id, reader.stage));  // it may have been a part of a sum and reduced since
  }

  // ---- time: what the body needs of the whole batch -------------------------------------------------------------
  // An op with operands that differ from micro-batch to micro-batch belongs to the body. Operands that exist only after
  // the body (sums over micro-batches) are then computed from the whole batch in the prologue, when no parameter is
  // involved.
  void hoist_operands(Op& op) {
    if (micro_batches() == 1) return;
    const auto any = [&](Placement p) {
      return std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return placement(id, kTime) == p; });
    };
    if (!any(Placement::kShard)) {
      // A partial value beside a finished sum goes on in the epilogue.
      const bool late = std::any_of(op.inputs.begin(), op.inputs.end(),
                                    [&](TensorId id) { return b_.region(id) == Region::kEpilogue; });
      for (TensorId& id : op.inputs)
        if (late && placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
      return;
    }
    for (TensorId& id : op.inputs) {
      if (id == kNone || placement(id, kTime) == Placement::kShard) continue;
      if (placement(id, kTime) == Placement::kPartial || b_.region(id) == Region::kEpilogue) id = whole(op, id, 0);
    }
  }

  TensorId whole(const Op& user, TensorId id, int depth) {
    if (const auto known = wholes_.find(id); known != wholes_.end()) return known->second;
    if (!b_.out.time_varies(id) && b_.region(id) != Region::kEpilogue) return id;
    TensorId out = kNone;
    if (g().tensor(id).kind == TensorKind::kInput) {
      out = b_.input_form(id, b_.out.stage(id), true);
    } else {
      const OpId producer = b_.producer(id);
      const Op source = producer == kNone ? Op{} : g().op(producer);
      if (producer == kNone || depends_on_variable(id) || depth > 4 * kDeepest || has_flag(source.code, kUpdateOp)) {
        const bool stats = source.code == OpCode::k_batch_stats || user.code == OpCode::k_batch_norm_apply;
        throw invalid(
            "op '{}' ({}) uses '{}', which mixes all samples of the batch, before the loss; with {} micro-batches no "
            "more than a "
            "part of them is there. Plan with one micro-batch (accumulation 1){}",
            user.name, def(user.code).name, g().tensor(id).name, micro_batches(),
            stats ? fmt::format(", or set the attribute 'groups' of the batch norm to {} (or a multiple), so that a "
                                "micro-batch is a "
                                "union of whole groups (it is 1)",
                                micro_batches())
                  : std::string())
            .at_op(user.name)
            .at_scope(g().scope_path(user.scope));
      }
      if (source.code == OpCode::k_accumulate) {
        out = whole(user, source.inputs[1], depth + 1);
      } else if (source.code == OpCode::k_all_reduce) {
        const size_t along = static_cast<size_t>(attr_int(source.attrs, "group")) + 1;
        const TensorId x = whole(user, source.inputs[0], depth + 1);
        out = placement(x, along) == Placement::kPartial ? b_.reduce(x, along) : x;
      } else if (source.code == OpCode::k_transfer) {
        Op reader = user;
        reader.stage = source.stage;
        out = at_stage(whole(user, source.inputs[0], depth + 1), reader);
      } else if (source.code == OpCode::k_local_slice || has_flag(source.code, kCollective)) {
        const size_t along = static_cast<size_t>(attr_int(source.attrs, "group")) + 1;
        const AxisLayout want = b_.out.at(id, along);
        out = bring(source, whole(user, source.inputs[0], depth + 1), along, want);
      } else {
        Op op = source;
        for (TensorId& input : op.inputs)
          if (input != kNone) input = whole(user, input, depth + 1);
        op.name += ".whole";
        const auto at =
            static_cast<size_t>(std::find(source.outputs.begin(), source.outputs.end(), id) - source.outputs.begin());
        for (TensorId& o : op.outputs)
          if (o != kNone) o = b_.like(o, ".whole");
        out = op.outputs[at];
        const std::vector<TensorId> old = source.outputs, fresh = op.outputs;
        place(std::move(op), kNone, {});
        for (size_t i = 0; i < old.size(); ++i)
          if (old[i] != kNone) wholes_[old[i]] = fresh[i];
      }
      // The user wants the value itself, not this device's part of a sum.
      if (depth == 0)
        for (size_t a = 1; a < axes(); ++a)
          if (placement(out, a) == Placement::kPartial) out = b_.reduce(out, a);
    }
    return wholes_[id] = out;
  }

  bool depends_on_variable(TensorId id) {
    std::vector<TensorId> todo{id};
    std::set<TensorId> seen{id};
    while (!todo.empty()) {
      const TensorId t = todo.back();
      todo.pop_back();
      if (g().tensor(t).kind == TensorKind::kVariable) return true;
      const OpId producer = b_.producer(t);
      if (producer == kNone) continue;
      for (const TensorId input : g().op(producer).inputs)
        if (input != kNone && seen.insert(input).second) todo.push_back(input);
    }
    return false;
  }

  // ---- the ends -------------------------------------------------------------------------------------------------
  // Stands for whoever reads the tensor at the end of the step, in messages.
  Op reader_of(TensorId id, int32_t stage) {
    Op op;
    op.code = OpCode::k_stop_gradient;
    op.name = g().tensor(id).name;
    op.phase = Phase::kUpdate;
    op.stage = stage;
    return op;
  }

  TensorId lying(TensorId id, const Layout& layout, int32_t stage) {
    id = b_.latest(id);
    const Op end = reader_of(id, stage);
    if (tasks().stages() > 1) id = at_stage(id, end);
    // Gathered from the inside out, cut from the outside in.
    for (size_t a = axes(); a-- > 0;)
      if (layout.axes[a].placement == Placement::kReplicate) id = bring(end, id, a, {});
    for (size_t a = 0; a < axes(); ++a) id = bring(end, id, a, layout.axes[a]);
    return id;
  }
  TensorId everywhere(TensorId id) {
    return lying(id, Layout{std::vector<AxisLayout>(axes())}, b_.out.stage(b_.latest(id)));
  }

  // Sums are finished; samples stay where they are and are put together by the session.
  TensorId fetchable(TensorId id) {
    id = b_.latest(id);
    for (size_t a = 0; a < axes(); ++a)
      if (placement(id, a) == Placement::kPartial) id = b_.reduce(id, a);
    const bool in_time = placement(id, kTime) == Placement::kShard;
    for (size_t a = axes(); a-- > 1;) {
      if (placement(id, a) != Placement::kShard) continue;
      const AxisLayout l = b_.out.at(id, a);
      if (!l.samples) continue;  // the session puts the parts together
      if (l.digit.outer != 1 || (!in_time && micro_batches() > 1)) id = b_.gather(id, a);
    }
    if (in_time && b_.out.at(id, kTime).digit.outer != 1)
      throw unimplemented(
          "fetching '{}' with {} micro-batches: its samples are not the outermost part of a dimension; transpose it "
          "first",
          g().tensor(id).name, micro_batches());
    return id;
  }

  void finish() {
    LayoutGraph& out = b_.out;
    std::set<std::string> names;
    const auto fetch = [&](const std::string& name, TensorId id) {
      if (names.insert(name).second) out.fetches.push_back({name, fetchable(id)});
    };
    if (g().training.loss != kNone) fetch("loss", g().training.loss);
    for (const NamedTensor& o : std::vector<NamedTensor>(g().outputs)) fetch(o.name, o.tensor);
    for (const std::string& name : options_.fetch_gradients) {
      const auto it = std::find_if(g().gradients.begin(), g().gradients.end(),
                                   [&](const NamedTensor& n) { return n.name == name; });
      if (it == g().gradients.end())
        throw error(Code::kNotFound, "fetch 'grad:{}': no trained parameter has this name", name);
      if (names.insert("grad:" + name).second) out.fetches.push_back({"grad:" + name, everywhere(it->tensor)});
    }
    bool updates = false;
    for (Variable& v : g().variables)
      if (v.next != kNone && v.next != v.tensor) {
        v.next = lying(v.next, home_.at(v.tensor), b_.out.stage(v.tensor));
        updates = true;
      }
    // Every device looks at the loss before it changes anything.
    if (updates && tasks().meshes.size() > 1 && g().training.loss != kNone) {
      const TensorId loss = out.fetches[0].tensor;
      std::set<int32_t> there{tasks().mesh_of_stage[static_cast<size_t>(b_.out.stage(loss))]};
      for (int32_t s = 0; s < static_cast<int32_t>(tasks().stages()); ++s)
        if (there.insert(tasks().mesh_of_stage[static_cast<size_t>(s)]).second)
          out.fetches.push_back({"loss", b_.transfer(loss, s)});
    }
    b_.finish();
  }

  const PropagateOptions& options_;
  BridgeBuilder b_;
  std::vector<OpId> first_user_;
  std::vector<OpCut> samples_;                 // per op: along a replica axis
  std::vector<std::vector<OpCut>> cuts_;       // per axis and op: along a split axis
  std::map<TensorId, Layout> home_;            // of variables
  std::map<TensorId, TensorId> parameter_of_;  // of a gradient
  std::map<TensorId, TensorId> adjoint_of_;    // of a result of the backward pass: the forward tensor
  std::set<std::pair<TensorId, int32_t>> input_forms_;
  std::map<std::pair<TensorId, int32_t>, TensorId> copies_;
  std::map<std::tuple<TensorId, size_t, int, int64_t, int64_t, bool, WindowRead>, TensorId> slices_;
  std::map<TensorId, TensorId> wholes_;
};

}  // namespace

LayoutGraph propagate(const Graph& graph, const TaskGraphs& tasks, const PropagateOptions& options) {
  return Propagator(graph, tasks, options).run();
}

}  // namespace whale
