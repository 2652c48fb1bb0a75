#include "parallel/task_graph.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "base/error.h"
#include "parallel/shares.h"
#include "parallel/stages.h"
#include "parallel/strategy.h"
#include "schedule/schedule.h"

namespace whale {
namespace {

// A scope's chain of placements: where `pipeline` and `stage` stand in it.
struct Leaf {
  std::vector<Scope> nest;
  std::vector<ScopeId> ids;  // of the scopes; kNone: from the strategy's text
  std::string path;
  bool annotated = false;
  size_t pipeline = SIZE_MAX, stage = SIZE_MAX;  // positions in `nest`
  size_t outer() const { return std::min({pipeline, stage, nest.size()}); }
  size_t inner() const { return stage != SIZE_MAX ? stage + 1 : pipeline != SIZE_MAX ? pipeline + 1 : 0; }
  bool staged() const { return pipeline != SIZE_MAX || stage != SIZE_MAX; }
};

[[noreturn]] void refuse(const std::vector<Scope>& nest, std::string_view path, const std::string& what) {
  throw invalid("scope '{}' ({}) {}", to_string(nest), path, what).at_scope(std::string(path));
}

void check_scope(const Scope& scope, std::string_view path) {
  const auto later = [&](const std::string& what, const char* instead) {
    throw unimplemented("scope '{}' ({}): {} is not implemented yet; {} is", to_string(scope), path, what, instead)
        .at_scope(std::string(path));
  };
  if (scope.kind == ScopeKind::kCluster && !scope.devices.empty())
    later("devices of a cluster", "a device list for the whole plan");
}

bool is_bare(const std::vector<Scope>& nest) { return nest.size() == 1 && to_string(nest[0]) == "replica"; }

Leaf leaf_of(std::vector<Scope> nest, std::vector<ScopeId> ids, std::string path, bool annotated) {
  Leaf leaf{.nest = {}, .ids = {}, .path = std::move(path), .annotated = annotated};
  for (size_t i = 0; i < nest.size(); ++i) {
    Scope& scope = nest[i];
    check_scope(scope, leaf.path);
    const auto weights = static_cast<int64_t>(scope.shares.size());
    if (weights && scope.count && weights != scope.count)
      throw invalid("scope '{}' ({}): shares has {} entries, expected {}, one for each {}", to_string(scope), leaf.path,
                    weights, scope.count, scope.kind == ScopeKind::kSplit ? "way" : "replica")
          .at_scope(leaf.path);
    if (weights) {
      scope.count = weights;
      try {
        round_shares(1, scope.shares);
      } catch (const Error& e) {
        throw invalid("scope '{}' ({}): {}", to_string(scope), leaf.path, e.message()).at_scope(leaf.path);
      }
    }
    if (scope.kind == ScopeKind::kPipeline) {
      if (leaf.pipeline != SIZE_MAX) refuse(nest, leaf.path, "has a pipeline inside a pipeline; one is enough");
      leaf.pipeline = leaf.nest.size();
    }
    if (scope.kind == ScopeKind::kStage) {
      if (leaf.stage != SIZE_MAX) refuse(nest, leaf.path, "has a stage inside a stage; stages follow one another");
      leaf.stage = leaf.nest.size();
    }
    leaf.nest.push_back(scope);
    leaf.ids.push_back(ids[i]);
  }
  if (leaf.pipeline != SIZE_MAX && leaf.stage != SIZE_MAX && leaf.stage != leaf.pipeline + 1)
    refuse(leaf.nest, leaf.path,
           "has scopes between pipeline and stage; put them around the pipeline or into the stage");
  return leaf;
}

// ---- counts -----------------------------------------------------------------------------------------------------
int64_t product(const std::vector<Scope>& nest, size_t from, size_t to, bool& complete) {
  int64_t n = 1;
  for (size_t i = from; i < to; ++i) {
    if (nest[i].kind == ScopeKind::kCluster) continue;
    if (!nest[i].count) complete = false;
    n = std::min<int64_t>(n * std::max<int64_t>(nest[i].count, 1), int64_t{1} << 40);
  }
  return n;
}

// Fills in counts of nest[from, to) so that they multiply to `devices`: the outermost one left out takes what the
// others leave, further ones are 1.
void fill_counts(std::vector<Scope>& nest, size_t from, size_t to, int64_t devices, std::string_view path) {
  bool complete = true;
  int64_t needed = product(nest, from, to, complete);
  for (size_t i = from; i < to; ++i) {
    Scope& scope = nest[i];
    if (scope.count || scope.kind == ScopeKind::kCluster) continue;
    scope.count = needed > devices ? 1 : devices / needed;
    needed *= scope.count;
  }
  if (needed == devices) return;
  const char* hint = needed > devices
                         ? "give more devices or a smaller count"
                         : "devices left idle are not allowed: leave the count out, give a matching count, "
                           "or nest scopes";
  refuse(nest, path, fmt::format("wants {} device(s), {} are there; {}", needed, devices, hint));
}

// ---- axes of one stage ------------------------------------------------------------------------------------------
struct AxisUse {
  AxisRole role = AxisRole::kFollow;
  std::string factor;
  bool by_micro_batch = false;
};
struct Axes {
  std::vector<MeshAxis> axes;
  std::vector<std::vector<AxisUse>> uses;  // [leaf][axis]
};

AxisRole role_of(ScopeKind kind) { return kind == ScopeKind::kSplit ? AxisRole::kSplit : AxisRole::kReplica; }

// The common refinement of the leaves' nests [from_i, to_i): scopes that share the devices cut them at the same places.
Axes refine(const std::vector<const Leaf*>& leaves, const std::vector<std::pair<size_t, size_t>>& ranges) {
  struct Level {
    const Scope* scope;
    int64_t left;
  };
  Axes out;
  out.uses.resize(leaves.size());
  std::vector<std::vector<Level>> levels(leaves.size());
  std::vector<size_t> at(leaves.size());
  bool same = true;
  for (size_t l = 0; l < leaves.size(); ++l)
    for (size_t i = ranges[l].first; i < ranges[l].second; ++i)
      if (leaves[l]->nest[i].kind != ScopeKind::kCluster)
        levels[l].push_back({&leaves[l]->nest[i], leaves[l]->nest[i].count});
  for (size_t l = 1; l < leaves.size(); ++l) {
    same &= levels[l].size() == levels[0].size();
    for (size_t i = 0; same && i < levels[l].size(); ++i)
      same &= levels[l][i].left == levels[0][i].left && levels[l][i].scope->kind == levels[0][i].scope->kind;
  }
  if (!same)  // levels of one are no axis where the scopes differ
    for (auto& list : levels) std::erase_if(list, [](const Level& x) { return x.left == 1; });
  for (;;) {
    int64_t size = 0;
    for (size_t l = 0; l < leaves.size(); ++l)
      if (at[l] < levels[l].size()) size = size ? std::min(size, levels[l][at[l]].left) : levels[l][at[l]].left;
    if (!size) break;
    MeshAxis axis{.name = {}, .size = size, .shares = {}, .state_shares = {}};
    std::vector<std::string> names;
    for (size_t l = 0; l < leaves.size(); ++l) {
      if (at[l] >= levels[l].size()) {
        out.uses[l].push_back({});
        continue;
      }
      Level& level = levels[l][at[l]];
      const bool part = level.scope->count != size;
      if (level.left % size || (part && !level.scope->shares.empty()) ||
          (!level.scope->shares.empty() && !axis.shares.empty() && axis.shares != level.scope->shares))
        throw unimplemented(
            "scopes '{}' ({}) and '{}' ({}) share devices, but cut them at different places; give them counts of which "
            "one divides the other, and equal shares",
            to_string(leaves[0]->nest), leaves[0]->path, to_string(leaves[l]->nest), leaves[l]->path)
            .at_scope(leaves[l]->path);
      if (!part && !level.scope->shares.empty()) axis.shares = level.scope->shares;
      const std::string name = name_of(level.scope->kind);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      out.uses[l].push_back({role_of(level.scope->kind), level.scope->factor, level.scope->by == "micro_batch"});
      level.left /= size;
      if (level.left == 1 || size == 1) ++at[l];
    }
    std::sort(names.begin(), names.end());
    axis.name = fmt::format("{}", fmt::join(names, "|"));
    out.axes.push_back(std::move(axis));
  }
  return out;
}

// ---- stages -----------------------------------------------------------------------------------------------------
class Former {
 public:
  Former(Graph& graph, int64_t devices, std::string_view strategy, bool exact)
      : g_(graph), devices_(devices), exact_(exact) {
    if (strategy.empty()) strategy = graph.default_strategy;
    local_ = strategy == "local";
    if (local_ && devices != 1)
      throw invalid("strategy 'local' ignores all scopes and runs on one device, {} are there", devices);
    clauses_ = parse_clauses(strategy.empty() || local_ ? "replica" : strategy);
    otherwise_ = parse_strategy("replica");
    for (const StrategyClause& clause : clauses_)
      if (clause.name.empty()) otherwise_ = clause.nest;
  }

