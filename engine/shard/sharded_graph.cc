#include "shard/sharded_graph.h"

#include <algorithm>

#include "base/error.h"
#include "shard/sub_axes.h"
#include "task/unlike.h"
#include "task/window.h"

namespace whale {
namespace {

const char* name_of(Region region) {
  constexpr const char* kNames[] = {"prologue", "body", "epilogue"};
  return kNames[static_cast<size_t>(region)];
}

std::string tensor_text(const ShardedGraph& g, TensorId id) {
  if (id == kNone) return "_";
  const Tensor& t = g.graph.tensor(id);
  return fmt::format("{} {}{} {}", t.name, whale::name_of(t.dtype), to_string(t.dims), to_string(g.shardings[id]));
}

[[noreturn]] void fail(const ShardedGraph& g, const Op& op, size_t axis, std::string_view what) {
  std::string operands;
  for (const auto* ids : {&op.inputs, &op.outputs}) {
    for (const TensorId id : *ids) operands += " " + tensor_text(g, id);
    if (ids == &op.inputs) operands += " ->";
  }
  throw internal("shardings of op '{}' ({}) along {}: {};{}", op.name, def(op.code).name, g.axis_name(axis), what,
                 operands)
      .at_op(op.name);
}

// An op over one piece: which operands hold it, all that of one device.
struct Streamed {
  const Factor* factor = nullptr;
  bool fits = true;
  bool input(size_t i) const { return factor && factor->inputs[i].present(); }
  bool output(size_t o) const { return factor && factor->outputs[o].present(); }
};
Streamed streamed_by(const ShardedGraph& g, const Op& op, const Factors& factors, size_t a) {
  Streamed out;
  for (const Factor& f : factors.list)
    if (f.kind == FactorKind::kStream && attr_int(op.attrs, f.piece_attr) != 0) out.factor = &f;
  if (!out.factor) return out;
  const AxisSharding* one = nullptr;
  int held = 0, all = 0;
  const auto look = [&](TensorId id, const SubAxis& sub_axis) {
    if (id == kNone || !sub_axis.present()) return;
    const AxisSharding& l = g.at(id, a);
    if (!one) one = &l;
    ++all, held += l.placement == Placement::kShard && l.sub_axis == sub_axis && l.rotate == one->rotate;
  };
  for (size_t i = 0; i < op.inputs.size(); ++i) look(op.inputs[i], out.factor->inputs[i]);
  for (size_t o = 0; o < op.outputs.size(); ++o) look(op.outputs[o], out.factor->outputs[o]);
  if (held == 0) return {};  // the pieces are of another axis
  out.fits = held == all;
  return out;
}

// The share that all cut operands of an op with this axis have in common.
int64_t rotation_of(const ShardedGraph& g, const Op& op, const Streamed& streamed, size_t a) {
  for (size_t i = 0; i < op.inputs.size(); ++i)
    if (op.inputs[i] != kNone && !streamed.input(i) && g.at(op.inputs[i], a).placement == Placement::kShard)
      return g.at(op.inputs[i], a).rotate;
  return 0;
}

// Replicas that are in different micro-batches have nothing of one in common.
void verify_apart(const ShardedGraph& g, const Op& op, size_t a) {
  if (!g.by_micro_batch(a) || g.size(a, op.stage) == 1) return;
  for (const TensorId id : op.outputs)
    if (id != kNone && g.time_varies(id) && g.at(id, a).placement != Placement::kReplicate)
      fail(g, op, a, "a value of one micro-batch is divided between replicas that are in different ones");
}

// One op, one axis: the operands' placements must be ones that the factors turn into the results' placements.
void verify_op(const ShardedGraph& g, const Op& op, size_t a, OpFactors& all) {
  const auto place = [&](TensorId id) { return id == kNone ? Placement::kReplicate : g.at(id, a).placement; };
  const auto any = [&](const TensorIds& ids, Placement p) {
    return std::any_of(ids.begin(), ids.end(), [&](TensorId id) { return place(id) == p; });
  };
  if (op.code == OpCode::k_transfer) {  // from one mesh to another
    if (g.of_unlike(a) && place(op.inputs[0]) != Placement::kReplicate &&
        replica_of(g.tasks, g.stage(op.inputs[0])) != replica_of(g.tasks, op.stage))
      fail(g, op, a, "samples of a replica go to an unlike one");
    return;
  }
  if (has_flag(op.code, kMemoryCopy)) {
    for (size_t i = 0; i < op.outputs.size(); ++i)
      if (!(g.at(op.inputs[i], a) == g.at(op.outputs[i], a))) fail(g, op, a, "a copy lies otherwise");
    return;
  }
  if (!g.cuts(a, op.stage)) {
    for (const auto* ids : {&op.inputs, &op.outputs})
      if (any(*ids, Placement::kShard) || any(*ids, Placement::kPartial))
        fail(g, op, a, "an axis of size 1 cuts a tensor");
    return;
  }
  const bool reshard = has_flag(op.code, kCollective) || op.code == OpCode::k_local_slice ||
                       op.code == OpCode::k_part_view || op.code == OpCode::k_accumulate ||
                       op.code == OpCode::k_transfer;
  // Zero is the sum of zeros: where a sum over micro-batches starts, it may be as partial as what is added.
  const bool neutral =
      op.code == OpCode::k_fill && place(op.outputs[0]) == Placement::kPartial &&
      attr_float(op.attrs, "value") == neutral_of(g.at(op.outputs[0], a).combine, g.graph.tensor(op.outputs[0]).dtype);
  if (reshard || neutral) return;
  if (op.code == OpCode::k_cast && a != kTime && place(op.inputs[0]) == Placement::kPartial &&
      g.at(op.inputs[0], a).combine == Combine::kSum && g.tasks.task(op).roles[a - 1] != AxisRole::kReplica &&
      size_of(g.graph.tensor(op.outputs[0]).dtype) < size_of(g.graph.tensor(op.inputs[0]).dtype))
    fail(g, op, a, "parts of a sum are rounded that no replicas add up");
  const OpDef& d = def(op.code);
  const Factors& factors = all.of(op);
  if (has_flag(op.code, kUpdateOp) && factors.list.empty() && !any(op.inputs, Placement::kPartial)) return;  // merged
  if (!any(op.inputs, Placement::kShard) && !any(op.outputs, Placement::kShard)) {
    std::vector<int> partial;
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (place(op.inputs[i]) == Placement::kPartial) partial.push_back(static_cast<int>(i));
    // The smaller of two that are smallest in parts is smallest in parts: a reshard between ragged groups.
    const bool same = partial.size() == op.inputs.size() &&
                      std::all_of(op.inputs.begin(), op.inputs.end(),
                                  [&](TensorId id) { return d.of_partial == g.at(id, a).combine; });
    const bool passes =
        same || std::find(factors.linear.begin(), factors.linear.end(), partial) != factors.linear.end();
    if (!partial.empty() && !passes) fail(g, op, a, "a partial value enters an op that is not linear in it");
    for (const TensorId id : op.outputs)
      if (id != kNone && (place(id) == Placement::kPartial) != !partial.empty())
        fail(g, op, a, "a result's sharding does not follow");
    return;
  }
  if (g.exact && g.by_micro_batch(a) && !keeps_bits(op)) fail(g, op, a, "exact mode computes it whole");
  const Streamed streamed = streamed_by(g, op, factors, a);
  const int64_t rotated = rotation_of(g, op, streamed, a);
  if (!streamed.fits) fail(g, op, a, "the pieces of an op are of different shares");
  const auto overlaps = [&](TensorId id) { return id != kNone && g.at(id, a).window.present(); };
  if (std::any_of(op.outputs.begin(), op.outputs.end(), overlaps)) fail(g, op, a, "a result is cut with a halo");
  for (const Factor& f : factors.list) {
    SubAxisPart want;
    bool found = false, fits = true;
    if (f.kind == FactorKind::kStream) continue;
    const auto look = [&](TensorId id, const SubAxis& sub_axis) {
      if (id == kNone) return;
      const AxisSharding& l = g.at(id, a);
      if (!sub_axis.present()) {
        fits &= l.placement != Placement::kShard;
        return;
      }
      SubAxisPart sub;
      const Dims& dims = g.graph.tensor(id).dims;
      fits &= !l.window.present() && l.rotate == rotated;
      if (l.placement != Placement::kShard ||
          !find_sub_axis_part(sub_axis, f.extent, l.sub_axis, extent_of(dims, l.sub_axis), sub) ||
          (found && !(sub == want)))
        fits = false;
      else
        want = sub, found = true;
    };
    TensorIds statistics;  // those with a row per group
    const auto of_groups = [&](const std::vector<int>& operands, size_t k, TensorId id) {
      const bool found_here =
          a == kTime && std::find(operands.begin(), operands.end(), static_cast<int>(k)) != operands.end();
      if (found_here) statistics.push_back(id);
      return found_here;
    };
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i) {
      if (streamed.input(i) || of_groups(f.group.inputs, i, op.inputs[i])) continue;
      if (op.inputs[i] != kNone && f.reads_through(i)) {
        const AxisSharding& l = g.at(op.inputs[i], a);
        fits &= a != kTime && l.placement == Placement::kShard && !l.state && l.sub_axis == f.inputs[i] &&
                l.window == read_sharding(f, f.inputs[i], g.mesh_axis(a, op.stage)).window;
      } else {
        look(op.inputs[i], f.inputs[i]);
      }
      if (place(op.inputs[i]) == Placement::kPartial) fits = false;
    }
    for (size_t i = 0; i < op.outputs.size() && i < f.outputs.size(); ++i) {
      if (streamed.output(i) || of_groups(f.group.outputs, i, op.outputs[i])) continue;
      look(op.outputs[i], f.outputs[i]);
      const bool partial = !g.of_unlike(a) && !f.outputs[i].present() && i < f.partial.size() && f.partial[i];
      if (op.outputs[i] == kNone) continue;
      const AxisSharding& l = g.at(op.outputs[i], a);
      if ((l.placement == Placement::kPartial) != partial || (partial && l.combine != f.combine_of(i))) fits = false;
    }
    for (const TensorId id : statistics) {
      const AxisSharding& l = g.at(id, a);
      const SubAxis sub_axis = sub_axis_of_groups(f, want, g.micro_batches);
      fits &= sub_axis.present() && l.placement == Placement::kShard && l.sub_axis == sub_axis;
    }
    if (found && fits) return;
  }
  fail(g, op, a, "no factor explains the shardings of operands and results");
}

}  // namespace

