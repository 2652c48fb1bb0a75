#include "rewrite/slice_updates.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "cost/overlap.h"
#include "ops/cost.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"
#include "shard/reshards.h"
#include "shard/sub_axes.h"

namespace whale {
namespace {

constexpr int64_t kMostReplicas = 8;  // a slice is a program of its own: by cost only where they are few

// One update that can be sliced along `axis`.
struct Candidate {
  OpId update = kNone, sum = kNone;
  size_t axis = 0, gradient = 0;  // operand
  SubAxis sub_axis;
  std::vector<size_t> carriers;  // operands that have the sub-axis, the gradient among them
};

bool in_place(const SubAxis& sub_axis) { return sub_axis.dim == 0 && sub_axis.outer == 1; }

class Slicer {
 public:
  Slicer(ShardedGraph& graph, bool always)
      : lg_(graph), g_(graph.graph), always_(always), readers_(readers_of(graph.graph)) {
    for (const NamedTensor& f : lg_.fetches) fetched_.insert(f.tensor);
    std::vector<Lists::Entry> next;
    for (size_t v = 0; v < g_.variables.size(); ++v)
      if (g_.variables[v].next != kNone) next.emplace_back(g_.variables[v].next, static_cast<int32_t>(v));
    next_ = {g_.tensors.size(), next};
  }

  void run() {
    std::vector<Candidate> chosen;
    double bytes = 0, saved = 0;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      if (!has_flag(g_.ops[i].code, kUpdateOp)) continue;
      for (size_t a = lg_.axes(); a-- > 1;) {
        Candidate c;
        if (!find(static_cast<OpId>(i), a, c)) continue;
        const UpdateWork work = work_of(c);
        const CostModel& cost = lg_.tasks.cost;
        const LinkRates& link = lg_.tasks.link(g_.ops[i].stage, a - 1);
        const double gain =
            whole_update_seconds(work, cost.device, link) - sliced_update_seconds(work, cost.device, link);
        if (!always_ && (gain <= 0 || work.devices > kMostReplicas)) continue;
        chosen.push_back(c);
        bytes += work.gradient_bytes;
        saved += gain;
        break;
      }
    }
    if (chosen.empty() && always_)
      lg_.notes.push_back("No update can run on slices: no replicas sum a gradient that the update alone reads.");
    if (chosen.empty() || (!always_ && saved < lg_.tasks.cost.worth_seconds)) return;
    size_t reshards = 0;
    for (const Candidate& c : chosen) reshards += c.carriers.size() + g_.op(c.update).outputs.size();
    g_.ops.reserve(g_.ops.size() + reshards);
    g_.tensors.reserve(g_.tensors.size() + reshards);
    for (const Candidate& c : chosen) slice(c);
    compact(g_, {});
    lg_.notes.push_back(fmt::format(
        "{} update(s) of {:.3g} MB run on a slice per replica between a reduce_scatter and an all_gather: {}.",
        chosen.size(), bytes / 1e6,
        always_ ? std::string("asked for")
                : fmt::format("{:.3g} ms a step less than an all_reduce and whole updates", 1e3 * saved)));
  }