  TaskGraphs run() {
    collect();
    find_pipeline();
    if (staged_) assign_stages();
    count_devices();
    make_axes();
    make_meshes();
    make_tasks();
    find_whole_micro_batches();
    return std::move(out_);
  }

 private:
  // Which leaf every scope in use belongs to.
  void collect() {
    std::map<ScopeId, std::pair<std::vector<Scope>, std::vector<ScopeId>>> nests;
    std::vector<Scope> explicit_nest = otherwise_;
    for (const Op& op : g_.ops) {
      const auto [at, fresh] = nests.try_emplace(op.scope);
      if (!fresh) continue;
      for (ScopeId id = local_ ? 0 : op.scope; id > 0; id = g_.scopes[static_cast<size_t>(id)].parent) {
        const Scope& scope = g_.scopes[static_cast<size_t>(id)];
        if (scope.kind == ScopeKind::kName || scope.kind == ScopeKind::kRoot) continue;
        at->second.first.insert(at->second.first.begin(), scope);
        at->second.second.insert(at->second.second.begin(), id);
      }
      const std::vector<Scope>& found = at->second.first;
      if (is_bare(explicit_nest) && !found.empty() &&
          std::all_of(found.begin(), found.end(), [](const Scope& s) { return s.kind == ScopeKind::kReplica; }))
        explicit_nest = found;
    }
    if (nests.empty()) nests.try_emplace(0);
    std::map<std::string, size_t> known;
    for (auto& [scope, found] : nests) {
      auto& [nest, ids] = found;
      std::string path = nest.empty() ? "default strategy" : g_.scope_path(scope);
      if (nest.empty())
        if (const StrategyClause* clause = clause_of(scope)) {
          nest = clause->nest;
          path = clause->name;
          // A pipeline written in several clauses is one; each clause is a stage of its own.
          for (const Scope& s : nest)
            ids.push_back(s.kind == ScopeKind::kStage ? -10 - static_cast<ScopeId>(clause - clauses_.data()) : -2);
        }
      const bool annotated = !nest.empty();
      if (nest.empty()) nest = otherwise_, ids.assign(nest.size(), kNone);
      if (is_bare(nest)) nest = explicit_nest, ids.assign(nest.size(), kNone);
      std::string key = to_string(nest);
      for (size_t i = 0; i < nest.size(); ++i)
        if (nest[i].kind == ScopeKind::kStage || nest[i].kind == ScopeKind::kPipeline)
          key += fmt::format("#{}", ids[i]);
      const auto [at, fresh] = known.try_emplace(key, leaves_.size());
      if (fresh) leaves_.push_back(leaf_of(nest, ids, std::move(path), annotated));
      leaf_of_scope_[scope] = at->second;
    }
  }

