// Merging collectives and updates.
#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "rewrite/copies.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"
#include "shard/sub_axes.h"

namespace whale {
namespace {

// Nothing but updates (and the step's end) waits for it, so it may be later than its operands; another sum of the same
// kind may stand between, along another axis or over micro-batches.
bool may_wait(const Graph& g, const Lists& readers, const Op& op, int depth = 0) {
  const auto sums = [](OpCode code) {
    return code == OpCode::k_all_reduce || code == OpCode::k_reduce_scatter || code == OpCode::k_accumulate;
  };
  return std::all_of(op.outputs.begin(), op.outputs.end(), [&](TensorId y) {
    const auto& r = readers[y];
    return std::all_of(r.begin(), r.end(), [&](OpId i) {
      return g.op(i).phase == Phase::kUpdate ||
             (depth < 4 && sums(g.op(i).code) && may_wait(g, readers, g.op(i), depth + 1));
    });
  });
}

Attrs without(Attrs attrs, const char* name) {
  attrs.erase(name);
  return attrs;
}

// The operands before the tuples.
size_t leading_operands(const Op& op) {
  const auto& ports = def(op.code).inputs;
  return ports.size() - (!ports.empty() && ports.back().kind == PortKind::kVariadic ? 1 : 0);
}

// What can share a bucket.
struct Member {
  OpId op;
  OpId order;  // by this: the op that makes its operand, or the first that reads its result
};
// .., group, stage, kind, of an update (no gradient waits with its sums), behind one
using Key = std::tuple<OpCode, DType, std::string, Region, int64_t, int32_t, int, bool, bool>;

bool gathers_variable(const Graph& g, const Op& op) {
  return op.code == OpCode::k_all_gather &&
         (g.tensor(op.inputs[0]).producer == kNone || variable_behind(g, op.inputs[0]) != kNone);
}

// Of gathers: those of updated parameters by the number of the update's result, those of parameters by who waits.
int kind_of(const Graph& g, const Op& op, bool weight) {
  if (op.code != OpCode::k_all_gather) return 0;
  return gathers_variable(g, op) ? -1 - 2 * static_cast<int>(op.phase) - weight : g.tensor(op.inputs[0]).output;
}

// Ops that an update leads to (LAMB's norms of what it adds): the loss, which all updates wait for, is in no bucket
// with them.
std::vector<char> behind_updates(const Graph& g) {
  std::vector<char> next(g.tensors.size()), out(g.ops.size());
  for (const Variable& v : g.variables)
    if (v.next != kNone && v.next != v.tensor) next[v.next] = 1;
  const auto writes = [&](const Op& op) {
    return has_flag(op.code, kUpdateOp) ||
           std::ranges::any_of(op.outputs, [&](TensorId y) { return y != kNone && next[y] != 0; });
  };
  for (size_t i = 0; i < g.ops.size(); ++i)
    out[i] = writes(g.ops[i]) || std::ranges::any_of(g.ops[i].inputs, [&](TensorId id) {
               return id != kNone && g.tensor(id).producer != kNone && out[g.tensor(id).producer];
             });
  return out;
}

// Sums of gradients; gathers of updated parameters, and of parameters before they are read.
std::vector<Member> members_of(const Graph& g) {
  const auto readers = readers_of(g);
  std::vector<Member> out;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    const bool sum = op.code == OpCode::k_all_reduce || op.code == OpCode::k_reduce_scatter;
    if (!(sum || op.code == OpCode::k_all_gather) || op.inputs.size() != 1) continue;
    const auto& r = readers[op.outputs[0]];
    const OpId made = g.tensor(op.inputs[0]).producer;
    const auto id = static_cast<OpId>(i);
    if (sum && may_wait(g, readers, op)) out.push_back({id, made});
    if (sum) continue;
    if (variable_behind(g, op.inputs[0]) != kNone && !r.empty())
      out.push_back({id, *std::min_element(r.begin(), r.end())});
    else if (made != kNone && r.empty() && g.op(made).phase == Phase::kUpdate)
      out.push_back({id, made});
  }
  std::stable_sort(out.begin(), out.end(), [](const Member& a, const Member& b) { return a.order < b.order; });
  return out;
}

// Copies of parameters that are gathered come first, so that no bucket waits for the place of a member's copy.
void copies_first(Graph& g) {
  std::vector<char> first(g.ops.size());
  for (const Op& op : g.ops) {
    if (op.code != OpCode::k_all_gather || op.inputs.size() != 1 || variable_behind(g, op.inputs[0]) == kNone) continue;
    for (OpId made = g.tensor(op.inputs[0]).producer; made != kNone; made = g.tensor(g.op(made).inputs[0]).producer)
      first[made] = 1;
  }
  std::vector<OpId> order(g.ops.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_partition(order.begin(), order.end(), [&](OpId i) { return first[i] != 0; });
  if (std::is_sorted(order.begin(), order.end())) return;
  take_in_order(g, order);
  compact(g, {});
}

struct Bucket {
  OpId op = kNone;  // into which the others are merged
  int64_t bytes = 0, full_at = 0;
  std::unordered_set<OpId> apart;  // ops that are known not to wait for it; with an op, all that it waits for
  OpId held = kNone;  // the op since which it holds updates back: makes the loss, or a sum inside an update
};

// No update runs before the loss is known, so what updates read lives until the loss's bucket is there. Nor does one
// before the sums inside it (Adafactor's of squares), which may be small beside the gradients that wait with them.
class HeldBack {
 public:
  // sums_leave: over micro-batches, to the host's memory.
  HeldBack(const ShardedGraph& lg, bool sums_leave) : until_(lg.graph.ops.size() + 1) {
    const Graph& g = lg.graph;
    for (const NamedTensor& f : lg.fetches)
      if (f.name == "loss") loss_ = f.tensor;
    const bool many = lg.micro_batches > 1;
    std::vector<char> counted(g.tensors.size());
    // Some optimizers are ops of many kinds.
    const auto waits = [&](const Op& op, TensorId id) {
      const OpId made = id == kNone ? kNone : g.tensor(id).producer;
      if (made == kNone) return false;
      const bool chain = op.phase == Phase::kUpdate && g.op(made).phase != Phase::kUpdate;
      // Sums over micro-batches wait anyway, and what chains make of them takes their places; unless these are in the
      // host's memory, or have fewer bits.
      if (many) return chain && !has_flag(op.code, kUpdateOp) && (sums_leave || size_of(g.tensor(id).dtype) < 4);
      return chain || has_flag(op.code, kUpdateOp);
    };
    for (size_t i = 0; i < g.ops.size(); ++i)
      for (const TensorId id : g.ops[i].inputs)
        if (waits(g.ops[i], id) && !std::exchange(counted[id], 1))
          until_[(many ? i : static_cast<size_t>(g.tensor(id).producer)) + 1] += bytes_of(g.tensor(id));
    for (size_t i = 1; i < until_.size(); ++i) until_[i] += until_[i - 1];
  }
  bool is_loss(TensorId id) const { return id == loss_; }
  // Bytes of operands of updates that are made between two ops.
  int64_t between(OpId from, OpId to) const { return until_[to] - until_[from]; }

 private:
  TensorId loss_ = kNone;
  Ints until_;  // made before each op
};

// Which ops wait for a bucket: updates, sums of sums, gradients that are made of summed ones.
class Waits {
 public:
  Waits(const Graph& g, const std::vector<Member>& members)
      : g_(g), bucket_of_(g.ops.size(), kNone), known_to_(g.ops.size()), leads_(g.ops.size()) {
    for (const Member& m : members)
      leads_[m.op] = !gathers_variable(g, g.op(m.op));  // which waits for no bucket, merged or not
    for (size_t i = 0; i < g.ops.size(); ++i) {
      const Op& op = g.ops[i];
      for (const TensorId id : op.inputs)
        if (id != kNone && g.tensor(id).producer != kNone && leads_[g.tensor(id).producer]) leads_[i] = 1;
    }
  }

  // The op waits for all that is in the bucket from now on, and is waited for with it.
  void put(OpId op, OpId bucket) { bucket_of_[op] = bucket; }

  // Where it does not, the bucket remembers what was looked at.
  bool for_bucket(const Op& op, Bucket& bucket) {
    std::vector<OpId> todo;
    bool found = false;
    const auto look = [&](const Op& reader) {
      for (const TensorId id : reader.inputs) {
        OpId made = id == kNone ? kNone : g_.tensor(id).producer;
        if (made == kNone || !leads_[made]) continue;
        if (const OpId into = bucket_of_[made]; into != kNone) made = into;
        found |= made == bucket.op;
        if (!bucket.apart.insert(made).second) continue;
        todo.push_back(made);
        known_to_[made].push_back(&bucket);
      }
    };
    look(op);
    while (!todo.empty() && !found) {
      const OpId i = todo.back();
      todo.pop_back();
      look(g_.op(i));
    }
    return found;
  }

  // More has been put to the op: what buckets know of it does not hold.
  void forget(OpId op) {
    for (Bucket* bucket : known_to_[op])
      if (bucket->apart.contains(op)) bucket->apart.clear();
    known_to_[op].clear();
  }

 private:
  const Graph& g_;
  std::vector<OpId> bucket_of_;                 // the op that an op was merged into
  std::vector<std::vector<Bucket*>> known_to_;  // per op: buckets that had it in `apart` at some time
  std::vector<char> leads_;                     // per op: to something that is put into buckets
};

// The backward pass has nothing left that would hide the last sums of gradients: towards its end buckets are smaller.
constexpr int64_t kShareOfTheRest = 2, kLeastShare = 4;
int64_t full_at(int64_t rest, int64_t bucket_bytes) {
  return std::clamp(rest / kShareOfTheRest, bucket_bytes / kLeastShare, bucket_bytes);
}

void join(Op& into, const Op& op) {
  into.inputs.push_back(op.inputs[0]);
  into.outputs.push_back(op.outputs[0]);
  if (op.phase != Phase::kForward) into.phase = op.phase;
  if (op.code == OpCode::k_all_reduce) return;
  auto& sub_axes = std::get<Ints>(into.attrs.at("sub_axis"));
  const auto& more = attr_ints(op.attrs, "sub_axis");
  sub_axes.insert(sub_axes.end(), more.begin(), more.end());
}

}  // namespace

void form_buckets(ShardedGraph& lg, int64_t bucket_bytes, bool sums_leave) {
  Graph& g = lg.graph;
  copies_first(g);
  const std::vector<Member> members = members_of(g);
  std::map<Key, Bucket> open;
  Waits waits(g, members);
  const HeldBack held_back(lg, sums_leave);
  const std::vector<char> weights = put_off(lg), updated = behind_updates(g);
  std::vector<char> removed(g.ops.size());
  const auto whole = [&](const Op& op) -> const Tensor& {
    return g.tensor(op.code == OpCode::k_all_gather ? op.outputs[0] : op.inputs[0]);
  };
  const auto key = [&](const Op& op, OpId id) -> Key {
    return {op.code,
            whole(op).dtype,
            attr_string(op.attrs, "combine"),
            op.region,
            attr_int(op.attrs, "group"),
            op.stage,
            kind_of(g, op, weights[id]),
            op.phase == Phase::kUpdate,
            updated[id] != 0};
  };
  std::map<Key, int64_t> rest;  // bytes of gradients whose sums are in no bucket yet
  for (const Member& m : members)
    if (const Op& op = g.op(m.op); op.phase == Phase::kBackward) rest[key(op, m.op)] += bytes_of(whole(op));
  for (const Member& m : members) {
    Op& op = g.op(m.op);
    const Key k = key(op, m.op);
    const int64_t bytes = bytes_of(whole(op));
    Bucket& bucket = open[k];
    const bool full = bucket.bytes >= bucket.full_at ||
                      (bucket.held != kNone && held_back.between(bucket.held, m.order) >= bucket_bytes);
    if (bucket.op == kNone || full || waits.for_bucket(op, bucket)) {
      const auto left = rest.find(k);
      bucket = {m.op, 0, left == rest.end() ? bucket_bytes : full_at(left->second, bucket_bytes), {}, kNone};
    } else {
      join(g.op(bucket.op), op);
      removed[m.op] = 1;
      waits.forget(bucket.op);
      waits.forget(m.op);
    }
    waits.put(m.op, bucket.op);
    if (held_back.is_loss(op.outputs[0]) || (op.phase == Phase::kUpdate && bucket.held == kNone)) bucket.held = m.order;
    bucket.bytes += bytes;
    if (op.phase == Phase::kBackward) rest[k] -= bytes;
  }
  int sums = 0, scatters = 0, gathers = 0;
  for (const Member& m : members) {
    Op& op = g.op(m.op);
    if (removed[m.op]) continue;
    if (op.code == OpCode::k_all_reduce)
      op.name = fmt::format("bucket.{}", sums++);
    else if (op.inputs.size() > 1)
      op.name =
          op.code == OpCode::k_all_gather ? fmt::format("gather.{}", gathers++) : fmt::format("scatter.{}", scatters++);
  }
  compact(g, removed);
}

namespace {
// An attribute says where the device's part begins: that of one parameter.
bool has_begin(const ShardedGraph& lg, const Op& op, FactorTable& factors) {
  for (const Factor& f : factors.of(lg.graph, op).list)
    for (size_t k = 0; f.begin_attr && k < op.inputs.size() && k < f.inputs.size(); ++k)
      for (size_t a = 1; a < lg.axes() && op.inputs[k] != kNone && f.inputs[k].present(); ++a)
        if (lg.at(op.inputs[k], a).placement == Placement::kShard) return true;
  return false;
}
}  // namespace

void group_updates(ShardedGraph& lg, int64_t bucket_bytes) {
  Graph& g = lg.graph;
  struct Group {
    OpId op = kNone;
    int64_t bytes = 0;
    OpId bucket = kNone;
    Ints decays;
    int members = 0;
  };
  FactorTable factors;
  std::map<std::pair<TensorIds, std::string>, Group> open;
  std::vector<char> removed(g.ops.size());
  std::vector<std::pair<OpId, OpId>> order;  // (when it is ready, op)
  const auto ready = [&](const Op& op, bool sums) {
    OpId last = kNone;
    for (const TensorId id : op.inputs)
      if (id != kNone && g.tensor(id).producer != kNone &&
          (!sums || g.op(g.tensor(id).producer).code == OpCode::k_all_reduce ||
           g.op(g.tensor(id).producer).code == OpCode::k_reduce_scatter))
        last = std::max(last, g.tensor(id).producer);
    return last;
  };
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (has_flag(g.ops[i].code, kUpdateOp)) order.emplace_back(ready(g.ops[i], false), static_cast<OpId>(i));
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  // How many updates lead to each op, one by the other. What one makes may lead to another by a sum that both have a
  // part in (LAMB's norms): those are no group.
  std::vector<int> rank(g.ops.size());
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].inputs)
      if (const OpId made = id == kNone ? kNone : g.tensor(id).producer; made != kNone)
        rank[i] = std::max(rank[i], rank[made] + (has_flag(g.op(made).code, kUpdateOp) ? 1 : 0));
  const auto close = [&](Group& group) {
    if (group.members > 1 && !group.decays.empty()) g.op(group.op).attrs["decays"] = group.decays;
    group = {};
  };
  for (const auto& [when, id] : order) {
    Op& op = g.op(id);
    const size_t lead = leading_operands(op);
    const bool has_decays = op.attrs.contains("decays");
    if (op.inputs.size() <= lead || (has_decays && attr_ints(op.attrs, "decays").empty()) || has_begin(lg, op, factors))
      continue;  // decays left out: not to be merged
    std::string key = def(op.code).name;
    for (const auto& [name, value] : without(op.attrs, "decays")) key += fmt::format(" {}={}", name, to_string(value));
    key += fmt::format(" {} {} {}", static_cast<int>(op.region), op.stage, rank[id]);
    Group& group = open[{{op.inputs.begin(), op.inputs.begin() + static_cast<std::ptrdiff_t>(lead)}, key}];
    const OpId bucket = ready(op, true);
    if (group.op != kNone && (group.bytes >= bucket_bytes || group.bucket != bucket)) close(group);
    for (size_t k = lead; k < op.inputs.size(); ++k)
      if (g.tensor(op.inputs[k]).kind == TensorKind::kValue) group.bytes += bytes_of(g.tensor(op.inputs[k]));
    if (has_decays) {
      const auto& d = attr_ints(op.attrs, "decays");
      group.decays.insert(group.decays.end(), d.begin(), d.end());
    }
    ++group.members;
    if (group.op == kNone) {
      group.op = id, group.bucket = bucket;
      continue;
    }
    Op& into = g.op(group.op);
    into.inputs.insert(into.inputs.end(), op.inputs.begin() + static_cast<std::ptrdiff_t>(lead), op.inputs.end());
    into.outputs.insert(into.outputs.end(), op.outputs.begin(), op.outputs.end());
    removed[id] = 1;
  }
  for (auto& [key, group] : open)
    if (group.op != kNone) close(group);
  compact(g, removed);
}

}  // namespace whale
