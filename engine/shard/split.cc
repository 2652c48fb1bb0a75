#include "shard/split.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "ops/cost.h"
#include "task/factor_names.h"
#include "task/strategy.h"
#include "task/window.h"

namespace whale {
namespace {

constexpr size_t kStates = 24;

struct Code {
  Placement placement = Placement::kReplicate;
  SubAxis sub_axis;
  bool whole = false;    // beside the parts: it was gathered before
  bool charged = false;  // the sum of its partial gradients is paid for
  bool open = false;     // a parameter that nobody has used: its storage sharding is still free
};

struct State {
  double cost = 0;
  double alone = 0;   // where few layers stand for all: what these few cost; else `cost`
  int32_t back = -1;  // index of the step before in the trail
  // By tensor; what is not here is at its storage sharding, or replicated.
  std::vector<std::pair<TensorId, Code>> live;
};

struct Step {
  int32_t back;
  OpCut cut;
};

// What a cut of an op asks of its operands and makes of its results, in whatever state.
struct Asked {
  struct Read {
    TensorId id;
    SubAxis want;
    double times;                 // that the model moves it
    double rounds = 0, halo = 0;  // seconds, beside those of the reshard
  };
  OpCut cut;
  std::vector<Read> reads;
  std::vector<std::pair<TensorId, Code>> made;
};

class Chooser {
 public:
  explicit Chooser(const SplitProblem& p) : p_(p), g_(p.graph), cost_(p.tasks.cost) {}

  std::vector<OpCut> run() {
    std::vector<OpCut> cuts(g_.ops.size());
    if (!any_split()) return cuts;
    check_names();
    find_uses();
    sub_axes_ = candidate_sub_axes(g_, p_.factors);
    find_storage_shardings();
    std::vector<State> states(1), next;
    std::vector<size_t> order;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      if (g_.ops[i].phase != Phase::kForward) continue;
      order.push_back(i);
      advance(states, i, next);
      std::swap(states, next);
    }
    const auto best =
        std::min_element(states.begin(), states.end(), [](const State& a, const State& b) { return a.cost < b.cost; });
    int32_t at = best->back;
    for (size_t k = order.size(); k-- > 0; at = trail_[at].back) cuts[order[k]] = trail_[at].cut;
    return cuts;
  }

 private:
  AxisRole role(const Op& op) const { return p_.tasks.task(op).roles[p_.axis - 1]; }
  int64_t ways(const Op& op) const { return p_.tasks.mesh(op.stage).axes[p_.axis - 1].size; }

  bool any_split() const {
    return std::any_of(g_.ops.begin(), g_.ops.end(), [&](const Op& op) {
      return op.phase == Phase::kForward && ways(op) > 1 && role(op) != AxisRole::kReplica;
    });
  }

  // A factor that is asked for by name is one of some op in the scope; of a pipeline's stages, of some stage.
  void check_names() {
    struct Names {
      const TaskGraph* task = nullptr;
      std::set<std::string> known;
      std::string needed;  // the word stands for a name where some op of the model has this factor too
      bool found = false;
    };
    std::map<std::string, Names> asked;
    for (const Op& op : g_.ops) {
      const TaskGraph& task = p_.tasks.task(op);
      const std::string& wanted = task.factors[p_.axis - 1];
      if (op.phase != Phase::kForward || wanted.empty()) continue;
      Names& names = asked[fmt::format("{} in {}", wanted, to_string(task.nest))];
      if (!names.task) names.task = &task;
      for (const Factor& f : p_.factors.of(op).list) {
        if (f.extent > 1) names.known.insert(f.name);
        if (!is_named(f.name, wanted)) continue;
        if (const std::string needed = needed_by(f.name, wanted); needed.empty())
          names.found = true;
        else
          names.needed = needed;
      }
    }
    for (const auto& [text, names] : asked)
      if (!names.found && !model_has(names.needed))
        throw invalid(
            "scope '{}' ({}): no op inside has a factor '{}' to split; they have {}; leave it out, and the cheapest is "
            "taken",
            to_string(names.task->nest), names.task->path, names.task->factors[p_.axis - 1],
            fmt::join(words_of(names.known), ", "))
            .at_scope(names.task->path);
  }

