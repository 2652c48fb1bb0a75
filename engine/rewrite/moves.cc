#include "rewrite/moves.h"

#include <algorithm>

#include "cost/cost.h"
#include "ops/cost.h"
#include "rewrite/copies.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

constexpr size_t kAhead = 2;   // copies in that are there before the op that needs them: double buffering
constexpr size_t kFar = 32;    // ops between two readers that do not share a copy
constexpr double kSafety = 2;  // of a copy's estimated time

// The axes along which a device may have no samples of some micro-batch, and so nothing of the tensor: what is copied
// with it has to be gone there too.
std::vector<size_t> may_be_gone(const ShardedGraph& lg, TensorId id) {
  std::vector<size_t> out;
  int64_t ways = 1;
  bool uneven = false;
  for (size_t a = 0; a < lg.axes(); ++a) {
    if (!lg.at(id, a).samples) continue;
    out.push_back(a);
    if (a == kTime) continue;
    const MeshAxis& axis = lg.mesh_axis(a, lg.stage(id));
    ways *= axis.size, uneven |= !axis.shares.empty();
  }
  return uneven || ways > lg.batch / lg.micro_batches ? out : std::vector<size_t>{};
}

}  // namespace

Moves::Moves(ShardedGraph& graph)
    : lg_(graph),
      g_(graph.graph),
      uses_(g_.tensors.size()),
      later_(weight_ops(graph)),
      timed_(graph.micro_batches > 1),
      pipelined_(timed_ && !graph.tasks.schedule.empty()),
      before_(g_.ops.size() + 1) {
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const bool view = is_view(g_.ops[i].code);
    seconds_.push_back(view ? 0 : op_seconds(cost_of(g_, g_.ops[i]), lg_.tasks.cost.device));
    if (view) continue;
    for (const TensorId id : g_.ops[i].inputs) {
      if (id == kNone) continue;
      std::vector<Use>& uses = uses_[view_root(g_, id)];
      const bool known = std::any_of(uses.begin(), uses.end(), [&](const Use& u) { return u.op == i && u.id == id; });
      if (!known) uses.push_back({i, id});
    }
  }
}

Moves::Segment Moves::segment_of(size_t number, TensorId read) const {
  const Op& op = g_.ops[number];
  // The sending half of a transfer stands with what makes its operand.
  const int32_t stage = op.code == OpCode::k_transfer && read != kNone ? lg_.stage(read) : op.stage;
  const int32_t mesh = lg_.tasks.mesh_of_stage[stage];
  if (!timed_) return {0, mesh, 0, op.phase};
  if (!pipelined_ || op.region != Region::kBody) return {static_cast<int>(op.region), mesh, 0, op.phase};
  return {static_cast<int>(Region::kBody), stage, 1 + static_cast<int>(work_of(op, later_[number])), op.phase};
}

size_t Moves::ops_between(size_t from, size_t to) const {
  size_t n = 0;
  if (from >= to) return n;
  const auto mesh = [&](size_t i) { return lg_.tasks.mesh_of_stage[g_.ops[i].stage]; };
  for (size_t i = from; i < to; ++i) n += !is_view(g_.ops[i].code) && mesh(i) == mesh(from);
  return n;
}

TensorIds Moves::store(const TensorIds& values, size_t before, size_t like_op, const TensorIds& places) {
  Op op = op_beside(g_.ops[like_op], OpCode::k_to_host, g_.tensor(values[0]).name + ".to_host", values, {});
  op.inputs.insert(op.inputs.end(), places.begin(), places.end());
  op.attrs = {{"into", !places.empty()}};
  for (const TensorId id : values) op.outputs.push_back(add_like(lg_, id, ".host"));
  TensorIds out = op.outputs;
  before_[before].push_back({0, std::move(op)});
  return out;
}

void Moves::fetch(TensorId host, TensorId root, const std::vector<Use>& uses, size_t after) {
  std::map<Segment, std::vector<Use>> groups;
  const auto hand_over = [&](std::vector<Use>& group) {
    if (!group.empty()) requests_.push_back({host, root, std::move(group), after});
    group.clear();
  };
  for (const Use& use : uses) {
    std::vector<Use>& group = groups[segment_of(use.op, root)];
    if (!group.empty() && ops_between(group.back().op, use.op) > kFar) hand_over(group);
    group.push_back(use);
  }
  for (auto& [segment, group] : groups) hand_over(group);
}

TensorId Moves::fetch_first(TensorId host, TensorId view) {
  Op op;
  op.code = OpCode::k_to_device;
  op.name = g_.tensor(host).name + ".to_device";
  op.inputs = {host};
  op.stage = lg_.stage(host);
  if (timed_) op.region = Region::kPrologue;
  const TensorId out = add_like(lg_, host, ".fetched");
  op.outputs = {out};
  before_[0].push_back({1, op});
  std::map<TensorId, TensorId> known;
  return seen_through(view, host, out, op, 0, known);
}