TensorId add_like(ShardedGraph& lg, TensorId id, std::string_view suffix) {
  const Tensor& of = lg.graph.tensor(id);
  Tensor t;
  t.name.reserve(of.name.size() + suffix.size());
  t.name.append(of.name).append(suffix);
  t.dtype = of.dtype;
  t.dims = of.dims;
  lg.graph.tensors.push_back(std::move(t));
  lg.shardings.push_back(Sharding(lg.shardings[id]));
  lg.stages.push_back(lg.stage(id));
  return static_cast<TensorId>(lg.graph.tensors.size()) - 1;
}

Op op_beside(const Op& op, OpCode code, std::string name, TensorIds inputs, TensorIds outputs) {
  Op out;
  out.code = code;
  out.name = std::move(name);
  out.inputs = std::move(inputs);
  out.outputs = std::move(outputs);
  out.scope = op.scope, out.phase = op.phase, out.region = op.region, out.stage = op.stage;
  return out;
}

bool keeps_bits(const Op& op) {
  return op.inputs.empty() || has_flag(op.code, kElementwise) || has_flag(op.code, kRearranges) ||
         has_flag(op.code, kUpdateOp);
}

bool find_sub_axis_part(const SubAxis& whole, int64_t whole_extent, const SubAxis& part, int64_t part_extent,
                        SubAxisPart& out) {
  if (!whole.present() || whole.dim != part.dim || part.outer % whole.outer || part.inner % whole.inner) return false;
  out = {part.outer / whole.outer, part.inner / whole.inner};
  return out.outer * part_extent * out.inner == whole_extent;
}