  bool model_has(const std::string& factor) {
    if (factor.empty()) return false;
    return std::any_of(g_.ops.begin(), g_.ops.end(), [&](const Op& op) {
      if (op.phase != Phase::kForward) return false;
      const Factors& factors = p_.factors.of(op);
      return std::any_of(factors.list.begin(), factors.list.end(), [&](const Factor& f) { return f.name == factor; });
    });
  }

  void find_uses() {
    last_.assign(g_.tensors.size(), 0);
    is_variable_.assign(g_.tensors.size(), 0);
    per_sample_.assign(g_.tensors.size(), 0);
    for (const Tensor& t : g_.tensors) bytes_.push_back(static_cast<double>(element_count(t.dims) * size_of(t.dtype)));
    for (const Variable& v : g_.variables) is_variable_[v.tensor] = 1;
    for (const TensorId id : g_.inputs) per_sample_[id] = g_.tensor(id).batch_dim >= 0;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Op& op = g_.ops[i];
      if (op.phase != Phase::kForward) continue;
      bool samples = false;
      for (const TensorId id : op.inputs)
        if (id != kNone) last_[id] = i, samples |= per_sample_[id] != 0;
      for (const TensorId id : op.outputs)
        if (id != kNone) per_sample_[id] = samples;
    }
  }

  // Where variables are that nobody has used.
  void find_storage_shardings() {
    if (!p_.storage_shardings) return;
    for (const Variable& v : g_.variables) {
      const auto storage_sharding = p_.storage_shardings->find(g_.tensor(v.tensor).name);
      if (storage_sharding == p_.storage_shardings->end()) continue;
      const AxisSharding& l = storage_sharding->second.sharding->axes[p_.axis - 1];
      if (l.placement == Placement::kShard)
        storage_shardings_.emplace(v.tensor, Code{Placement::kShard, l.sub_axis, false, false, false});
    }
  }

  // Seconds to move what a device would get of the tensor, `share` of its bytes.
  double seconds(TensorId id, const Op& op, double share) const {
    double bytes = bytes_[id] * share;
    if (per_sample_[id]) {
      const TaskGraph& task = p_.tasks.task(op);
      for (size_t a = 0; a < task.roles.size(); ++a)
        if (task.roles[a] == AxisRole::kReplica) bytes /= static_cast<double>(p_.tasks.mesh(op.stage).axes[a].size);
    }
    return link_seconds(bytes, 1, p_.tasks.link(op.stage, p_.axis - 1));
  }

  Code find(const State& state, TensorId id) const {
    const auto at = std::lower_bound(state.live.begin(), state.live.end(), id,
                                     [](const auto& entry, TensorId want) { return entry.first < want; });
    if (at != state.live.end() && at->first == id) return at->second;
    if (const auto storage_sharding = storage_shardings_.find(id); storage_sharding != storage_shardings_.end())
      return storage_sharding->second;
    Code code;
    code.open = is_variable_[id] && !p_.storage_shardings;
    return code;
  }
  // Where it is kept from now on.
  Code& place(State& state, TensorId id) const {
    const auto at = std::lower_bound(state.live.begin(), state.live.end(), id,
                                     [](const auto& entry, TensorId want) { return entry.first < want; });
    if (at != state.live.end() && at->first == id) return at->second;
    return state.live.insert(at, {id, find(state, id)})->second;
  }

  static void pay(State& state, double times, double seconds) { state.cost += times * seconds, state.alone += seconds; }