 private:
  bool find(OpId id, size_t a, Candidate& c) {
    const Op& op = g_.op(id);
    if (lg_.size(a, op.stage) == 1 || lg_.tasks.task(op).roles[a - 1] == AxisRole::kSplit) return false;
    c.update = id, c.axis = a;
    int sums = 0;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone || g_.tensor(op.inputs[i]).producer == kNone) continue;
      const OpId made = g_.tensor(op.inputs[i]).producer;
      const Op& sum = g_.op(made);
      if (sum.code != OpCode::k_all_reduce || static_cast<size_t>(attr_int(sum.attrs, "group")) + 1 != a) continue;
      if (sum.inputs.size() != 1 || attr_string(sum.attrs, "combine") != "sum" || alone(op.inputs[i], id) != 1)
        continue;
      c.sum = made, c.gradient = i;
      ++sums;
    }
    if (sums != 1) return false;
    for (const TensorId y : op.outputs)
      if (y == kNone || next_[y].empty() || fetched_.contains(y) || !readers_[y].empty()) return false;
    for (const Factor& f : factors_.of(g_, op).list)
      if (f.kind == FactorKind::kMap && fits(op, f, a, c)) return true;
    return false;
  }

  // 1: `reader` alone reads the tensor.
  size_t alone(TensorId id, OpId reader) const {
    const auto& r = readers_[id];
    return fetched_.contains(id) || r.size() != 1 || r[0] != reader ? 0 : 1;
  }

  bool fits(const Op& op, const Factor& f, size_t a, Candidate& c) const {
    if (f.extent < lg_.size(a, op.stage) || !f.inputs[c.gradient].present()) return false;
    c.sub_axis = f.inputs[c.gradient];
    c.carriers.clear();
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone) continue;
      if (lg_.at(op.inputs[i], a).placement != Placement::kReplicate) return false;
      if (i >= f.inputs.size() || !f.inputs[i].present()) continue;
      if (i != c.gradient && g_.tensor(op.inputs[i]).kind != TensorKind::kVariable) return false;
      if (!(f.inputs[i] == c.sub_axis)) return false;
      c.carriers.push_back(i);
    }
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (o >= f.outputs.size() || !(f.outputs[o] == c.sub_axis)) return false;
    // Nothing else may cut the dimension.
    for (const size_t i : c.carriers)
      for (size_t b = 0; b < lg_.axes(); ++b)
        if (lg_.at(op.inputs[i], b).placement == Placement::kShard &&
            lg_.at(op.inputs[i], b).sub_axis.dim == c.sub_axis.dim)
          return false;
    return true;
  }

  double local_bytes(TensorId id, const Op& op) const {
    double bytes = static_cast<double>(bytes_of(g_.tensor(id)));
    for (size_t b = 1; b < lg_.axes(); ++b)
      if (lg_.at(id, b).placement == Placement::kShard) bytes /= static_cast<double>(lg_.size(b, op.stage));
    return bytes;
  }

  UpdateWork work_of(const Candidate& c) const {
    const Op& op = g_.op(c.update);
    UpdateWork work;
    work.devices = lg_.size(c.axis, op.stage);
    work.gradient_bytes = local_bytes(op.inputs[c.gradient], op);
    const double share = work.gradient_bytes / static_cast<double>(bytes_of(g_.tensor(op.inputs[c.gradient])));
    const OpCost cost = cost_of(g_, op);
    work.update = {cost.flops * share, cost.bytes * share};
    for (const TensorId y : op.outputs) work.result_bytes += local_bytes(y, op);
    for (const size_t i : c.carriers)
      if (i != c.gradient && !in_place(c.sub_axis)) work.slice_bytes += local_bytes(op.inputs[i], op);
    return work;
  }

  TensorId like(TensorId id, const std::string& suffix, int32_t stage) {
    const TensorId made = add_like(lg_, id, suffix);
    lg_.stages.back() = stage;
    return made;
  }

  // Appends the reshard; the new tensor lies as `to` along the axis.
  TensorId reshard(OpCode code, TensorId id, const char* suffix, const Candidate& c, const AxisSharding& to,
                   std::initializer_list<const char*> empty) {
    const Op& update = g_.op(c.update);
    const TensorId made = like(id, suffix, update.stage);
    lg_.at(made, c.axis) = to;
    Op op = op_beside(update, code, g_.tensor(made).name, {id}, {made});
    op.attrs.reserve(2 + empty.size());
    op.attrs["sub_axis"] = Ints{c.sub_axis.dim, c.sub_axis.outer, c.sub_axis.inner};
    op.attrs["group"] = static_cast<int64_t>(c.axis) - 1;
    for (const char* name : empty) op.attrs[name] = code == OpCode::k_all_gather ? Attr{Ints{}} : Attr{int64_t{0}};
    g_.tensor(made).producer = static_cast<OpId>(g_.ops.size());
    g_.tensor(made).output = 0;
    g_.ops.push_back(std::move(op));
    return made;
  }

  void slice(const Candidate& c) {
    const AxisSharding cut{.placement = Placement::kShard, .sub_axis = c.sub_axis, .state = true};
    Op& sum = g_.op(c.sum);
    sum.code = OpCode::k_reduce_scatter;
    for (auto& [name, value] : sub_axis_attr("sub_axis", c.sub_axis)) sum.attrs[name] = value;
    sum.attrs["cuts"] = Ints{};
    lg_.at(sum.outputs[0], c.axis) = cut;
    for (const size_t i : c.carriers) {
      if (i == c.gradient) continue;
      const TensorId whole = g_.op(c.update).inputs[i];
      const TensorId part = reshard(OpCode::k_local_slice, whole, ".slice", c, cut, {"begin", "end"});
      g_.op(c.update).inputs[i] = part;
    }
    for (const TensorId y : TensorIds(g_.op(c.update).outputs)) {
      lg_.at(y, c.axis) = cut;
      const TensorId whole = reshard(OpCode::k_all_gather, y, ".gathered", c, {}, {"cuts"});
      for (const int32_t v : next_[y]) g_.variables[v].next = whole;
    }
  }

  ShardedGraph& lg_;
  Graph& g_;
  bool always_;
  Lists readers_;  // as the graph was
  FactorTable factors_;
  std::set<TensorId> fetched_;
  Lists next_;  // per tensor, the variables whose next value it is
};

}  // namespace

void slice_updates(ShardedGraph& graph, bool always) {
  if (!graph.exact) Slicer(graph, always).run();
}

void view_slices(ShardedGraph& lg) {
  Graph& g = lg.graph;
  const auto readers = readers_of(g);
  for (Op& op : g.ops) {
    if (op.code != OpCode::k_local_slice || g.tensor(op.inputs[0]).kind != TensorKind::kVariable) continue;
    const auto along = static_cast<size_t>(attr_int(op.attrs, "group")) + 1;
    const auto& r = readers[op.outputs[0]];
    if (in_place(lg.at(op.outputs[0], along).sub_axis) && !r.empty() &&
        std::all_of(r.begin(), r.end(), [&](OpId i) { return has_flag(g.op(i).code, kUpdateOp); }))
      op.code = OpCode::k_part_view;
  }
}

}  // namespace whale
