#include "rewrite/order.h"

#include <algorithm>
#include <map>
#include <queue>
#include <set>

#include "base/error.h"
#include "rewrite/prefetch.h"

namespace whale {
namespace {

constexpr int kSweeps = 6;  // at most, for planning time: one takes an op far to the end, one place to the start

struct Order {
  ShardedGraph& lg;
  Graph& g;
  std::vector<TensorId> root;
  Lists readers;             // per storage root
  Lists overwrites;          // per op, the storage that it writes over: everyone else must have read it before
  std::vector<OpId> checks;  // what may stop a step: ops that check an index, and the loss
  explicit Order(ShardedGraph& graph)
      : lg(graph),
        g(graph.graph),
        root(roots_of(g)),
        readers(storage_readers(g, root)),
        overwrites(overwritten()),
        checks(checking()) {}

  Lists overwritten() const {
    std::vector<TensorId> variable_of(g.tensors.size(), kNone);  // of which the tensor is the next value
    for (const Variable& v : g.variables)
      if (v.next != kNone) variable_of[v.next] = v.tensor;
    std::vector<Lists::Entry> entries;
    for (size_t i = 0; i < g.ops.size(); ++i) {
      const Op& op = g.ops[i];
      if (is_view(op.code)) continue;  // shares storage, writes nothing
      for (const Alias& alias : aliases_of(g, op))
        if (const TensorId x = op.inputs[alias.input]; alias.must && x != kNone)
          entries.emplace_back(static_cast<OpId>(i), root[x]);
      for (const TensorId y : op.outputs)
        if (y != kNone && variable_of[y] != kNone) entries.emplace_back(static_cast<OpId>(i), variable_of[y]);
    }
    return {g.ops.size(), entries};
  }

  std::vector<OpId> checking() const {
    std::vector<OpId> out;
    for (const NamedTensor& f : lg.fetches)
      if (f.name == "loss" && g.tensor(f.tensor).producer != kNone) out.push_back(g.tensor(f.tensor).producer);
    for (size_t i = 0; i < g.ops.size(); ++i)
      if (def(g.ops[i].code).index.input >= 0 && attr_int(g.ops[i].attrs, kIndexLimit) > 0)
        out.push_back(static_cast<OpId>(i));
    return out;
  }