// From the last to the first: a copy is over before its reader runs and before the next copy starts, by the estimate,
// and starts when the reader before the one before it is done, at the earliest.
void Moves::place(std::vector<Copy*>& copies, const std::vector<size_t>& ops) const {
  std::sort(copies.begin(), copies.end(), [](const Copy* a, const Copy* b) { return a->reader < b->reader; });
  std::vector<double> begin;  // of the ops of the segment
  double now = 0;
  for (const size_t i : ops) begin.push_back(now), now += seconds_[i];
  const auto rank = [&](size_t op) {
    return static_cast<size_t>(std::lower_bound(ops.begin(), ops.end(), op) - ops.begin());
  };
  double next = now;
  for (size_t k = copies.size(); k-- > 0;) {
    Copy& copy = *copies[k];
    const size_t reader = rank(copy.reader);
    const double start = std::min(begin[reader], next) - kSafety * copy.seconds;
    size_t at = static_cast<size_t>(std::upper_bound(begin.begin(), begin.end(), start) - begin.begin());
    if (at > 0) --at;
    if (k >= kAhead) at = std::max(at, rank(copies[k - kAhead]->reader) + 1);
    at = std::min(std::max(at, rank(copy.after)), reader);
    copy.position = ops[at];
    next = begin[at];
  }
}

// The tensor as which a reader knows a storage, over its copy.
TensorId Moves::seen_through(TensorId id, TensorId root, TensorId copy, const Op& reader, size_t position,
                             std::map<TensorId, TensorId>& known) {
  if (id == root) return copy;
  if (const auto at = known.find(id); at != known.end()) return at->second;
  Op view = g_.op(g_.tensor(id).producer);
  view.inputs[0] = seen_through(view.inputs[0], root, copy, reader, position, known);
  view.name += ".fetched";
  view.phase = reader.phase, view.region = reader.region;
  const TensorId out = add_like(lg_, id, ".fetched");
  view.outputs = {out};
  before_[position].push_back({2, std::move(view)});
  return known[id] = out;
}

void Moves::insert(const Copy& copy) {
  const Op reader = g_.ops[copy.reader];
  const TensorId first = copy.requests[0].root;
  Op op = op_beside(reader, OpCode::k_to_device, g_.tensor(first).name + ".to_device", {}, {});
  if (reader.code == OpCode::k_transfer) op.stage = lg_.stage(first);
  for (const Request& r : copy.requests) {
    op.inputs.push_back(r.host);
    op.outputs.push_back(add_like(lg_, r.root, ".fetched"));
    std::map<TensorId, TensorId> views;
    for (const Use& use : r.uses) {
      const TensorId now = seen_through(use.id, r.root, op.outputs.back(), reader, copy.reader, views);
      std::replace(g_.ops[use.op].inputs.begin(), g_.ops[use.op].inputs.end(), use.id, now);
    }
  }
  before_[copy.position].push_back({1, std::move(op)});
}

void Moves::apply() {
  std::map<std::tuple<Segment, size_t, std::vector<size_t>>, Copy> copies;
  for (Request& r : requests_) {
    const size_t reader = r.uses.front().op;
    Copy& copy = copies[{segment_of(reader, r.root), reader, may_be_gone(lg_, r.root)}];
    copy.reader = reader;
    copy.after = std::max(copy.after, r.after);
    copy.seconds += link_seconds(static_cast<double>(bytes_of(g_.tensor(r.root))), copy.requests.empty() ? 1 : 0,
                                 lg_.tasks.cost.host);
    copy.requests.push_back(std::move(r));
  }
  // Phases follow each other in a segment without a join: a copy may be made in the phase before.
  std::map<Segment, std::vector<Copy*>> by_segment;
  std::map<Segment, std::vector<size_t>> ops;
  const auto whole = [](Segment s) {
    std::get<3>(s) = Phase::kForward;
    return s;
  };
  for (auto& [key, copy] : copies) by_segment[whole(std::get<0>(key))].push_back(&copy);
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    ops[whole(segment_of(i))].push_back(i);
    if (g_.ops[i].code == OpCode::k_transfer)
      if (const Segment sends = whole(segment_of(i, g_.ops[i].inputs[0])); sends != whole(segment_of(i)))
        ops[sends].push_back(i);
  }
  for (auto& [segment, list] : by_segment) place(list, ops.at(segment));
  for (const auto& [key, copy] : copies) insert(copy);
  std::vector<Op> all;
  for (size_t i = 0; i < before_.size(); ++i) {
    std::stable_sort(before_[i].begin(), before_[i].end(),
                     [](const Inserted& a, const Inserted& b) { return a.rank < b.rank; });
    for (Inserted& inserted : before_[i]) all.push_back(std::move(inserted.op));
    if (i < g_.ops.size()) all.push_back(std::move(g_.ops[i]));
  }
  for (Op& op : all) op.origin = kNone;  // numbers have changed
  g_.ops = std::move(all);
  compact(g_, {});
}

}  // namespace whale