SubAxis sub_axis_part(const SubAxis& whole, const SubAxisPart& sub) {
  return {whole.dim, whole.outer * sub.outer, whole.inner * sub.inner};
}

int64_t extent_of(const Dims& dims, const SubAxis& sub_axis) {
  return dims[sub_axis.dim] / (sub_axis.outer * sub_axis.inner);
}

bool compatible(const Dims& dims, const SubAxis& a, const SubAxis& b) {
  if (a.dim != b.dim || a == b) return true;
  const int64_t ea = extent_of(dims, a), eb = extent_of(dims, b);
  return a.outer % (b.outer * eb) == 0 || b.outer % (a.outer * ea) == 0;
}

std::string to_string(const AxisSharding& l) {
  if (l.placement == Placement::kReplicate) return "R";
  if (l.placement == Placement::kPartial) return fmt::format("P({})", name_of(l.combine));
  if (l.window.present()) return fmt::format("S{}+halo", l.sub_axis.dim);
  if (l.rotate) {
    AxisSharding own = l;
    own.rotate = 0;
    return fmt::format("{}-{}", to_string(own), l.rotate);
  }
  if (l.sub_axis.outer == 1 && l.sub_axis.inner == 1) return fmt::format("S{}", l.sub_axis.dim);
  return fmt::format("S{}:{}x{}", l.sub_axis.dim, l.sub_axis.outer, l.sub_axis.inner);
}