  // The innermost clause whose name is a part of the scope's path.
  const StrategyClause* clause_of(ScopeId scope) const {
    if (local_) return nullptr;
    std::vector<std::string> names;
    for (ScopeId id = scope; id > 0; id = g_.scopes[static_cast<size_t>(id)].parent)
      if (const std::string& name = g_.scopes[static_cast<size_t>(id)].name; !name.empty())
        names.insert(names.begin(), name);
    for (size_t n = names.size(); n > 0; --n) {
      const std::string path =
          fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(n), "/"));
      for (const StrategyClause& clause : clauses_)
        if (!clause.name.empty() && (clause.name == names[n - 1] || clause.name == path)) return &clause;
    }
    return nullptr;
  }

  void find_pipeline() {
    for (size_t l = 0; l < leaves_.size(); ++l) {
      const Leaf& leaf = leaves_[l];
      if (!leaf.staged()) continue;
      if (staged_) {
        const Leaf& first = leaves_[*staged_];
        const bool one = leaf.outer() == first.outer() && (leaf.pipeline == SIZE_MAX) == (first.pipeline == SIZE_MAX) &&
                         (leaf.pipeline == SIZE_MAX || leaf.ids[leaf.pipeline] == first.ids[first.pipeline]);
        for (size_t i = 0; one && i < leaf.outer(); ++i)
          if (to_string(leaf.nest[i]) != to_string(first.nest[i]))
            refuse(leaf.nest, leaf.path,
                   fmt::format("and '{}' ({}) put different scopes around one pipeline", to_string(first.nest),
                               first.path));
        if (!one)
          throw unimplemented("scopes '{}' ({}) and '{}' ({}) are two pipelines; one per model is implemented",
                              to_string(first.nest), first.path, to_string(leaf.nest), leaf.path)
              .at_scope(leaf.path);
        if (leaf.stage != SIZE_MAX && first.stage == SIZE_MAX) staged_ = l;
      } else {
        staged_ = l;
      }
    }
    if (!staged_) return;
    for (const Leaf& leaf : leaves_)
      if (!leaf.staged() && leaf.annotated)
        throw unimplemented(
            "scope '{}' ({}) stands beside a pipeline and would share its devices; put it into a stage, or leave it "
            "out",
            to_string(leaf.nest), leaf.path)
            .at_scope(leaf.path);
    const Leaf& leaf = leaves_[*staged_];
    if (leaf.pipeline != SIZE_MAX) pipeline_ = leaf.nest[leaf.pipeline];
    if (pipeline_.schedule.empty()) pipeline_.schedule = pipeline_.chunks > 1 ? "interleaved" : "1f1b";
    const ScheduleRule& rule = schedule_rule(pipeline_.schedule);
    if (!pipeline_.chunks) pipeline_.chunks = rule.min_chunks;
    make_schedule(pipeline_.schedule, 1, 1, static_cast<int>(pipeline_.chunks));  // chunks are legal, or an error
    out_.schedule = pipeline_.schedule;
    out_.chunks = pipeline_.chunks;
  }