  // Edges "before -> after" that are not data: readers before the op that overwrites, checks of indices and the loss
  // before updates.
  Lists edges() const {
    std::vector<Lists::Entry> out;
    const Lists data = followers_of(g);
    const auto reaches = [&](OpId from, OpId to) {
      std::vector<OpId> todo{from};
      std::set<OpId> seen{from};
      while (!todo.empty()) {
        const OpId i = todo.back();
        todo.pop_back();
        if (i == to) return true;
        for (const OpId j : data[i])
          if (j <= to && seen.insert(j).second) todo.push_back(j);
      }
      return false;
    };
    for (size_t i = 0; i < g.ops.size(); ++i) {
      const auto w = static_cast<OpId>(i);
      // A bad index or a loss that is not finite stops a step before it has changed anything.
      const auto written = overwrites[i];
      const bool updates = std::any_of(written.begin(), written.end(),
                                       [&](TensorId id) { return g.tensor(id).kind == TensorKind::kVariable; });
      for (const OpId c : checks)
        if (updates && c != w && (c < w || !reaches(w, c))) out.emplace_back(c, w);
      for (const TensorId storage : written)
        for (const OpId r : readers[storage])
          if (r != w && (r < w || !reaches(w, r))) out.emplace_back(r, w);
    }
    out.reserve(out.size() + data.entries());
    for (size_t i = 0; i < g.ops.size(); ++i)
      for (const OpId j : data[i]) out.emplace_back(static_cast<OpId>(i), j);
    return {g.ops.size(), out};
  }
};

// What an op adds to a sum over micro-batches, whose other operand is there from the start; kNone: it does not.
TensorId summand_of(const Op& op) { return op.code == OpCode::k_accumulate ? op.inputs[1] : kNone; }

// Steps behind an op at its turn: what uses up its result (sums, updates) frees memory and goes before its collective.
enum Steps : int { kFollows = 1, kLaunches = 2 };

// When an op would like to run: what is ready runs in the order of the places.
struct Place {
  OpId turn = kNone;    // whose turn it is: that of the op itself, or of another that it stands behind
  int steps = 0;        // behind it
  OpId number = kNone;  // of a follower: those at the same step keep their order
  int sooner = 0;       // below 0: just before the op with this place otherwise
  auto operator<=>(const Place&) const = default;
  Place then(Steps more, OpId follower = kNone) const { return {turn, steps + more, follower}; }
  Place before() const { return {turn, steps, number, sooner - 1}; }
  // Of the ops of one update, each behind the one before, and not each behind those of all updates.
  Place along(OpId follower) const { return number == kNone ? then(kFollows, follower) : Place{turn, steps, follower}; }
};
constexpr Place kNever{.turn = INT32_MAX};

std::vector<Place> places(const Order& o, int64_t prefetch) {
  const Graph& g = o.g;
  const size_t n = g.ops.size();
  std::vector<Place> place(n);
  const auto place_of = [&](OpId op) -> Place& { return place[op]; };
  const auto maker = [&](TensorId id) { return id == kNone ? kNone : g.tensor(id).producer; };
  // A sum is added to as soon as its summand is there, so that no micro-batch's gradients lie beside their sums.
  for (size_t i = 0; i < n; ++i) {
    const auto number = static_cast<OpId>(i);
    const OpId made = maker(summand_of(g.ops[i]));
    place[i] = made == kNone ? Place{number} : place_of(made).then(kFollows, number);
  }
  const Lists followers = followers_of(g);
  // Ready at any time: made of constants and variables alone, by however many ops, or of inputs by one.
  std::vector<char> source(n), alone(n);
  for (size_t i = 0; i < n; ++i) {
    const Op& op = g.ops[i];
    const auto from = [&](TensorId id) { return maker(id) == kNone || alone[maker(id)]; };
    const auto input = [&](TensorId id) { return id != kNone && g.tensor(id).kind == TensorKind::kInput; };
    source[i] = !has_flag(op.code, kCollective) && o.overwrites[i].empty() && std::ranges::all_of(op.inputs, from);
    alone[i] = source[i] && std::ranges::none_of(op.inputs, input);
  }
  const auto first_reader = [&](size_t i) {
    Place first = kNever;
    for (const OpId r : followers[i]) first = std::min(first, place_of(r));
    return first;
  };
  const auto made_at = [&](const TensorIds& ids) {
    Place last;
    for (const TensorId id : ids)
      if (const OpId made = maker(id); made != kNone && !source[made]) last = std::max(last, place_of(made));
    return last;
  };
  // A backward op all of whose operands the forward pass left: gathered again, or for a weight's gradient alone.
  const auto of_forward = [&](const Op& op) {
    return op.phase == Phase::kBackward && std::ranges::all_of(op.inputs, [&](TensorId id) {
             return maker(id) == kNone || g.op(maker(id)).phase == Phase::kForward;
           });
  };
  const auto launched = [](const Op& op) { return has_flag(op.code, kCollective) && op.code != OpCode::k_shift; };
  std::map<int32_t, std::vector<Gather>> late;  // per stage
  for (size_t i = 0; i < n; ++i)
    if (launched(g.ops[i])) {  // rounds of a ring keep their pace
      place[i] = made_at(g.ops[i].inputs).then(kLaunches);
      // These, and parameters that live in parts, are gathered a little before they are read, not all at the start.
      const bool waits = place[i].turn == kNone || of_forward(g.ops[i]);
      if (const Place first = waits ? first_reader(i) : kNever; first < kNever)
        late[g.ops[i].stage].push_back({first.turn, static_cast<OpId>(i)});
    }
  for (auto& [stage, gathers] : late)
    for (const auto& [op, at] : start_gathers(o.lg, o.readers, o.overwrites, std::move(gathers), prefetch))
      place_of(op) = std::max(place_of(op), Place{at}.before());
  // Updates wait for the loss: it goes to where it is fetched as soon as it is there.
  for (const OpId c : o.checks)
    if (g.op(c).code == OpCode::k_transfer) place_of(c) = made_at(g.op(c).inputs).then(kLaunches);
  std::vector<Place> launches{{.turn = static_cast<OpId>(n)}};  // and the end
  for (size_t i = 0; i < n; ++i)
    if (launched(g.ops[i])) launches.push_back(place[i]);
  std::sort(launches.begin(), launches.end());
  // Of an update, or a slice for updates alone: a whole gradient goes as soon as its slice is there.
  const auto for_update = [&](size_t i) {
    const auto updates = [&](OpId r) { return g.op(r).phase == Phase::kUpdate; };
    return updates(static_cast<OpId>(i)) ||
           (g.ops[i].code == OpCode::k_local_slice && std::ranges::all_of(followers[i], updates));
  };
  for (size_t i = 0; i < n; ++i) {
    const Op& op = g.ops[i];
    const TensorId added = summand_of(op);
    if ((!for_update(i) && added == kNone) || has_flag(op.code, kCollective)) continue;
    const TensorIds awaited = added == kNone ? op.inputs : TensorIds{added};
    const auto number = static_cast<OpId>(i);
    Place when = made_at(awaited).along(number);
    // Behind the next launch: waiting for this collective overlaps that one.
    for (const TensorId id : awaited)
      if (const OpId made = maker(id); made != kNone && has_flag(g.op(made).code, kCollective))
        when = std::max(when, std::ranges::upper_bound(launches, place_of(made))->then(kFollows, number));
    for (const TensorId storage : o.overwrites[i])
      for (const OpId r : o.readers[storage])
        if (r != number && g.op(r).phase != Phase::kUpdate) when = std::max(when, place_of(r).then(kFollows, number));
    place[i] = when;
  }
  // Sources sink to their first reader, from the last to the first so that chains of them sink together.
  for (size_t i = n; i-- > 0;)
    if (const Place first = source[i] ? first_reader(i) : kNever; first < kNever) place[i] = first.before();
  return place;
}

void apply_order(Graph& g, const std::vector<OpId>& order) {
  take_in_order(g, order);
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].outputs)
      if (id != kNone) g.tensor(id).producer = static_cast<OpId>(i);
}

}  // namespace