  // How often the model moves such an operand to such an op.
  double times(TensorId id, const Op& op) const {
    const LayerShare mine = p_.tasks.share(op);
    const OpId made = g_.tensor(id).producer;
    if (mine.layer < 0 || made == kNone) return mine.layers;
    const int32_t from = p_.tasks.share(g_.op(made)).layer;
    if (from < 0 || from == mine.layer) return from < 0 ? 1 : mine.layers;
    return g_.op(made).stage == op.stage ? mine.steps : mine.entries;
  }

  // Brings an operand to where the op needs it; returns the cost.
  double reshard_cost(Code& code, TensorId id, const Op& op, const SubAxis& want, bool cut) const {
    const auto share = [n = ways(op)](Reshard reshard) { return received_bytes(reshard, 1, n); };
    const double part = share({}), passes = p_.trains ? 2 : 1;
    const bool variable = is_variable_[id];
    if (code.open) {
      code.open = false;
      if (want.present()) {
        code.placement = Placement::kShard, code.sub_axis = want;
        return 0;
      }
      const double bytes = bytes_[id];
      const double update = p_.trains ? pass_seconds(cost_.update_passes * bytes * part, cost_.device) : 0;
      const double held = cost_.held_seconds((p_.trains ? cost_.held_copies : 1) * bytes * part);
      return update + held + added(bytes * part) + (cut && p_.trains ? seconds(id, op, share({.sum = true})) : 0);
    }
    if (want.present()) {
      switch (code.placement) {
        case Placement::kShard:
          if (code.sub_axis == want) return 0;
          if (code.whole) return p_.trains ? seconds(id, op, part) : 0;
          return passes * seconds(id, op, share({.cut = true}));
        case Placement::kReplicate: {
          const bool of_samples = per_sample_[id] && depends_on_parameter(id);
          const bool gradient = p_.trains && (variable || of_samples) && is_float(g_.tensor(id).dtype);
          return gradient ? seconds(id, op, part) : 0;
        }
        case Placement::kPartial:
          code.placement = Placement::kShard, code.sub_axis = want;
          return passes * seconds(id, op, part);
      }
    }
    double cost = 0;
    if (code.placement == Placement::kPartial) {
      code.placement = Placement::kReplicate;
      cost += seconds(id, op, share({.sum = true}));
    } else if (code.placement == Placement::kShard && !code.whole) {
      code.whole = true;
      cost += passes * seconds(id, op, part);
      if (p_.micro_batches > 1 && !per_sample_[id]) {  // over all of them
        const double bytes = bytes_[id];
        cost += cost_.held_seconds((p_.trains ? cost_.gathered_copies : 1) * bytes * part) + added(bytes * part);
      }
      return cost;  // the adjoint of the gather sums the gradients
    }
    if (cut && p_.trains && !code.charged && code.placement == Placement::kReplicate && is_float(g_.tensor(id).dtype) &&
        (variable || depends_on_parameter(id))) {
      code.charged = true;
      cost += seconds(id, op, share({.sum = true}));
    }
    return cost;
  }
  // To add a gradient up over micro-batches.
  double added(double bytes) const {
    if (!p_.trains || p_.micro_batches == 1) return 0;
    return pass_seconds(static_cast<double>(p_.micro_batches) * cost_.add_passes * bytes, cost_.device);
  }
  bool depends_on_parameter(TensorId id) const { return g_.tensor(id).kind == TensorKind::kValue; }