  // Gives every op a stage; the graph gets a `stage` scope where none was written.
  void assign_stages() {
    std::map<ScopeId, int32_t> written;  // stage scopes in the order of their first op
    std::vector<int32_t> stage(g_.ops.size(), -1);
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Leaf& leaf = leaves_[leaf_of_scope_.at(g_.ops[i].scope)];
      if (leaf.stage == SIZE_MAX) continue;
      stage[i] = written.try_emplace(leaf.ids[leaf.stage], static_cast<int32_t>(written.size())).first->second;
    }
    const Leaf& any = leaves_[*staged_];
    if (written.empty()) {
      if (!pipeline_.count) {
        bool complete = true;
        const int64_t others =
            product(any.nest, 0, any.outer(), complete) * product(any.nest, any.inner(), any.nest.size(), complete);
        pipeline_.count = std::max<int64_t>(1, devices_ / others);
      }
      if (pipeline_.count > (1 << 16)) refuse(any.nest, any.path, "wants too many stages");
      std::vector<OpId> ops(g_.ops.size());
      std::iota(ops.begin(), ops.end(), 0);
      try {
        stage = cut_stages(g_, ops, pipeline_.count * pipeline_.chunks, {}, exact_);
      } catch (const Error& e) {
        throw invalid("scope '{}' ({}): {}", to_string(any.nest), any.path, e.message()).at_scope(any.path);
      }
      virtual_stages_ = pipeline_.count * pipeline_.chunks;
    } else {
      virtual_stages_ = static_cast<int64_t>(written.size());
      if (virtual_stages_ % pipeline_.chunks ||
          (pipeline_.count && pipeline_.count * pipeline_.chunks != virtual_stages_))
        refuse(any.nest, any.path,
               fmt::format("has {} stages written in it, expected {} stages of {} chunk(s) each", virtual_stages_,
                           pipeline_.count ? fmt::format("{}", pipeline_.count) : "a number of", pipeline_.chunks));
      pipeline_.count = virtual_stages_ / pipeline_.chunks;
      join(stage);
    }
    // Data goes forward only.
    for (size_t i = 0; i < g_.ops.size(); ++i)
      for (const TensorId id : g_.ops[i].inputs)
        if (id != kNone && g_.tensor(id).producer != kNone &&
            stage[static_cast<size_t>(g_.tensor(id).producer)] > stage[i])
          throw invalid("op '{}' in stage {} reads '{}', which a later stage ({}) makes; stages pass data forward only",
                        g_.ops[i].name, stage[i], g_.tensor(id).name,
                        stage[static_cast<size_t>(g_.tensor(id).producer)])
              .at_op(g_.ops[i].name)
              .at_scope(g_.scope_path(g_.ops[i].scope));
    std::map<std::pair<ScopeId, int32_t>, ScopeId> made;
    out_.stage_of_scope.assign(g_.scopes.size(), -1);
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      Op& op = g_.ops[i];
      const size_t leaf = leaf_of_scope_.at(op.scope);
      if (leaves_[leaf].stage == SIZE_MAX) {
        const auto [at, fresh] = made.try_emplace({op.scope, stage[i]}, static_cast<ScopeId>(g_.scopes.size()));
        if (fresh) {
          Scope scope;
          scope.kind = ScopeKind::kStage;
          scope.parent = op.scope;
          g_.scopes.push_back(std::move(scope));
          out_.stage_of_scope.push_back(stage[i]);
          leaf_of_scope_[at->second] = leaf;
        }
        op.scope = at->second;
      }
      op.stage = stage[i];
      out_.stage_of_scope[static_cast<size_t>(op.scope)] = stage[i];
    }
  }

  // Ops outside every written stage join the stage of what they read; those that read nothing, of who reads them.
  void join(std::vector<int32_t>& stage) {
    std::vector<char> given(stage.size());
    for (size_t i = 0; i < stage.size(); ++i) given[i] = stage[i] >= 0;
    for (size_t i = 0; i < stage.size(); ++i) {
      if (given[i]) continue;
      for (const TensorId id : g_.ops[i].inputs)
        if (id != kNone && g_.tensor(id).producer != kNone)
          stage[i] = std::max(stage[i], stage[static_cast<size_t>(g_.tensor(id).producer)]);
    }
    for (size_t i = stage.size(); i-- > 0;) {
      if (stage[i] >= 0) continue;
      int32_t first = static_cast<int32_t>(virtual_stages_) - 1;
      bool read = false;
      for (size_t k = i + 1; k < stage.size(); ++k)
        for (const TensorId id : g_.ops[k].inputs)
          if (id != kNone && g_.tensor(id).producer == static_cast<OpId>(i))
            first = std::min(first, stage[k]), read = true;
      stage[i] = read ? first : 0;
    }
  }

  // ---- devices --------------------------------------------------------------------------------------------------
  void count_devices() {
    for (Leaf& leaf : leaves_)
      if (leaf.staged() == staged_.has_value() && !staged_)
        fill_counts(leaf.nest, 0, leaf.nest.size(), devices_, leaf.path);
    physical_ = staged_ ? static_cast<size_t>(pipeline_.count) : 1;
    stage_devices_.assign(physical_, 0);
    if (!staged_) {
      stage_devices_[0] = devices_;
      return;
    }
    for (size_t v = 0; v < static_cast<size_t>(virtual_stages_); ++v) {
      const PipelineSchedule shape{.name = {},
                                   .shape = {static_cast<int>(physical_), 1, static_cast<int>(pipeline_.chunks)},
                                   .placement = schedule_rule(pipeline_.schedule).placement,
                                   .split_backward = false,
                                   .devices = {}};
      out_.mesh_of_stage.push_back(site_at(shape, WorkKind::kForward, static_cast<int>(v), 0).device);
    }
    leaves_.reserve(leaves_.size() + leaf_of_scope_.size());  // `any` stays where it is
    Leaf& any = leaves_[*staged_];
    // What each stage needs: written on it, or the product of its scopes.
    std::vector<char> open(physical_, 1);
    for (const auto& [scope, l] : leaf_of_scope_) {
      const Leaf& leaf = leaves_[l];
      const int32_t s = out_.stage_of_scope[static_cast<size_t>(scope)];
      if (s < 0 || !leaf.staged()) continue;
      const auto mesh = static_cast<size_t>(out_.mesh_of_stage[static_cast<size_t>(s)]);
      bool complete = true;
      const int64_t inner = product(leaf.nest, leaf.inner(), leaf.nest.size(), complete);
      const int64_t given = leaf.stage != SIZE_MAX ? leaf.nest[leaf.stage].count : 0;
      if (given || complete) {
        open[mesh] = 0;
        stage_devices_[mesh] = std::max(stage_devices_[mesh], given ? given : inner);
      } else {
        stage_devices_[mesh] = std::max(stage_devices_[mesh], inner);
      }
    }
    bool complete = true;
    const int64_t outer = product(any.nest, 0, any.outer(), complete);
    int64_t sum = 0, opened = 0;
    for (size_t s = 0; s < physical_; ++s) {
      stage_devices_[s] = std::max<int64_t>(stage_devices_[s], 1);
      sum += open[s] ? 0 : stage_devices_[s];
      opened += open[s];
    }
    if (!complete) {
      for (size_t s = 0; s < physical_; ++s) sum += open[s] ? stage_devices_[s] : 0;
    } else if (opened) {
      const int64_t left = devices_ / outer - sum;
      for (size_t s = 0, k = 0; s < physical_; ++s)
        if (open[s])
          stage_devices_[s] = std::max<int64_t>(1, left / opened + (static_cast<int64_t>(k++) < left % opened));
      sum = std::accumulate(stage_devices_.begin(), stage_devices_.end(), int64_t{0});
    }
    const int64_t groups = devices_ / sum;
    if (groups * sum != devices_ || (complete && groups != outer))
      refuse(any.nest, any.path,
             fmt::format("wants {} device(s) ({} around a pipeline whose {} stage(s) have [{}]), {} are there",
                         sum * outer, outer, physical_, fmt::join(stage_devices_, ", "), devices_));
    for (Leaf& leaf : leaves_) {
      if (!leaf.staged()) continue;
      fill_counts(leaf.nest, 0, leaf.outer(), groups, leaf.path);
    }
    // Stages of different sizes that share a nest have counts of their own.
    const std::vector<Leaf> open_leaves = leaves_;
    std::map<std::pair<size_t, int64_t>, size_t> filled;  // (leaf, devices of the stage)
    std::set<size_t> taken;
    for (auto& [scope, l] : leaf_of_scope_) {
      const int32_t s = out_.stage_of_scope[static_cast<size_t>(scope)];
      if (s < 0 || !leaves_[l].staged()) continue;
      const int64_t there = stage_devices_[static_cast<size_t>(out_.mesh_of_stage[static_cast<size_t>(s)])];
      const auto [at, fresh] = filled.try_emplace({l, there}, l);
      if (fresh) {
        if (!taken.insert(l).second) {
          at->second = leaves_.size();
          leaves_.push_back(open_leaves[l]);
        }
        Leaf& leaf = leaves_[at->second];
        if (leaf.inner() < leaf.nest.size()) fill_counts(leaf.nest, leaf.inner(), leaf.nest.size(), there, leaf.path);
        if (leaf.stage != SIZE_MAX) leaf.nest[leaf.stage].count = there;
      }
      l = at->second;
    }
    if (any.pipeline != SIZE_MAX)
      for (Leaf& leaf : leaves_)
        if (leaf.pipeline != SIZE_MAX) leaf.nest[leaf.pipeline].count = pipeline_.count;
  }

  // ---- axes: those around the pipeline, then those of the stages, aligned by name ----------------------------------
  void make_axes() {
    std::vector<size_t> of_stage(physical_);
    stage_axes_.resize(physical_);
    stage_leaves_.resize(physical_);
    for (const auto& [scope, l] : leaf_of_scope_) {
      size_t mesh = 0;
      if (staged_) {
        const int32_t s = out_.stage_of_scope[static_cast<size_t>(scope)];
        if (s < 0) continue;
        mesh = static_cast<size_t>(out_.mesh_of_stage[static_cast<size_t>(s)]);
      }
      auto& list = stage_leaves_[mesh];
      if (std::find(list.begin(), list.end(), l) == list.end()) list.push_back(l);
    }
    for (size_t s = 0; s < physical_; ++s) {
      std::vector<const Leaf*> leaves;
      std::vector<std::pair<size_t, size_t>> ranges;
      for (const size_t l : stage_leaves_[s]) {
        const Leaf& leaf = leaves_[l];
        leaves.push_back(&leaf);
        const bool joins = staged_ && !leaf.staged();  // unannotated: no say
        ranges.emplace_back(joins ? leaf.nest.size() : leaf.inner(), leaf.nest.size());
      }
      stage_axes_[s] = refine(leaves, ranges);
    }
    if (staged_) {
      const Leaf& any = leaves_[*staged_];
      outer_ = refine({&any}, {{0, any.outer()}});
    }
    // The stages' own axes in one order: matched by name, what is new comes at the end.
    place_.resize(physical_);
    for (size_t s = 0; s < physical_; ++s) {
      size_t from = 0;
      for (const MeshAxis& axis : stage_axes_[s].axes) {
        size_t at = from;
        while (at < common_.size() && common_[at] != axis.name) ++at;
        if (at == common_.size()) common_.push_back(axis.name);
        place_[s].push_back(at);
        from = at + 1;
      }
    }
    if (common_.empty() && outer_.axes.empty()) common_.push_back("replica");
  }

  std::vector<int32_t> device_order() const {
    std::vector<int32_t> order(static_cast<size_t>(devices_));
    std::iota(order.begin(), order.end(), 0);
    for (const Leaf& leaf : leaves_)
      for (const Scope& scope : leaf.nest) {
        if (scope.kind != ScopeKind::kCluster || scope.layout.empty() || scope.layout[0] != '[') continue;
        std::vector<int32_t> given;
        int64_t number = -1;
        for (const char c : scope.layout) {
          if (c >= '0' && c <= '9') {
            number = std::min<int64_t>(std::max<int64_t>(number, 0) * 10 + (c - '0'), devices_);
          } else if (number >= 0) {
            given.push_back(static_cast<int32_t>(number)), number = -1;
          }
        }
        std::set<int32_t> distinct(given.begin(), given.end());
        if (given.size() != order.size() || distinct.size() != given.size() || *distinct.rbegin() >= devices_)
          throw invalid("scope '{}' ({}): the layout lists [{}], expected each of the devices 0 to {} once",
                        to_string(scope), leaf.path, fmt::join(given, ", "), devices_ - 1)
              .at_scope(leaf.path);
        order = given;
      }
    return order;
  }

  void make_meshes() {
    const std::vector<int32_t> order = device_order();
    const int64_t sum = std::accumulate(stage_devices_.begin(), stage_devices_.end(), int64_t{0});
    int64_t offset = 0;
    for (size_t s = 0; s < physical_; ++s) {
      Mesh mesh;
      mesh.axes = outer_.axes;
      for (const std::string& name : common_) mesh.axes.push_back({name, 1, {}, {}});
      for (size_t a = 0; a < stage_axes_[s].axes.size(); ++a)
        mesh.axes[outer_.axes.size() + place_[s][a]] = stage_axes_[s].axes[a];
      for (int64_t group = 0; group < devices_ / sum; ++group)
        for (int64_t d = 0; d < stage_devices_[s]; ++d)
          mesh.devices.push_back(order[static_cast<size_t>(group * sum + offset + d)]);
      int64_t size = 1;
      for (const MeshAxis& axis : mesh.axes) size *= axis.size;
      if (size != static_cast<int64_t>(mesh.devices.size()))
        refuse(leaves_[*staged_].nest, leaves_[*staged_].path,
               fmt::format(
                   "gives stage {} {} device(s), the scopes inside use {}; put replica or split into the stage, or "
                   "change the number of devices ({})",
                   s, stage_devices_[s], size * sum / std::max<int64_t>(devices_, 1), devices_));
      offset += stage_devices_[s];
      out_.meshes.push_back(std::move(mesh));
    }
    if (!staged_) out_.mesh_of_stage = {0};
  }

  void make_tasks() {
    std::map<std::pair<size_t, size_t>, int32_t> known;  // (leaf, mesh)
    out_.task_of_scope.assign(g_.scopes.size(), -1);
    out_.stage_of_scope.resize(g_.scopes.size(), staged_ ? -1 : 0);
    for (const auto& [scope, l] : leaf_of_scope_) {
      const int32_t stage = out_.stage_of_scope[static_cast<size_t>(scope)];
      if (stage < 0) continue;
      const auto mesh = static_cast<size_t>(out_.mesh_of_stage[static_cast<size_t>(stage)]);
      const auto [at, fresh] = known.try_emplace({l, mesh}, static_cast<int32_t>(out_.tasks.size()));
      if (fresh) out_.tasks.push_back(task(l, mesh, stage));
      out_.task_of_scope[static_cast<size_t>(scope)] = at->second;
    }
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const int32_t t = out_.task_of_scope[static_cast<size_t>(g_.ops[i].scope)];
      out_.tasks[static_cast<size_t>(t)].ops.push_back(static_cast<OpId>(i));
    }
    std::stable_sort(leaves_.begin(), leaves_.end(),
                     [](const Leaf& a, const Leaf& b) { return b.annotated < a.annotated; });
    std::vector<std::string> texts;
    for (const Leaf& leaf : leaves_)
      if (const std::string text = to_string(leaf.nest);
          (!staged_ || leaf.staged()) && std::find(texts.begin(), texts.end(), text) == texts.end())
        texts.push_back(text);
    out_.strategy = fmt::format("{}", fmt::join(texts, "; "));
  }

  // Axes along which replicas take whole micro-batches: the same replicas in all meshes, and nothing else on them.
  void find_whole_micro_batches() {
    const size_t axes = out_.meshes[0].axes.size();
    out_.by_micro_batch.assign(axes, 0);
    std::vector<char> replica(axes), other(axes);
    const auto look = [&](size_t a, const AxisUse& use) {
      replica[a] |= use.role == AxisRole::kReplica, other[a] |= use.role == AxisRole::kSplit;
      if (use.role == AxisRole::kReplica && (exact_ || use.by_micro_batch)) out_.by_micro_batch[a] = 1;
    };
    for (const auto& uses : outer_.uses)
      for (size_t a = 0; a < uses.size(); ++a) look(a, uses[a]);
    for (size_t m = 0; m < physical_; ++m)
      for (const auto& uses : stage_axes_[m].uses)
        for (size_t a = 0; a < uses.size(); ++a) look(outer_.axes.size() + place_[m][a], uses[a]);
    for (size_t a = 0; a < axes; ++a) {
      if (!out_.by_micro_batch[a]) continue;
      if (other[a])
        throw invalid(
            "{}replicas of whole micro-batches share their devices with a split ('{}'), which needs all of them "
            "for every micro-batch; put the split inside the replica",
            exact_ ? "exact mode: " : "", out_.strategy);
      for (const Mesh& mesh : out_.meshes)
        if (mesh.axes[a].size != out_.meshes[0].axes[a].size || mesh.axes[a].shares != out_.meshes[0].axes[a].shares)
          throw invalid(
              "{}replicas of whole micro-batches differ between stages ({} and {}); put the replica around the "
              "pipeline",
              exact_ ? "exact mode: " : "", out_.meshes[0].axes[a].size, mesh.axes[a].size);
    }
  }

  TaskGraph task(size_t l, size_t mesh, int32_t stage) const {
    const Leaf& leaf = leaves_[l];
    TaskGraph t{.nest = leaf.nest, .path = leaf.path, .ops = {}, .stage = stage, .roles = {}, .factors = {}};
    const size_t axes = out_.meshes[mesh].axes.size();
    t.roles.assign(axes, AxisRole::kFollow);
    t.factors.resize(axes);
    for (size_t a = 0; a < outer_.axes.size(); ++a)
      t.roles[a] = outer_.uses[0][a].role, t.factors[a] = outer_.uses[0][a].factor;
    const auto& list = stage_leaves_[mesh];
    const auto at = static_cast<size_t>(std::find(list.begin(), list.end(), l) - list.begin());
    for (size_t a = 0; a < stage_axes_[mesh].axes.size(); ++a) {
      const size_t to = outer_.axes.size() + place_[mesh][a];
      t.roles[to] = stage_axes_[mesh].uses[at][a].role;
      t.factors[to] = stage_axes_[mesh].uses[at][a].factor;
    }
    return t;
  }

  Graph& g_;
  int64_t devices_;
  bool exact_;
  bool local_ = false;  // all scopes are ignored
  std::vector<StrategyClause> clauses_;
  std::vector<Scope> otherwise_;
  std::vector<Leaf> leaves_;
  std::map<ScopeId, size_t> leaf_of_scope_;
  std::optional<size_t> staged_;  // a leaf inside the pipeline
  Scope pipeline_;
  int64_t virtual_stages_ = 1;
  size_t physical_ = 1;
  std::vector<int64_t> stage_devices_;  // per mesh, of one pipeline
  Axes outer_;
  std::vector<Axes> stage_axes_;
  std::vector<std::vector<size_t>> stage_leaves_;  // per mesh
  std::vector<std::vector<size_t>> place_;         // per mesh and own axis: position in common_
  std::vector<std::string> common_;
  TaskGraphs out_;
};

}  // namespace

const TaskGraph& TaskGraphs::task(const Op& op) const {
  const auto scope = static_cast<size_t>(op.scope);
  const int32_t t = scope < task_of_scope.size() ? task_of_scope[scope] : -1;
  return tasks[static_cast<size_t>(t < 0 ? 0 : t)];
}

TaskGraphs form_task_graphs(Graph& graph, int64_t devices, std::string_view strategy, bool exact) {
  return Former(graph, devices, strategy, exact).run();
}

}  // namespace whale
