#include "plan/localise.h"

#include "base/error.h"

namespace whale {

Dims local_dims(const LayoutGraph& g, TensorId id, const LocalExtents& extents) {
  Dims dims = g.graph.tensor(id).dims;
  const bool time = g.axes[0].size > 1;
  const AxisLayout *in_time = nullptr, *in_space = nullptr;
  for (size_t a = 0; a < g.axes.size(); ++a)
    if (g.at(id, a).placement == Placement::kShard) (g.axes[a].is_time() ? in_time : in_space) = &g.at(id, a);
  if (!in_time && !in_space) return dims;
  WHALE_CHECK(!in_time || !in_space || in_time->digit == in_space->digit, "time and devices cut one digit");
  const Digit d = in_time ? in_time->digit : in_space->digit;
  const int64_t n = in_time && in_space ? extents.both : in_time ? extents.run : time ? extents.share : extents.both;
  dims[static_cast<size_t>(d.dim)] = d.outer * n * d.inner;
  return dims;
}

Attrs local_attrs(const Graph& g, const Op& op, const std::vector<Dims>& in, const std::vector<Dims>& out) {
  Attrs attrs = op.attrs;
  for (auto& [name, value] : attrs) {
    auto* ints = std::get_if<std::vector<int64_t>>(&value);
    if (!ints || op.outputs.empty() || op.outputs[0] == kNone) continue;
    const Dims& whole = g.tensor(op.outputs[0]).dims;
    if ((name == "shape" || name == "dims") && ints->size() == whole.size()) *ints = out[0];
    if (name == "limits" && !in.empty() && ints->size() == in[0].size())
      for (size_t d = 0; d < ints->size(); ++d)
        if (in[0][d] != g.tensor(op.inputs[0]).dims[d]) (*ints)[d] = in[0][d];
  }
  return attrs;
}

Box box_of(const LayoutGraph& g, const Op& op) {
  if (!has_flag(op.code, kRandom) && !has_flag(op.code, kOffsetAware) && op.code != OpCode::k_fused) return {};
  TensorId id = op.outputs.empty() ? kNone : op.outputs[0];
  if ((id == kNone || g.graph.tensor(id).dims.empty()) && !op.inputs.empty() && op.inputs[0] != kNone)
    id = op.inputs[0];
  if (id == kNone) return {};
  Box box;
  box.global = g.graph.tensor(id).dims;
  box.origin.assign(box.global.size(), 0);
  for (size_t a = 0; a < g.axes.size(); ++a)
    if (g.at(id, a).placement == Placement::kShard) box.batch = g.at(id, a).digit;
  return box;
}

OpCost local_cost(const Graph& g, const Op& op, const Attrs& attrs, const std::vector<Dims>& in,
                  const std::vector<Dims>& out) {
  OpView view = view_of(g, op);
  view.attrs = &attrs;
  for (size_t i = 0; i < view.inputs.size(); ++i)
    if (view.present[i]) view.inputs[i].dims = in[i];
  for (size_t o = 0, k = 0; o < op.outputs.size(); ++o)
    if (op.outputs[o] != kNone && k < view.outputs.size()) view.outputs[k++].dims = out[o];
  return cost_of(view);
}

}  // namespace whale