  std::vector<OpCut> candidates(size_t i, const Factors& factors) const {
    const Op& op = g_.ops[i];
    std::vector<OpCut> out;
    const int64_t n = ways(op);
    const TaskGraph& task = p_.tasks.task(op);
    const std::string& wanted = task.factors[p_.axis - 1];
    bool named = false;
    for (const Factor& f : factors.list) named |= !wanted.empty() && is_named(f.name, wanted);
    for (size_t k = 0; k < factors.list.size(); ++k) {
      const Factor& f = factors.list[k];
      if (f.extent <= 1 || (named && !is_named(f.name, wanted))) continue;
      std::vector<SubAxisPart> subs{{1, 1}};
      const auto look = [&](TensorId id, const SubAxis& whole) {
        if (id == kNone || !whole.present() || f.kind == FactorKind::kWindow) return;
        for (const SubAxis& d : sub_axes_[id]) {
          SubAxisPart sub;
          if (find_sub_axis_part(whole, f.extent, d, extent_of(g_.tensor(id).dims, d), sub) &&
              std::find(subs.begin(), subs.end(), sub) == subs.end())
            subs.push_back(sub);
        }
      };
      for (size_t x = 0; x < op.inputs.size() && x < f.inputs.size(); ++x) look(op.inputs[x], f.inputs[x]);
      for (size_t y = 0; y < op.outputs.size() && y < f.outputs.size(); ++y) look(op.outputs[y], f.outputs[y]);
      for (const SubAxisPart& sub : subs) {
        const int64_t extent = f.extent / (sub.outer * sub.inner);
        if (extent < (named ? 2 : n) || !fits(op, f, sub) || conflicts(i, factors, k, sub)) continue;
        out.push_back({static_cast<int>(k), sub});
      }
    }
    if (!named || out.empty()) out.push_back({});
    return out;
  }

  const MeshAxis& axis(const Op& op) const { return p_.tasks.mesh(op.stage).axes[p_.axis - 1]; }
  bool fits(const Op& op, const Factor& f, const SubAxisPart& sub) const {
    return can_cut(op, f, sub) && (f.kind != FactorKind::kWindow || window_fits(f.window, axis(op)));
  }

  // With where the samples are, and with what earlier axes cut.
  bool conflicts(size_t i, const Factors& factors, size_t k, const SubAxisPart& sub) const {
    const Op& op = g_.ops[i];
    const auto clash = [&](const OpCut& other, bool same_is_legal) {
      if (!other.present()) return false;
      const Factor &a = factors.list[k], &b = factors.list[other.factor];
      const auto operand = [&](TensorId id, const SubAxis& x, const SubAxis& y) {
        if (id == kNone || !x.present() || !y.present()) return false;
        const SubAxis dx = sub_axis_part(x, sub), dy = sub_axis_part(y, other.sub);
        if (a.kind == FactorKind::kWindow && dx.dim == dy.dim) return true;
        if (dx == dy) return !same_is_legal;
        return !compatible(g_.tensor(id).dims, dx, dy);
      };
      for (size_t x = 0; x < op.inputs.size() && x < a.inputs.size(); ++x)
        if (operand(op.inputs[x], a.inputs[x], b.inputs[x])) return true;
      for (size_t y = 0; y < op.outputs.size() && y < a.outputs.size(); ++y)
        if (operand(op.outputs[y], a.outputs[y], b.outputs[y])) return true;
      return false;
    };
    if (clash(p_.samples[i], false)) return true;
    for (const auto& axis : p_.taken)
      if (clash(axis[i], true)) return true;
    return false;
  }

  // The factor that an operand's cut already is; `most`: of so many parts.
  void add_followed(const State& state, size_t i, const Factors& factors, int64_t most, std::vector<OpCut>& out) const {
    const Op& op = g_.ops[i];
    for (size_t x = 0; x < op.inputs.size(); ++x) {
      if (op.inputs[x] == kNone) continue;
      const Code code = find(state, op.inputs[x]);
      if (code.placement != Placement::kShard) continue;
      for (size_t k = 0; k < factors.list.size(); ++k) {
        const Factor& f = factors.list[k];
        OpCut cut{static_cast<int>(k), {}};
        const int64_t extent = extent_of(g_.tensor(op.inputs[x]).dims, code.sub_axis);
        if (extent <= most && cut_of_operand(f, x, code.sub_axis, extent, cut.sub) && fits(op, f, cut.sub) &&
            !conflicts(i, factors, k, cut.sub) && std::find(out.begin(), out.end(), cut) == out.end())
          out.push_back(cut);
      }
    }
  }

