#include "parallel/bridges.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

BridgeBuilder::BridgeBuilder(const Graph& graph, int64_t micro_batches, int64_t devices) {
  out.graph = graph;
  for (const TensorId id : graph.inputs) {
    const Tensor& t = graph.tensor(id);
    if (t.batch_dim < 0) continue;
    const int64_t samples = t.dims[static_cast<size_t>(t.batch_dim)];
    if (out.batch && samples != out.batch)
      throw invalid(
          "input '{}' has {} samples in dimension {}, another input has {}; all batch dimensions must be equal", t.name,
          samples, t.batch_dim, out.batch);
    out.batch = samples;
  }
  // A single sample cannot be cut: every device computes it.
  const bool cut = out.batch > 1;
  out.axes = {{.name = "time", .size = cut ? micro_batches : 1, .extent = out.batch},
              {.name = "replica", .size = cut ? devices : 1, .extent = out.batch}};
  out.layouts.assign(graph.tensors.size(), Layout{std::vector<AxisLayout>(out.axes.size())});
  for (const TensorId id : graph.inputs)
    if (const int dim = graph.tensor(id).batch_dim; dim >= 0)
      for (size_t a = 0; a < out.axes.size(); ++a)
        if (out.axes[a].size > 1)
          out.layouts[static_cast<size_t>(id)].axes[a] = {
              .placement = Placement::kShard, .digit = Digit{dim, 1, 1}, .cut = {}};
  producer_.assign(graph.tensors.size(), kNone);
}

OpId BridgeBuilder::producer(TensorId id) const { return producer_[static_cast<size_t>(id)]; }

Region BridgeBuilder::region(TensorId id) const {
  if (id == kNone) return Region::kPrologue;
  if (out.time_varies(id)) return Region::kBody;
  const OpId made = producer(id);
  if (made == kNone) return Region::kPrologue;
  const Op& op = out.graph.op(made);
  return op.code == OpCode::k_accumulate ? Region::kEpilogue : op.region;  // a sum is finished after the body
}

TensorId BridgeBuilder::like(TensorId id, const char* suffix) {
  Tensor t = out.graph.tensor(id);
  t.name += suffix;
  t.kind = TensorKind::kValue;
  t.batch_dim = -1;
  t.producer = kNone;
  out.graph.tensors.push_back(std::move(t));
  out.layouts.push_back(Layout{std::vector<AxisLayout>(out.axes.size())});
  producer_.push_back(kNone);
  return static_cast<TensorId>(out.graph.tensors.size()) - 1;
}

TensorId BridgeBuilder::latest(TensorId id) const {
  for (auto it = reduced_.find(id); it != reduced_.end(); it = reduced_.find(id)) id = it->second;
  return id;
}

OpId BridgeBuilder::append(Op op) {
  const auto id = static_cast<OpId>(out.graph.ops.size());
  Region at = Region::kPrologue;
  for (const TensorId input : op.inputs) {
    if (input == kNone) continue;
    const Region r = out.time_varies(input) ? Region::kBody : region(input);
    if (r == Region::kBody) at = Region::kBody;
    if (r == Region::kEpilogue && at == Region::kPrologue) at = Region::kEpilogue;
  }
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    if (op.outputs[i] == kNone) continue;
    if (out.time_varies(op.outputs[i])) at = Region::kBody;
    producer_[static_cast<size_t>(op.outputs[i])] = id;
    out.graph.tensor(op.outputs[i]).producer = id;
    out.graph.tensor(op.outputs[i]).output = static_cast<int>(i);
  }
  op.region = at;
  op.origin = kNone;  // op numbers have changed
  out.graph.ops.push_back(std::move(op));
  return id;
}

TensorId BridgeBuilder::bridge(OpCode code, std::vector<TensorId> inputs, TensorId id, const char* suffix, Attrs attrs,
                               size_t axis, AxisLayout to) {
  const TensorId made = like(id, suffix);
  out.layouts[static_cast<size_t>(made)] = out.layouts[static_cast<size_t>(id)];
  out.layouts[static_cast<size_t>(made)].axes[axis] = std::move(to);
  Op op;
  op.code = code;
  op.name = out.graph.tensor(made).name;
  op.inputs = std::move(inputs);
  op.outputs = {made};
  op.attrs = std::move(attrs);
  if (const OpId source = producer(id); source != kNone) {
    op.scope = out.graph.op(source).scope;
    op.phase = out.graph.op(source).phase;
  }
  append(std::move(op));
  return made;
}