bool is_view(OpCode code) { return has_flag(code, kView); }

TensorId view_root(const Graph& g, TensorId id) {
  while (g.tensor(id).producer != kNone && is_view(g.op(g.tensor(id).producer).code))
    id = g.op(g.tensor(id).producer).inputs[0];
  return id;
}

std::vector<TensorId> roots_of(const Graph& g) {
  std::vector<TensorId> root(g.tensors.size());
  for (size_t t = 0; t < root.size(); ++t) root[t] = view_root(g, static_cast<TensorId>(t));
  return root;
}

Lists storage_readers(const Graph& g, const std::vector<TensorId>& root) {
  std::vector<Lists::Entry> entries;
  entries.reserve(3 * g.ops.size());
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].inputs)
      if (id != kNone && !is_view(g.ops[i].code)) entries.emplace_back(root[id], static_cast<OpId>(i));
  return {g.tensors.size(), entries};
}

int64_t bytes_of(const Tensor& tensor) { return element_count(tensor.dims) * size_of(tensor.dtype); }

void order_ops(ShardedGraph& lg, int64_t prefetch) {
  Order o(lg);
  const auto edges = o.edges();
  const std::vector<Place> place = places(o, prefetch);
  const size_t n = lg.graph.ops.size();
  std::vector<int> waiting(n);
  for (size_t i = 0; i < n; ++i)
    for (const OpId j : edges[i]) ++waiting[j];
  using Item = std::pair<Place, OpId>;
  std::priority_queue<Item, std::vector<Item>, std::greater<>> ready;
  for (size_t i = 0; i < n; ++i)
    if (waiting[i] == 0) ready.emplace(place[i], static_cast<OpId>(i));
  std::vector<OpId> order;
  order.reserve(n);
  while (!ready.empty()) {
    const OpId i = ready.top().second;
    ready.pop();
    order.push_back(i);
    for (const OpId j : edges[i])
      if (--waiting[j] == 0) ready.emplace(place[j], j);
  }
  WHALE_CHECK(order.size() == n, "ordering: readers and writers wait for each other");
  apply_order(lg.graph, order);
}