  // `out`: what it held before goes, its memory stays.
  void advance(const std::vector<State>& states, size_t i, std::vector<State>& out) {
    const Op& op = g_.ops[i];
    const int64_t n = ways(op);
    const Factors& factors = p_.factors.of(op);
    const AxisRole what = role(op);
    // What is asked for by name may have fewer parts than there are devices (experts): ops between those that have it
    // go along, though none would begin so.
    const bool named = what == AxisRole::kSplit && !p_.tasks.task(op).factors[p_.axis - 1].empty();
    std::vector<OpCut> fixed;
    if (n > 1 && what == AxisRole::kSplit)
      fixed = candidates(i, factors);
    else if (n > 1 && what == AxisRole::kReplica && p_.samples[i].present())
      fixed = {p_.samples[i]};
    else
      fixed = {{}};
    const double work = op_seconds(cost_of(g_, op), cost_.device) * (p_.trains ? cost_.passes : 1);
    const double layers = p_.tasks.share(op).layers;
    std::vector<size_t> known;  // of each state in `out`, its hash
    std::vector<OpCut> tries;
    std::vector<Asked> asked;
    const auto asked_by = [&](const OpCut& cut) -> const Asked& {
      const auto same = std::ranges::find(asked, cut, &Asked::cut);
      return same == asked.end() ? asked.emplace_back(ask(op, factors, cut)) : *same;
    };
    for (const State& state : states) {
      tries = fixed;
      if (n > 1 && (what == AxisRole::kFollow || named))
        add_followed(state, i, factors, named ? n - 1 : std::numeric_limits<int64_t>::max(), tries);
      for (const OpCut& cut : tries) {
        State& next = tried_;
        next = state;
        pay(next, layers, cut.present() ? work / static_cast<double>(n) : work);
        if (n == 1) {
          next.live.clear();  // another stage: nothing is cut there
        } else if (cut.present()) {
          apply(next, op, asked_by(cut));
        } else {
          pass(next, op, factors);
        }
        std::erase_if(next.live, [&](const auto& entry) {
          return last_[entry.first] <= i || (entry.second.placement == Placement::kReplicate && !entry.second.charged &&
                                             !is_variable_[entry.first]);
        });
        const size_t key = hash(next.live);
        const auto at = static_cast<size_t>(std::find(known.begin(), known.end(), key) - known.begin());
        if (at < known.size() && !(next.cost < out[at].cost * (1 - 1e-12))) continue;
        if (at == known.size()) known.push_back(key);
        if (at == out.size()) add_state(out);
        trail_.push_back({state.back, cut});
        next.back = static_cast<int32_t>(trail_.size()) - 1;
        out[at] = next;
      }
    }
    drop_states(out, known.size());
    if (out.size() > kStates) {  // as of a model of these layers: what many count for hides what one of them decides
      std::stable_sort(out.begin(), out.end(), [](const State& a, const State& b) { return a.alone < b.alone; });
      drop_states(out, kStates);
    }
  }
  // States that go leave their memory to those that come.
  void add_state(std::vector<State>& states) {
    if (spare_.empty()) spare_.emplace_back();
    states.push_back(std::move(spare_.back()));
    spare_.pop_back();
  }
  void drop_states(std::vector<State>& states, size_t left) {
    for (; states.size() > left; states.pop_back()) spare_.push_back(std::move(states.back()));
  }

