#include "task/condense.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>

#include "schedule/schedule.h"

namespace whale {
namespace {

constexpr int64_t kFewest = 4;  // periods that make a run
constexpr size_t kTries = 8;    // lengths of a period that are tried at an op
constexpr double kWorth = 0.5;  // of the ops must go

// Layers that repeat: `count` periods of `length` ops each, from op `begin` on.
struct Run {
  size_t begin = 0, length = 0;
  int64_t count = 0;
  size_t end() const { return begin + length * static_cast<size_t>(count); }
};

class Repeats {
 public:
  Repeats(const Graph& graph, const TaskGraphs& tasks) : g_(graph), tasks_(tasks) {
    first_use_.assign(g_.tensors.size(), kNone), last_use_ = first_use_;
    trained_.assign(g_.tensors.size(), 0);
    variable_.assign(g_.tensors.size(), nullptr);
    for (const Variable& v : g_.variables) variable_[v.tensor] = &v;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      for (const TensorId id : g_.ops[i].inputs)
        if (id != kNone && first_use_[id] == kNone) first_use_[id] = static_cast<OpId>(i);
      for (const TensorId id : g_.ops[i].inputs) {
        if (id == kNone) continue;
        last_use_[id] = static_cast<OpId>(i);
        const bool trained = trained_[id] || g_.tensor(id).kind == TensorKind::kVariable;
        for (const TensorId y : g_.ops[i].outputs)
          if (y != kNone && trained) trained_[y] = 1;
      }
      looks_.push_back(look_of(g_.ops[i]));
    }
  }

  std::vector<Run> runs() const {
    const size_t n = g_.ops.size();
    std::vector<size_t> next(n, n);  // op that looks alike
    std::unordered_map<size_t, size_t> seen;
    for (size_t i = n; i-- > 0;) {
      const auto [at, fresh] = seen.try_emplace(looks_[i], i);
      if (!fresh) next[i] = at->second, at->second = i;
    }
    std::vector<Run> out;
    for (size_t i = 0; i < n;) {
      Run best;
      size_t j = next[i];
      for (size_t t = 0; t < kTries && j < n; ++t, j = next[j]) {
        const Run run = run_at(i, j - i);
        if (run.count >= kFewest && run.end() > best.end()) best = run;
      }
      if (best.count) out.push_back(best);
      i = best.count ? best.end() : i + 1;
    }
    return out;
  }

 private:
  size_t look_of(const Op& op) const {
    size_t h = static_cast<size_t>(op.code);
    const auto mix = [&](size_t v) { h = (h ^ v) * 1099511628211ull; };
    mix(op.attrs.size());
    for (const auto* list : {&op.inputs, &op.outputs})
      for (const TensorId id : *list) {
        mix(static_cast<size_t>(id == kNone));
        if (id == kNone) continue;
        mix(static_cast<size_t>(g_.tensor(id).dtype) * 4 + static_cast<size_t>(g_.tensor(id).kind));
        for (const int64_t d : g_.tensor(id).dims) mix(static_cast<size_t>(d));
      }
    return h;
  }

  Run run_at(size_t begin, size_t length) const {
    size_t k = begin;
    while (k + length < g_.ops.size() && alike(begin, length, k)) ++k;
    return {begin, length, static_cast<int64_t>((k - begin) / length) + 1};
  }

  // Op k is the one a period later. What the first period takes from before the run, the others take from each other.
  bool alike(size_t begin, size_t length, size_t k) const {
    const Op &a = g_.ops[k], &b = g_.ops[k + length];
    if (looks_[k] != looks_[k + length] || a.code != b.code || a.attrs != b.attrs || !placed_alike(a, b)) return false;
    for (size_t x = 0; x < a.inputs.size(); ++x) {
      const TensorId p = a.inputs[x], q = b.inputs[x];
      if (p == q && p != kNone && (trained_[p] || g_.tensor(p).kind == TensorKind::kVariable))
        return false;  // its gradient is a sum over the layers
      if (p == q) continue;
      if (p == kNone || q == kNone) return false;
      const Tensor &from = g_.tensor(p), &to = g_.tensor(q);
      if (from.kind == TensorKind::kVariable ? !variables_alike(p, q, length) : from.kind != TensorKind::kValue)
        return false;
      if (from.kind != TensorKind::kValue) continue;
      if (from.output != to.output) return false;
      const auto made = static_cast<size_t>(from.producer), later = static_cast<size_t>(to.producer);
      const bool carried = k < begin + length && made < begin && later >= begin && later < begin + length;
      if (later - made != length && !carried) return false;
    }
    return true;
  }