std::string to_string(const Sharding& sharding) {
  std::vector<std::string> parts;
  for (const AxisSharding& axis : sharding.axes) parts.push_back(to_string(axis));
  return fmt::format("{}", fmt::join(parts, ","));
}

std::string print(const ShardedGraph& g) {
  std::string text = fmt::format("shardings of {}: batch {}", g.graph.name, g.batch);
  for (size_t a = 0; a < g.axes(); ++a) text += fmt::format(", {} {}", g.axis_name(a), g.size(a, 0));
  if (g.tasks.stages() > 1) text += fmt::format(", {} stages", g.tasks.stages());
  text += '\n';
  const bool staged = g.tasks.stages() > 1;
  for (const Op& op : g.graph.ops) {
    std::vector<std::string> in, out;
    for (const TensorId id : op.inputs) in.push_back(id == kNone ? "_" : g.graph.tensor(id).name);
    for (const TensorId id : op.outputs) out.push_back(tensor_text(g, id));
    text += fmt::format("  {}{} | {} = {}({})\n", name_of(op.region), staged ? fmt::format(" {}", op.stage) : "",
                        fmt::join(out, "; "), def(op.code).name, fmt::join(in, ", "));
  }
  for (const NamedTensor& f : g.fetches) text += fmt::format("  fetch {}: {}\n", f.name, tensor_text(g, f.tensor));
  return text;
}

void verify(const ShardedGraph& g) {
  WHALE_CHECK(g.shardings.size() == g.graph.tensors.size(), "a sharding per tensor");
  std::vector<char> made(g.graph.tensors.size());
  for (size_t t = 0; t < made.size(); ++t) made[t] = g.graph.tensors[t].kind != TensorKind::kValue;
  OpFactors factors(g.graph);
  for (const Op& op : g.graph.ops) {
    for (const TensorId id : op.inputs)
      if (id != kNone && !made[id])
        throw internal("op '{}' reads '{}' before it is made", op.name, g.graph.tensor(id).name);
    for (const TensorId id : op.outputs)
      if (id != kNone) made[id] = 1;
    for (const TensorId id : op.inputs)
      if (id != kNone && op.code != OpCode::k_transfer && &g.tasks.mesh(g.stage(id)) != &g.tasks.mesh(op.stage))
        throw internal("op '{}' of stage {} reads '{}', which is in stage {}", op.name, op.stage,
                       g.graph.tensor(id).name, g.stage(id));
    for (size_t a = 0; a < g.axes(); ++a) verify_op(g, op, a, factors), verify_apart(g, op, a);
  }
  for (const NamedTensor& f : g.fetches)
    for (size_t a = 0; a < g.axes(); ++a)
      if (g.at(f.tensor, a).placement == Placement::kPartial) throw internal("fetched tensor '{}' is partial", f.name);
}

}  // namespace whale