  Asked ask(const Op& op, const Factors& factors, const OpCut& cut) const {
    Asked out{.cut = cut, .reads = {}, .made = {}};
    const Factor& f = factors.list[cut.factor];
    const bool named = asks_for(p_.tasks, op, p_.axis, f);
    for (size_t x = 0; x < op.inputs.size(); ++x) {
      const TensorId id = op.inputs[x];
      if (id == kNone || g_.tensor(id).kind == TensorKind::kStep) continue;
      const bool carries = x < f.inputs.size() && f.inputs[x].present();
      Asked::Read& read = out.reads.emplace_back(Asked::Read{.id = id, .want = {}, .times = times(id, op)});
      if (carries) read.want = sub_axis_part(f.inputs[x], cut.sub);
      if (const SubAxis piece = streamed_sub_axis(factors, x); named && !carries && piece.present()) {
        // It goes round: as much as gathering, from a cut of it.
        read.want = piece;
        read.rounds = (p_.trains ? 2 : 1) * seconds(id, op, received_bytes({}, 1, ways(op)));
      }
      if (carries && f.reads_through(x)) read.halo = halo_seconds(id, op, f.window);
    }
    for (size_t y = 0; y < op.outputs.size(); ++y) {
      if (op.outputs[y] == kNone) continue;
      Code code;
      if (f.outputs[y].present())
        code.placement = Placement::kShard, code.sub_axis = sub_axis_part(f.outputs[y], cut.sub);
      else
        code.placement = Placement::kPartial;
      out.made.emplace_back(op.outputs[y], code);
    }
    return out;
  }

  void apply(State& state, const Op& op, const Asked& asked) const {
    for (const Asked::Read& read : asked.reads) {
      pay(state, read.times, reshard_cost(place(state, read.id), read.id, op, read.want, true) + read.rounds);
      pay(state, read.times, read.halo);
    }
    for (const auto& [id, code] : asked.made) place(state, id) = code;
  }

  // Rows of neighbours, forward and (as those of the gradient) backward; a whole tensor is merely cut.
  double halo_seconds(TensorId id, const Op& op, const WindowRead& window) const {
    const int64_t rows = halo_of(window, axis(op));
    if (rows == 0) return 0;
    return (p_.trains ? 2 : 1) * seconds(id, op, static_cast<double>(rows) / static_cast<double>(window.source));
  }

  void pass(State& state, const Op& op, const Factors& factors) const {
    std::vector<int> partial;
    bool parts = false;
    for (size_t x = 0; x < op.inputs.size(); ++x) {
      if (op.inputs[x] == kNone) continue;
      const Code code = find(state, op.inputs[x]);
      if (code.placement == Placement::kPartial) partial.push_back(static_cast<int>(x));
      parts |= code.placement == Placement::kShard;
    }
    if (!partial.empty() && !parts &&
        std::find(factors.linear.begin(), factors.linear.end(), partial) != factors.linear.end()) {
      Code code;
      code.placement = Placement::kPartial;
      for (const TensorId y : op.outputs)
        if (y != kNone) place(state, y) = code;
      return;
    }
    for (const TensorId id : op.inputs) {
      if (id == kNone || g_.tensor(id).kind == TensorKind::kStep) continue;
      pay(state, times(id, op), reshard_cost(place(state, id), id, op, {}, false));
    }
  }

  static size_t hash(const std::vector<std::pair<TensorId, Code>>& live) {
    size_t h = 1469598103934665603ull;
    const auto mix = [&](size_t v) { h = (h ^ v) * 1099511628211ull; };
    for (const auto& [id, c] : live) {
      mix(static_cast<size_t>(id) + 1);
      mix(static_cast<size_t>(c.placement) * 8 + (c.whole ? 4 : 0) + (c.charged ? 2 : 0) + (c.open ? 1 : 0));
      mix(static_cast<size_t>(c.sub_axis.dim) + 1);
      mix(static_cast<size_t>(c.sub_axis.outer));
      mix(static_cast<size_t>(c.sub_axis.inner));
    }
    return h;
  }

  const SplitProblem& p_;
  const Graph& g_;
  const CostModel& cost_;
  std::vector<size_t> last_;
  std::vector<double> bytes_;  // of each tensor, whole
  std::vector<char> is_variable_, per_sample_;
  std::unordered_map<TensorId, Code> storage_shardings_;  // of variables that are fixed already and cut
  std::vector<SubAxes> sub_axes_;
  std::vector<Step> trail_;
  State tried_;
  std::vector<State> spare_;
};

}  // namespace

std::vector<OpCut> choose_split(const SplitProblem& problem) { return Chooser(problem).run(); }

}  // namespace whale