  bool variables_alike(TensorId p, TensorId q, size_t length) const {
    const Variable &a = *variable_[p], &b = *variable_[q];
    const auto span = [&](TensorId id) { return last_use_[id] - first_use_[id]; };
    return a.role == b.role && a.trainable == b.trainable && a.decay == b.decay &&
           (a.next == kNone) == (b.next == kNone) && span(p) == span(q) && span(p) < static_cast<OpId>(length) &&
           first_use_[q] - first_use_[p] == static_cast<OpId>(length);
  }

  bool placed_alike(const Op& a, const Op& b) const {
    const TaskGraph &s = tasks_.task(a), &t = tasks_.task(b);
    return &s == &t || (s.roles == t.roles && s.factors == t.factors);
  }

  const Graph& g_;
  const TaskGraphs& tasks_;
  std::vector<OpId> first_use_, last_use_;
  std::vector<char> trained_;  // per tensor: made of variables
  std::vector<const Variable*> variable_;
  std::vector<size_t> looks_;
};

class Condenser {
 public:
  Condenser(const Graph& graph, const TaskGraphs& tasks, double least_bytes, size_t more,
            const std::vector<int32_t>& kinds)
      : g_(graph),
        tasks_(tasks),
        more_(more),
        kinds_(kinds),
        runs_(Repeats(graph, tasks).runs()),
        out_{{}, TaskGraphs(tasks.cost), {}, {}, {}} {
    std::erase_if(runs_, [&](const Run& run) { return parameter_bytes(run) < least_bytes; });
  }

  std::optional<Condensed> run() {
    const auto whole = [](char by) { return by != 0; };
    const bool vee =
        !tasks_.schedule.empty() && schedule_rule(tasks_.schedule).placement == VirtualStagePlacement::kVee;
    if (runs_.empty() || vee || std::ranges::any_of(tasks_.by_micro_batch, whole)) return std::nullopt;
    if (!find_parts() || !keep_stages()) return std::nullopt;
    keep_layers();
    const auto staying = static_cast<double>(std::ranges::count(kept_, 1));
    if (staying > kWorth * static_cast<double>(kept_.size()) || !make_graph()) return std::nullopt;
    make_tasks();
    return std::move(out_);
  }

 private:
  // A stage's part of a run: ops [begin, end) of the model, which may begin and end inside of a layer; from `first` on
  // there are whole layers.
  struct Part {
    size_t begin = 0, first = 0, end = 0, layers = 0, kept = 0;
    size_t size() const { return end - begin; }
  };
  // Of one layer on one device, when a split cuts all of them.
  double parameter_bytes(const Run& run) const {
    double bytes = 0;
    std::set<TensorId> seen;
    for (size_t i = run.begin; i < run.begin + run.length; ++i)
      for (const TensorId id : g_.ops[i].inputs)
        if (id != kNone && g_.tensor(id).kind == TensorKind::kVariable && seen.insert(id).second)
          bytes += static_cast<double>(element_count(g_.tensor(id).dims) * size_of(g_.tensor(id).dtype));
    const Op& op = g_.ops[run.begin];
    const std::vector<AxisRole>& roles = tasks_.task(op).roles;
    for (size_t a = 0; a < roles.size(); ++a)
      if (roles[a] != AxisRole::kReplica) bytes /= static_cast<double>(tasks_.mesh(op.stage).axes[a].size);
    return bytes;
  }

  size_t stage(size_t op) const { return static_cast<size_t>(g_.ops[op].stage); }

