// Blocks of the model that keep their inputs alone and are computed again in the backward pass (Chen et al., 2016).
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "rewrite/gathers.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

constexpr int32_t kNoBlock = -1;

bool forward_work(const Op& op) { return op.phase == Phase::kForward && op.region == Region::kBody; }

// What is not computed twice, but for the exchanges below: reshards and sums over micro-batches.
bool reshards(const Op& op) {
  return has_flag(op.code, kCollective) || op.code == OpCode::k_transfer || op.code == OpCode::k_accumulate;
}

// "block3" -> "block"; empty: the name does not end in a number.
std::string stem_of(const std::string& name) {
  const size_t end = name.find_last_not_of("0123456789");
  if (name.empty() || end == name.size() - 1) return {};
  return name.substr(0, end + 1);
}

// The outermost name scopes that have siblings of the same stem.
std::vector<ScopeId> block_scopes(const Graph& g) {
  std::map<std::pair<ScopeId, std::string>, std::set<std::string>> siblings;
  const auto named = [&](ScopeId s) { return g.scopes[s].kind == ScopeKind::kName; };
  // Placements between a block and its siblings' common parent do not count.
  const auto parent_name = [&](ScopeId s) {
    do s = g.scopes[s].parent;
    while (s != kNone && s != 0 && !named(s));
    return s;
  };
  std::vector<std::string> path(g.scopes.size());
  std::vector<ScopeId> out(g.scopes.size(), kNone);
  const auto group = [&](ScopeId s) {
    const ScopeId p = parent_name(s);
    return std::pair(p == kNone ? 0 : p, stem_of(g.scopes[s].name));
  };
  for (ScopeId s = 0; s < static_cast<ScopeId>(g.scopes.size()); ++s)
    if (named(s) && !stem_of(g.scopes[s].name).empty()) siblings[group(s)].insert(g.scopes[s].name);
  std::map<std::pair<ScopeId, std::string>, ScopeId> first;  // one scope of the same parent and name stands for all
  for (ScopeId s = 1; s < static_cast<ScopeId>(g.scopes.size()); ++s) {
    const ScopeId parent = g.scopes[s].parent;
    if (parent != kNone && out[parent] != kNone) {
      out[s] = out[parent];
    } else if (named(s) && siblings.contains(group(s)) && siblings[group(s)].size() > 1) {
      const auto key = std::pair(group(s).first, g.scopes[s].name);
      out[s] = first.try_emplace(key, s).first->second;
    }
  }
  return out;
}

// Number of the block per op; kNoBlock: none. A block lies in one stage.
std::vector<int32_t> named_blocks(const Graph& g) {
  const std::vector<ScopeId> scopes = block_scopes(g);
  std::map<std::pair<ScopeId, int32_t>, int32_t> numbers;
  std::vector<int32_t> out(g.ops.size(), kNoBlock);
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    const auto scope = static_cast<size_t>(op.scope);
    if (!forward_work(op) || scope >= scopes.size() || scopes[scope] == kNone) continue;
    out[i] = numbers.try_emplace({scopes[scope], op.stage}, static_cast<int32_t>(numbers.size())).first->second;
  }
  return out;
}