void shorten_lives(ShardedGraph& lg) {
  Order o(lg);
  Graph& g = lg.graph;
  const size_t n = g.ops.size();
  if (n < 2) return;
  const Lists after = o.edges();
  std::vector<OpId> order(n), position(n);
  for (size_t i = 0; i < n; ++i) order[i] = position[i] = static_cast<OpId>(i);
  std::vector<char> pinned(g.tensors.size());  // alive to the end, or storage of its own
  for (const NamedTensor& f : lg.fetches) pinned[o.root[f.tensor]] = 1;
  for (const Variable& v : g.variables)
    if (v.next != kNone) pinned[o.root[v.next]] = 1;
  std::vector<int64_t> bytes(g.tensors.size());  // that count
  for (size_t t = 0; t < bytes.size(); ++t)
    if (g.tensors[t].kind == TensorKind::kValue && !pinned[t])
      bytes[t] = static_cast<int64_t>(local_bytes(lg, static_cast<TensorId>(t)));
  // Gradients of parameters are used up by what follows them: they do not last.
  const auto passing = [&](TensorId y) {
    const auto& r = o.readers[y];
    return !r.empty() && std::all_of(r.begin(), r.end(), [&](OpId k) {
      return g.op(k).phase == Phase::kUpdate || has_flag(g.op(k).code, kCollective);
    });
  };
  std::vector<int64_t> made(n), lasting(n);  // bytes, per op
  for (size_t i = 0; i < n; ++i)
    for (const TensorId y : g.ops[i].outputs) {
      if (y == kNone) continue;
      made[i] += bytes[y];
      if (!passing(y)) lasting[i] += bytes[y];
    }
  // Bytes that die when `i` runs while `later` is still to come; both stand at position p or p + 1.
  const auto freed = [&](OpId i, OpId later, size_t p) {
    int64_t sum = 0;
    const auto& inputs = g.op(i).inputs;
    const auto root_of = [&](TensorId id) { return id == kNone ? kNone : o.root[id]; };
    for (auto id = inputs.begin(); id != inputs.end(); ++id) {
      const TensorId storage = root_of(*id);
      if (storage == kNone || bytes[storage] == 0) continue;
      if (std::any_of(inputs.begin(), id, [&](TensorId other) { return root_of(other) == storage; })) continue;
      const auto r = o.readers[storage];
      const auto past = [&](OpId k) { return k == i || (k != later && static_cast<size_t>(position[k]) < p); };
      if (std::all_of(r.begin(), r.end(), past)) sum += bytes[storage];
    }
    return sum;
  };
  const auto region = [&](OpId i) { return std::pair(g.op(i).region, g.op(i).phase == Phase::kUpdate); };
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    bool changed = false;
    for (size_t p = 0; p + 1 < n; ++p) {
      const OpId a = order[p], b = order[p + 1];
      if (region(a) != region(b) || is_view(g.op(a).code) || is_view(g.op(b).code)) continue;
      if (has_flag(g.op(a).code, kCollective) || has_flag(g.op(b).code, kCollective)) continue;
      const auto ia = static_cast<size_t>(a), ib = static_cast<size_t>(b);
      if (std::find(after[ia].begin(), after[ia].end(), b) != after[ia].end()) continue;
      const int64_t a_first = std::max(made[ia], lasting[ia] - freed(a, b, p) + made[ib]);
      const int64_t b_first = std::max(made[ib], lasting[ib] - freed(b, a, p) + made[ia]);
      if (b_first >= a_first) continue;
      std::swap(order[p], order[p + 1]);
      position[ia] = static_cast<OpId>(p + 1);
      position[ib] = static_cast<OpId>(p);
      changed = true;
    }
    if (!changed) break;
  }
  apply_order(g, order);
}

}  // namespace whale