  bool find_parts() {
    run_of_.assign(g_.ops.size(), -1);
    parts_.assign(tasks_.stages(), std::vector<Part>(runs_.size()));
    for (size_t r = 0; r < runs_.size(); ++r)
      for (size_t i = runs_[r].begin; i < runs_[r].end(); ++i) {
        run_of_[i] = static_cast<int32_t>(r);
        Part& part = parts_[stage(i)][r];
        if (part.size() == 0) part.begin = part.end = i;
        if (part.end++ != i) return false;
      }
    for (std::vector<Part>& of_stage : parts_)
      for (size_t r = 0; r < runs_.size(); ++r) {
        Part& part = of_stage[r];
        const size_t length = runs_[r].length, into = part.size() ? (part.begin - runs_[r].begin) % length : 0;
        part.first = std::min(part.end, part.begin + (into ? length - into : 0));
        part.layers = (part.end - part.first) / length;
      }
    return true;
  }

  std::vector<int32_t> kinds_of(size_t s) const {
    std::vector<int32_t> out;
    for (const int32_t d : tasks_.mesh(static_cast<int32_t>(s)).devices)
      out.push_back(d < 0 || kinds_.empty() ? d < 0 : kinds_[d]);
    return out;
  }

  // Of stages one behind the other that have as much as whole layers of one run and nothing else, the first stays.
  bool keep_stages() {
    constexpr int32_t kEmpty = -1, kMixed = -2;
    std::vector<int32_t> only(tasks_.stages(), kEmpty);  // of which run
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      int32_t& run = only[stage(i)];
      run = run_of_[i] >= 0 && (run == kEmpty || run == run_of_[i]) ? run_of_[i] : kMixed;
    }
    const auto repeats = [&](size_t s) {
      const auto r = static_cast<size_t>(only[s]);
      return only[s] >= 0 && parts_[s][r].size() > 0 && parts_[s][r].size() % runs_[r].length == 0;
    };
    const auto like_before = [&](size_t s) {
      return s > 0 && repeats(s) && repeats(s - 1) && only[s] == only[s - 1] &&
             tasks_.mesh(static_cast<int32_t>(s)).axes == tasks_.mesh(static_cast<int32_t>(s) - 1).axes &&
             kinds_of(s) == kinds_of(s - 1);
    };
    for (size_t s = 0; s < tasks_.stages(); ++s) {
      if (only[s] == kEmpty) return false;
      if (!like_before(s)) stays_.push_back(s);
      out_.stage_like.push_back(static_cast<int32_t>(stays_.size()) - 1);
    }
    return true;
  }

  // The layer that stands for others has one behind it, for which it keeps what all but the last one keep. In a
  // pipeline what lives from pass to pass lives through all of them; elsewhere two before it tell what lives to the end
  // of the backward pass from what their next one still reads.
  void keep_layers() {
    const bool through = tasks_.stages() > 1 && g_.training.accumulation > 1;
    const size_t most = !through ? 4 : schedule_rule(tasks_.schedule).split_backward ? 3 : 2;
    kept_.assign(g_.ops.size(), 0), standing_ = kept_;
    number_.assign(g_.ops.size(), 0), layer_ = number_;
    for (size_t i = 0; i < g_.ops.size(); ++i) kept_[i] = run_of_[i] < 0;
    for (const size_t s : stays_)
      for (size_t r = 0; r < runs_.size(); ++r) {
        Part& part = parts_[s][r];
        const size_t n = part.layers, length = runs_[r].length;
        // A third of a layer behind one shows as much as a whole one.
        const bool between = part.first > part.begin && 3 * (part.end - part.first - n * length) >= length;
        const size_t there = part.kept = std::min(n, (most == 2 && between ? 1 : most) + more_);
        for (size_t i = part.begin; i < part.first; ++i) kept_[i] = 1, layer_[i] = part.begin;
        for (size_t i = part.first; i < part.end; ++i) {
          const size_t at = (i - part.first) / length;
          kept_[i] = at < there || at >= n;
          layer_[i] = part.first + at * length;
          standing_[i] = there > 0 && at == (there < 2 ? 0 : there - 2);
        }
      }
    ops_.resize(runs_.size());
    for (size_t r = 0; r < runs_.size(); ++r)
      for (size_t i = runs_[r].begin; i < runs_[r].end(); ++i) {
        number_[i] = ops_[r].size();
        if (kept_[i]) ops_[r].push_back(i);
      }
    out_.layers.assign(tasks_.stages(), std::vector<int64_t>(runs_.size()));
    for (size_t s = 0; s < tasks_.stages(); ++s)
      for (size_t r = 0; r < runs_.size(); ++r) {
        const size_t n = parts_[s][r].layers;
        const size_t here = parts_[stays_[out_.stage_like[s]]][r].kept;
        out_.layers[s][r] = static_cast<int64_t>(n) - static_cast<int64_t>(here) + (here > 0);
      }
  }