// Of n ops of a stage, about sqrt(n) runs, cut where few bytes are alive.
std::vector<int32_t> runs_of_ops(const Graph& g) {
  std::vector<int32_t> out(g.ops.size(), kNoBlock);
  std::map<int32_t, std::vector<size_t>> stages;
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (forward_work(g.ops[i])) stages[g.ops[i].stage].push_back(i);
  int32_t number = 0;
  for (const auto& [stage, ops] : stages) {
    const size_t n = ops.size();
    std::map<TensorId, std::pair<size_t, size_t>> lives;  // by storage: first and last position
    for (size_t k = 0; k < n; ++k) {
      for (const TensorId id : g.ops[ops[k]].outputs)
        if (id != kNone && view_root(g, id) == id) lives[id] = {k, k};
      for (const TensorId id : g.ops[ops[k]].inputs)
        if (id != kNone)
          if (const auto life = lives.find(view_root(g, id)); life != lives.end()) life->second.second = k;
    }
    std::vector<int64_t> crossing(n + 1);
    for (const auto& [id, life] : lives)
      for (size_t k = life.first + 1; k <= life.second; ++k) crossing[k] += bytes_of(g.tensor(id));
    const auto runs = static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(n))));
    size_t at = 0;
    for (size_t r = 1; r <= runs; ++r, ++number) {
      size_t end = r * n / runs;
      if (r < runs) {
        const size_t reach = std::max<size_t>(1, n / runs / 2);
        size_t best = std::max(end, at + 1);
        for (size_t k = std::max(at + 1, end - std::min(end, reach)); k <= std::min(n - 1, end + reach); ++k)
          if (crossing[k] < crossing[best]) best = k;
        end = std::min(best, n);
      }
      // Without a pipeline the last run's backward ops follow at once: nothing to free.
      for (; at < end; ++at) out[ops[at]] = stages.size() == 1 && r == runs ? kNoBlock : number;
    }
  }
  return out;
}

class Blocks {
 public:
  Blocks(ShardedGraph& graph, const std::vector<char>& stages) : lg_(graph), g_(graph.graph), block_(named_blocks(g_)) {
    if (std::all_of(block_.begin(), block_.end(), [](int32_t b) { return b == kNoBlock; })) block_ = runs_of_ops(g_);
    for (size_t i = 0; i < block_.size(); ++i)
      if (!stages[g_.ops[i].stage]) block_[i] = kNoBlock;
    find_kept();
  }

  void run() {
    const size_t n = g_.ops.size();
    std::vector<std::vector<Op>> before(n);
    std::map<int32_t, size_t> first;  // of a block's readers in the backward pass
    // A block's copies stand before the first op that reads one.
    for (size_t i = 0; i < n; ++i) {
      if (g_.ops[i].phase != Phase::kBackward || g_.ops[i].region != Region::kBody || is_view(g_.ops[i].code)) continue;
      for (size_t k = 0; k < g_.ops[i].inputs.size(); ++k) {
        const TensorId id = g_.ops[i].inputs[k];
        if (id == kNone || kept(id)) continue;
        const int32_t block = block_[g_.tensor(view_root(g_, id)).producer];
        const size_t at = first.try_emplace(block, i).first->second;
        const TensorId copy = again(id, before[at], block);
        g_.ops[i].inputs[k] = copy;
      }
    }
    std::vector<Op> ops;
    for (size_t i = 0; i < n; ++i) {
      std::stable_sort(before[i].begin(), before[i].end(),
                       [&](const Op& a, const Op& b) { return a.origin < b.origin; });
      for (Op& copy : before[i]) {
        copy.origin = kNone;
        ops.push_back(std::move(copy));
      }
      ops.push_back(std::move(g_.ops[i]));
    }
    for (Op& op : ops) op.origin = kNone;  // numbers have changed
    g_.ops = std::move(ops);
    compact(g_, {});
  }