TensorId BridgeBuilder::reduce(TensorId id, size_t axis) {
  id = latest(id);
  const AxisLayout layout = out.at(id, axis);
  if (layout.placement != Placement::kPartial) return id;
  TensorId made = kNone;
  if (out.axes[axis].is_time()) {
    if (layout.combine != Combine::kSum)
      throw unimplemented("'{}': a maximum or minimum over micro-batches is not implemented; plan with accumulation 1",
                          out.graph.tensor(id).name);
    // The sum starts from zero in the prologue; along the devices it is as partial as what is added.
    const TensorId zero = like(id, ".zero");
    out.layouts[static_cast<size_t>(zero)] = out.layouts[static_cast<size_t>(id)];
    out.layouts[static_cast<size_t>(zero)].axes[axis] = {};
    Op fill;
    fill.code = OpCode::k_fill;
    fill.name = out.graph.tensor(zero).name;
    fill.outputs = {zero};
    fill.attrs = {{"shape", out.graph.tensor(id).dims},
                  {"value", 0.0},
                  {"dtype", std::string(name_of(out.graph.tensor(id).dtype))}};
    if (const OpId source = producer(id); source != kNone) fill.phase = out.graph.op(source).phase;
    append(std::move(fill));
    made = bridge(OpCode::k_accumulate, {zero, id}, id, ".sum", {}, axis, {});
  } else {
    constexpr const char* kCombine[] = {"sum", "max", "min"};
    made = bridge(OpCode::k_all_reduce, {id}, id, ".all",
                  {{"group", int64_t{0}}, {"combine", std::string(kCombine[static_cast<size_t>(layout.combine)])}},
                  axis, {});
  }
  reduced_[id] = made;
  return made;
}

TensorId BridgeBuilder::gather(TensorId id, size_t axis) {
  const auto [known, fresh] = gathered_.try_emplace({id, axis}, kNone);
  if (!fresh) return known->second;
  const Digit d = out.at(id, axis).digit;
  // The intervals are filled in by lowering: they differ between micro-batches.
  const TensorId made = bridge(OpCode::k_all_gather, {id}, id, ".gathered",
                               {{"group", int64_t{0}},
                                {"digit", std::vector<int64_t>{d.dim, d.outer, d.inner}},
                                {"cuts", std::vector<int64_t>{}}},
                               axis, {});
  return gathered_[{id, axis}] = made;
}

TensorId BridgeBuilder::slice(TensorId id, size_t axis, const Digit& d) {
  return bridge(OpCode::k_local_slice, {id}, id, ".slice",
                {{"digit", std::vector<int64_t>{d.dim, d.outer, d.inner}}, {"begin", int64_t{0}}, {"end", int64_t{0}}},
                axis, {.placement = Placement::kShard, .digit = d, .cut = {}});
}

TensorId BridgeBuilder::whole_input(TensorId id) {
  const auto [known, fresh] = wholes_.try_emplace(id, kNone);
  if (!fresh) return known->second;
  const TensorId made = like(id, ".whole");
  out.graph.tensor(made).kind = TensorKind::kInput;
  out.graph.tensor(made).batch_dim = out.graph.tensor(id).batch_dim;
  out.layouts[static_cast<size_t>(made)] = out.layouts[static_cast<size_t>(id)];
  for (size_t a = 0; a < out.axes.size(); ++a)
    if (out.axes[a].is_time()) out.layouts[static_cast<size_t>(made)].axes[a] = {};
  out.whole_inputs.emplace_back(made, id);
  return wholes_[id] = made;
}

void BridgeBuilder::finish() {
  Graph& g = out.graph;
  std::vector<char> used(g.tensors.size());
  const auto use = [&](TensorId id) {
    if (id != kNone) used[static_cast<size_t>(id)] = 1;
  };
  for (const NamedTensor& f : out.fetches) use(f.tensor);
  for (const Variable& v : g.variables) use(v.next);
  std::vector<char> keep(g.ops.size()), body(g.tensors.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    Op& op = g.ops[i];
    keep[i] = std::any_of(op.outputs.begin(), op.outputs.end(),
                          [&](TensorId id) { return id != kNone && used[static_cast<size_t>(id)]; });
    if (!keep[i]) continue;
    // The prologue holds only what the body reads.
    const bool read_early = std::any_of(op.outputs.begin(), op.outputs.end(),
                                        [&](TensorId id) { return id != kNone && body[static_cast<size_t>(id)]; });
    if (op.region == Region::kPrologue && !read_early) op.region = Region::kEpilogue;
    if (out.axes[0].size == 1) op.region = Region::kBody;  // one micro-batch: one segment
    for (const TensorId id : op.inputs) {
      use(id);
      if (id != kNone && op.region != Region::kEpilogue) body[static_cast<size_t>(id)] = 1;
    }
  }
  std::vector<Op> kept;
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (keep[i]) kept.push_back(std::move(g.ops[i]));
  g.ops = std::move(kept);
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].outputs)
      if (id != kNone) g.tensor(id).producer = static_cast<OpId>(i);
}

}  // namespace whale