  // What a kept op reads now, or an output shows: ops of a run are as far apart as they were. kNone: it cannot be told.
  TensorId source_of(TensorId id, std::optional<size_t> reader) const {
    const Tensor& t = g_.tensor(id);
    if (t.kind != TensorKind::kValue || run_of_[t.producer] < 0) return id;
    const auto made = static_cast<size_t>(t.producer);
    const auto r = static_cast<size_t>(run_of_[made]);
    const bool inside = reader && run_of_[*reader] == run_of_[made];
    const size_t back = (inside ? *reader : runs_[r].end()) - made;
    const size_t end = inside ? number_[*reader] : ops_[r].size();
    if (back > end || (!inside && back > 2 * runs_[r].length)) return kNone;  // or a layer in between is read
    return g_.ops[ops_[r][end - back]].outputs[t.output];
  }

  bool make_graph() {
    Graph& to = out_.graph;
    to.name = g_.name, to.scopes = g_.scopes, to.training = g_.training, to.default_strategy = g_.default_strategy;
    std::vector<TensorId> now(g_.tensors.size(), kNone);
    const auto take = [&](TensorId id) {
      TensorId& mine = now[id];
      if (mine == kNone) {
        mine = static_cast<TensorId>(to.tensors.size());
        to.tensors.push_back(g_.tensor(id));
        to.tensors.back().producer = kNone;
      }
      return mine;
    };
    std::map<std::pair<ScopeId, size_t>, ScopeId> clones;  // of each layer
    out_.run_of_scope.assign(to.scopes.size(), -1);
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      if (!kept_[i]) continue;
      Op op = g_.ops[i];
      for (TensorId& id : op.inputs) {
        if (id == kNone) continue;
        const TensorId source = source_of(id, i);
        if (source == kNone) return false;
        id = take(source);
      }
      for (TensorId& id : op.outputs) {
        if (id == kNone) continue;
        id = take(id);
        to.tensor(id).producer = static_cast<OpId>(to.ops.size());
      }
      if (run_of_[i] >= 0) {
        const auto [at, fresh] = clones.try_emplace({op.scope, layer_[i]}, static_cast<ScopeId>(to.scopes.size()));
        if (fresh) {
          Scope clone = to.scopes[op.scope];
          if (clone.kind == ScopeKind::kRoot)
            clone.kind = ScopeKind::kName, clone.parent = op.scope, clone.name = "layer";
          to.scopes.push_back(std::move(clone));
          out_.run_of_scope.push_back(standing_[i] ? run_of_[i] : -1);
          cloned_.push_back(op.scope);
          shares_.push_back(share_of(i));
        }
        op.scope = at->second;
      }
      op.stage = out_.stage_like[op.stage];
      to.ops.push_back(std::move(op));
    }
    for (const TensorId id : g_.inputs) to.inputs.push_back(take(id));
    for (const Variable& v : g_.variables) {
      if (now[v.tensor] == kNone) continue;
      Variable mine = v;
      mine.tensor = now[v.tensor];
      for (TensorId* id : {&mine.owner, &mine.next})
        if (*id != kNone && (*id = now[*id]) == kNone) return false;
      to.variables.push_back(std::move(mine));
    }
    const auto follow = [&](TensorId& id) {
      if (id == kNone) return true;
      const TensorId source = source_of(id, std::nullopt);
      if (source == kNone) return false;
      id = now[source];
      return id != kNone;
    };
    to.outputs = g_.outputs;
    for (NamedTensor& output : to.outputs)
      if (!follow(output.tensor)) return false;
    return follow(to.training.loss);
  }

  // Of the layers of all stages that are like its own, each that stays has an even share: what is chosen for them is
  // best for all.
  LayerShare share_of(size_t op) const {
    const auto r = static_cast<size_t>(run_of_[op]);
    double model = 0, here = 0, stages = 0;
    for (size_t s = 0; s < tasks_.stages(); ++s)
      if (out_.stage_like[s] == out_.stage_like[stage(op)]) model += static_cast<double>(parts_[s][r].size()), ++stages;
    for (size_t i = parts_[stage(op)][r].begin; i < parts_[stage(op)][r].end; ++i) here += kept_[i];
    const auto length = static_cast<double>(runs_[r].length);
    const double steps = (model / length - stages) / std::max(1.0, here / length - 1);
    return {static_cast<int32_t>(layer_[op]), model / here, std::max(1.0, steps), stages};
  }

  void make_tasks() {
    TaskGraphs& to = out_.tasks;
    to.tasks = tasks_.tasks;
    for (TaskGraph& t : to.tasks) t.ops.clear(), t.stage = out_.stage_like[t.stage];
    to.task_of_scope = tasks_.task_of_scope, to.stage_of_scope = tasks_.stage_of_scope, to.written = tasks_.written;
    for (int32_t& s : to.stage_of_scope)
      if (s >= 0) s = out_.stage_like[s];
    for (std::vector<int32_t>* list : {&to.task_of_scope, &to.stage_of_scope, &to.written})
      if (!list->empty())
        for (const ScopeId scope : cloned_) list->push_back((*list)[scope]);
    int32_t devices = 0;
    for (size_t k = 0; k < stays_.size(); ++k) {
      Mesh mesh = tasks_.mesh(static_cast<int32_t>(stays_[k]));
      for (int32_t& d : mesh.devices)
        if (d >= 0) d = devices++;
      to.meshes.push_back(std::move(mesh));
      if (!tasks_.links.empty()) to.links.push_back(tasks_.links[tasks_.mesh_of_stage[stays_[k]]]);
      to.mesh_of_stage.push_back(static_cast<int32_t>(k));
    }
    to.by_micro_batch = tasks_.by_micro_batch;
    // Of one virtual stage, whose versions can be told from single buffers: all stages have several.
    if (!tasks_.schedule.empty()) to.schedule = schedule_rule(tasks_.schedule).split_backward ? "zb_h1" : "gpipe";
    to.strategy = tasks_.strategy;
    to.shares.resize(tasks_.task_of_scope.size());
    to.shares.insert(to.shares.end(), shares_.begin(), shares_.end());
  }

  const Graph& g_;
  const TaskGraphs& tasks_;
  size_t more_;
  const std::vector<int32_t>& kinds_;
  std::vector<Run> runs_;
  std::vector<std::vector<Part>> parts_;  // [stage][run]
  std::vector<int32_t> run_of_;           // per op; -1: none
  std::vector<size_t> stays_;             // stages of the model
  std::vector<char> kept_, standing_;     // per op
  std::vector<std::vector<size_t>> ops_;  // per run: those that stay
  std::vector<size_t> layer_;             // per op of a run: where its layer begins
  std::vector<size_t> number_;            // per op of a run: how many of them stay before it
  std::vector<ScopeId> cloned_;
  std::vector<LayerShare> shares_;  // of each clone
  Condensed out_;
};

}  // namespace

std::optional<Condensed> condense(const Graph& graph, const TaskGraphs& tasks, double least_bytes, size_t more,
                                  const std::vector<int32_t>& kinds) {
  return Condenser(graph, tasks, least_bytes, more, kinds).run();
}

Condensed one_layer_less(Condensed few, const Condensed& more) {
  std::vector<std::vector<int64_t>> layers(more.tasks.stages());
  for (size_t v = 0; v < few.stage_like.size(); ++v) {
    auto& mine = layers[few.stage_like[v]];
    if (!mine.empty()) continue;
    for (size_t r = 0; r < few.layers[v].size(); ++r) mine.push_back(1 + few.layers[v][r] - more.layers[v][r]);
  }
  few.layers = std::move(layers);
  few.stage_like.resize(more.tasks.stages());
  std::iota(few.stage_like.begin(), few.stage_like.end(), 0);
  return few;
}

}  // namespace whale