 private:
  // Storage that lives to the backward pass anyway: not made in a block, or read beyond its block or stage.
  void find_kept() {
    kept_.assign(g_.tensors.size(), 0);
    const auto root = [&](TensorId id) { return static_cast<size_t>(view_root(g_, id)); };
    for (size_t t = 0; t < g_.tensors.size(); ++t) {
      const OpId p = g_.tensors[t].producer;
      if (p == kNone || block_[p] == kNoBlock || (reshards(g_.op(p)) && !exchanged_again(g_.op(p)))) kept_[t] = 1;
    }
    for (const NamedTensor& f : lg_.fetches) kept_[root(f.tensor)] = 1;
    for (const Variable& v : g_.variables)
      if (v.next != kNone) kept_[root(v.next)] = 1;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Op& op = g_.ops[i];
      if (is_view(op.code)) continue;
      for (const TensorId id : op.inputs) {
        if (id == kNone) continue;
        const size_t r = root(id);
        // Another stage of these devices goes back before this one makes anything again.
        if (op.phase == Phase::kBackward && op.stage == lg_.stages[r]) continue;
        if (kept_[r] || block_[g_.tensors[r].producer] == block_[i]) continue;
        kept_[r] = 1;
      }
    }
  }
  bool kept(TensorId id) const { return kept_[view_root(g_, id)] != 0; }

  // Where memory is dear enough, what goes to experts on other devices and back does so again in the backward pass:
  // kept, it is most of what a block of experts holds. All devices of the group run the same block.
  bool exchanged_again(const Op& op) const {
    const CostModel& cost = lg_.tasks.cost;
    if (op.code != OpCode::k_all_to_all || cost.memory_price <= 1) return false;
    const auto group = static_cast<size_t>(attr_int(op.attrs, "group"));
    const int64_t n = lg_.size(group + 1, op.stage);
    const auto bytes = static_cast<double>(bytes_of(g_.tensor(op.outputs[0])));  // of all devices
    return bytes >= static_cast<double>(cost.cached_bytes) &&
           cost.held_seconds(bytes / static_cast<double>(n)) >=
               reshard_seconds({.sum = false, .cut = true}, bytes, n, lg_.tasks.link(op.stage, group));
  }

  // The tensor as the backward pass has it; what is missing goes to `out`.
  TensorId again(TensorId id, std::vector<Op>& out, int32_t block) {
    if (id == kNone) return kNone;
    const bool weight = g_.tensor(id).kind == TensorKind::kValue &&
                        g_.op(g_.tensor(id).producer).region == Region::kBody && gathered_of_variables(lg_, id);
    if (kept(id) && !weight) return id;
    if (weight)
      if (const TensorId there = gathered_backward(id); there != kNone) return there;
    if (const auto known = copies_.find({id, weight ? block : kNoBlock}); known != copies_.end()) return known->second;
    const OpId producer = g_.tensor(id).producer;
    Op copy = g_.op(producer);
    without_index_check(copy);
    copy.name += ".again";
    copy.phase = Phase::kBackward;
    copy.origin = producer;  // for the order
    for (TensorId& input : copy.inputs) input = again(input, out, block);
    TensorId made = kNone;
    for (TensorId& o : copy.outputs) {
      if (o == kNone) continue;
      const TensorId now = copies_[{o, weight ? block : kNoBlock}] = add_like(lg_, o, ".again");
      if (o == id) made = now;
      o = now;
    }
    out.push_back(std::move(copy));
    return made;
  }

  // Parameters in parts are gathered for the backward pass already.
  TensorId gathered_backward(TensorId id) const {
    const Op& op = g_.op(g_.tensor(id).producer);
    if (!puts_together(lg_, op)) return kNone;
    for (size_t i = static_cast<size_t>(g_.tensor(id).producer) + 1; i < g_.ops.size(); ++i)
      if (g_.ops[i].code == op.code && g_.ops[i].inputs == op.inputs && g_.ops[i].attrs == op.attrs)
        return g_.ops[i].outputs[0];
    return kNone;
  }

  ShardedGraph& lg_;
  Graph& g_;
  std::vector<int32_t> block_;  // per op
  std::vector<char> kept_;      // per storage
  std::map<std::pair<TensorId, int32_t>, TensorId> copies_;
};

}  // namespace

void recompute_blocks(ShardedGraph& lg, const std::vector<char>& stages) {
  const auto& ops = lg.graph.ops;
  const bool some = std::any_of(stages.begin(), stages.end(), [](char s) { return s != 0; });
  if (some && std::any_of(ops.begin(), ops.end(), [](const Op& op) { return op.phase == Phase::kBackward; }))
    Blocks(lg, stages).run();
}

}  // namespace whale
