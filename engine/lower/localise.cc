#include "lower/localise.h"

#include <algorithm>

#include "base/error.h"
#include "base/watch.h"
#include "task/window.h"

namespace whale {
namespace {

// Of which dimensions the kernel reads where its part lies.
uint32_t placed_dims(const Graph& g, const Op& op) {
  if (!has_flag(op.code, kRandom) && !has_flag(op.code, kOffsetAware)) return 0;
  const auto of_op = def(op.code).placed_dims;
  return of_op ? of_op(view_of(g, op)) : ~uint32_t{0};
}
bool contains(uint32_t dims, int dim) { return dims >> dim & 1; }

Ints flat(const std::vector<Interval>& intervals) {
  Ints out;
  for (const Interval& i : intervals) out.insert(out.end(), {i.begin, i.end});
  return out;
}

}  // namespace

Interval Localiser::interval(size_t axis, bool state, int64_t extent, const Place& place, int64_t rotate) const {
  if (axis == kTime) return cut_of(time_, false, extent, place.micro_batch);
  const std::vector<MeshAxis>& axes = g_.tasks.meshes[place.mesh].axes;
  if (rotate == 0) return cut_of(axes, axis - 1, state, extent, place.coordinates);
  Ints at = place.coordinates;
  at[axis - 1] = (at[axis - 1] + axes[axis - 1].size - rotate) % axes[axis - 1].size;
  return cut_of(axes, axis - 1, state, extent, at);
}

template <class Body>
void Localiser::each_cut(TensorId id, const Place& place, size_t but, Body body) const {
  if (!cut_[id]) return;
  const std::vector<AxisSharding>& axes = g_.shardings[id].axes;
  for (size_t a = 0; a < axes.size(); ++a) {
    const AxisSharding& l = axes[a];
    if (l.placement != Placement::kShard) continue;
    if (a == but) break;  // inner axes that cut other sub-axes are added by the caller
    const auto same = [&](const AxisSharding& other) {
      return other.placement == Placement::kShard && other.sub_axis == l.sub_axis;
    };
    const auto part_of = [&](size_t axis, bool state, int64_t extent) {
      return interval(axis, state, extent, place, axes[axis].rotate);
    };
    if (l.window.present()) {  // alone in its dimension
      body(SubAxisCut{l.sub_axis, l.window.source, read_through(l.window, part_of(a, false, l.window.result))});
      continue;
    }
    if (std::any_of(axes.begin(), axes.begin() + static_cast<std::ptrdiff_t>(a), same)) continue;  // inside of that one
    const int64_t extent = extent_of(g_.graph.tensor(id).dims, l.sub_axis);
    SubAxisCut cut{l.sub_axis, extent, part_of(a, l.state, extent)};
    for (size_t b = a + 1; b < std::min(but, axes.size()); ++b) {
      if (!same(axes[b])) continue;
      const Interval inner = part_of(b, axes[b].state, cut.at.size());
      cut.at = {cut.at.begin + inner.begin, cut.at.begin + inner.end};
    }
    body(cut);
  }
}

std::vector<SubAxisCut> Localiser::cuts(TensorId id, const Place& place, size_t but) const {
  std::vector<SubAxisCut> out;
  each_cut(id, place, but, [&](const SubAxisCut& c) { out.push_back(c); });
  return out;
}

Localiser::Localiser(const ShardedGraph& graph)
    : g_(graph), factors_(graph.graph), time_{"time", graph.micro_batches, {}, {}}, cut_(graph.shardings.size()) {
  for (size_t t = 0; t < cut_.size(); ++t)
    cut_[t] = std::any_of(graph.shardings[t].axes.begin(), graph.shardings[t].axes.end(),
                          [](const AxisSharding& l) { return l.placement == Placement::kShard; });
}

Dims Localiser::dims(TensorId id, const Place& place) const {
  Dims out = g_.graph.tensor(id).dims;
  each_cut(id, place, SIZE_MAX, [&](const SubAxisCut& c) { cut_down(out, c); });
  return out;
}

int64_t Localiser::elements(TensorId id, const Place& place) const {
  int64_t n = element_count(g_.graph.tensor(id).dims);
  each_cut(id, place, SIZE_MAX, [&](const SubAxisCut& c) { n = c.extent ? n / c.extent * c.at.size() : 0; });
  return n;
}

bool Localiser::empty(TensorId id, const Place& place) const {
  const Dims& whole = g_.graph.tensor(id).dims;
  bool none = std::find(whole.begin(), whole.end(), 0) != whole.end();
  each_cut(id, place, SIZE_MAX, [&](const SubAxisCut& c) { none |= c.at.size() == 0; });
  return none;
}

// An attribute says where a device's interval begins; within groups, only where a micro-batch has several.
bool Localiser::begins(const Factor& f) const {
  return f.begin_attr && (f.group.rows == 0 || f.extent / f.group.rows > g_.micro_batches);
}

// Positions of the factor that are one of the cut sub-axis; 0: it is another sub-axis.
int64_t Localiser::positions(const Factor& f, const SubAxis& whole, const SubAxis& cut) {
  if (cut == whole) return 1;
  const bool inside = f.group.rows && cut.dim == whole.dim && cut.outer == whole.outer && cut.inner % whole.inner == 0;
  return inside ? cut.inner / whole.inner : 0;
}

// Where the micro-batch begins in the sub-axis.
int64_t Localiser::first_in_time(TensorId id, const SubAxisCut& cut, const Place& place) const {
  const AxisSharding& l = g_.at(id, kTime);
  if (l.placement != Placement::kShard || !(l.sub_axis == cut.sub_axis)) return 0;
  return cut_of(time_, false, cut.extent, place.micro_batch).begin;
}

uint64_t Localiser::sample_mask(TensorId id) const {
  uint64_t mask = 0;
  for (size_t a = 0; a < g_.axes(); ++a)
    if (g_.at(id, a).placement == Placement::kShard && g_.at(id, a).samples) mask |= uint64_t{1} << a;
  return mask;
}

Interval Localiser::samples(uint64_t mask, const Place& place) const {
  Interval at{0, g_.batch};
  for (size_t a = 0; a < g_.axes(); ++a) {
    if (!(mask >> a & 1)) continue;
    const Interval inner = interval(a, false, at.size(), place);
    at = {at.begin + inner.begin, at.begin + inner.end};
  }
  return at;
}

Interval Localiser::micro_batches(const Place& place, size_t through) const {
  const Mesh& mesh = g_.tasks.meshes[place.mesh];
  Interval run{0, g_.micro_batches};
  for (size_t a = 1; a < g_.axes() && a <= through && g_.micro_batches > 1; ++a) {
    if (!g_.by_micro_batch(a)) continue;
    const Interval inner = cut_of(mesh.axes, a - 1, false, run.size(), place.coordinates);
    run = {run.begin + inner.begin, run.begin + inner.end};
  }
  return run;
}

std::pair<SubAxis, int64_t> Localiser::local_sub_axis(TensorId id, size_t axis, const Place& place) const {
  const Mesh& mesh = g_.tasks.meshes[place.mesh];
  const AxisSharding& l = g_.at(id, axis);
  const Dims& dims = g_.graph.tensor(id).dims;
  if (l.window.present()) return {l.sub_axis, l.window.result};
  const int64_t whole = extent_of(dims, l.sub_axis);
  SubAxis sub_axis = l.sub_axis;
  int64_t extent = whole;
  // Axes further out may have cut the same sub-axis; all others scale what lies outside or inside of it.
  std::vector<SubAxisCut> others = cuts(id, place, axis);
  for (size_t a = axis + 1; a < g_.axes(); ++a) {
    const AxisSharding& inner = g_.at(id, a);
    if (inner.placement != Placement::kShard || inner.sub_axis == l.sub_axis) continue;
    const int64_t n = extent_of(dims, inner.sub_axis);
    const auto known =
        std::find_if(others.begin(), others.end(), [&](const SubAxisCut& c) { return c.sub_axis == inner.sub_axis; });
    if (known == others.end())
      others.push_back({inner.sub_axis, n, cut_of(mesh.axes, a - 1, inner.state, n, place.coordinates)});
    else
      known->at.end =
          known->at.begin + cut_of(mesh.axes, a - 1, inner.state, known->at.size(), place.coordinates).size();
  }
  for (const SubAxisCut& c : others) {
    if (c.sub_axis == l.sub_axis) {
      extent = c.at.size();
    } else if (c.sub_axis.dim == l.sub_axis.dim) {
      int64_t& side = c.sub_axis.outer % (l.sub_axis.outer * whole) == 0 ? sub_axis.inner : sub_axis.outer;
      side = side / c.extent * c.at.size();
    }
  }
  return {sub_axis, extent};
}

Interval Localiser::member_part(TensorId id, size_t axis, const Place& place, int64_t extent) const {
  const Mesh& mesh = g_.tasks.meshes[place.mesh];
  const AxisSharding& l = g_.at(id, axis);
  if (l.window.present()) return read_through(l.window, cut_of(mesh.axes, axis - 1, false, extent, place.coordinates));
  return cut_of(mesh.axes, axis - 1, l.state, extent, place.coordinates);
}

Interval Localiser::sliced_part(const Op& op, const Place& place) const {
  const auto axis = static_cast<size_t>(attr_int(op.attrs, "group")) + 1;
  return member_part(op.outputs[0], axis, place, local_sub_axis(op.outputs[0], axis, place).second);
}

Localiser::AxisCut Localiser::axis_cut(TensorId id, size_t axis, const Place& place) const {
  const Mesh& mesh = g_.tasks.meshes[place.mesh];
  const auto [sub_axis, extent] = local_sub_axis(id, axis, place);
  AxisCut out{sub_axis, {}};
  Place member = place;
  const int64_t members = mesh.axes[axis - 1].members(row_of(mesh.axes, axis - 1, place.coordinates));
  for (int64_t k = 0; k < members; ++k) {
    member.coordinates[axis - 1] = k;
    out.intervals.push_back(member_part(id, axis, member, extent));
  }
  return out;
}

bool Localiser::depends_on_coordinate(const Op& op, size_t axis) const {
  if (op.code == OpCode::k_adasum) {  // the shares of all members are in its attributes
    const Mesh& mesh = g_.tasks.mesh(op.stage);
    const auto even = [](const MeshAxis& x) { return x.shares.empty(); };
    return g_.batch % (g_.micro_batches * static_cast<int64_t>(mesh.devices.size())) != 0 ||
           !std::all_of(mesh.axes.begin(), mesh.axes.end(), even);
  }
  if (op.code == OpCode::k_local_slice || op.code == OpCode::k_part_view)
    return static_cast<size_t>(attr_int(op.attrs, "group")) + 1 == axis;
  if (op.code == OpCode::k_transfer && g_.at(op.outputs[0], axis).window.present()) return true;
  if (const TensorId id = box_tensor(op); id != kNone) {
    const AxisSharding& l = g_.at(id, axis);
    if (l.placement == Placement::kShard && !l.samples && contains(placed_dims(g_.graph, op), l.sub_axis.dim))
      return true;
  }
  // An attribute says where the interval begins, also when it is of samples.
  const auto along = [&](const Factor& f, TensorId id, const SubAxis& sub_axis) {
    return id != kNone && sub_axis.present() && g_.at(id, axis).placement == Placement::kShard &&
           positions(f, sub_axis, g_.at(id, axis).sub_axis) > 0;
  };
  for (const Factor& f : factors_.of(op).list) {
    if (!begins(f) && !f.window.present()) continue;  // padding is at the edges alone
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (along(f, op.inputs[i], f.inputs[i])) return true;
    for (size_t o = 0; o < op.outputs.size() && o < f.outputs.size(); ++o)
      if (along(f, op.outputs[o], f.outputs[o])) return true;
  }
  return false;
}

Attrs Localiser::attrs(const Op& op, const Place& place) const {
  Attrs attrs = op.attrs;
  const Graph& g = g_.graph;
  const OpDef& d = def(op.code);
  for (auto& [name, value] : attrs) {
    auto* ints = std::get_if<Ints>(&value);
    if (!ints || op.outputs.empty() || op.outputs[0] == kNone) continue;
    const Dims& whole = g.tensor(op.outputs[0]).dims;
    const AttrRole role = role_of(d, name);
    if (role == AttrRole::kShape && ints->size() == whole.size()) *ints = dims(op.outputs[0], place);
    if (role == AttrRole::kEnds) {
      const Dims local = dims(op.inputs[0], place);
      for (size_t k = 0; k < ints->size(); ++k)
        if (local[k] != g.tensor(op.inputs[0]).dims[k]) (*ints)[k] = local[k];
    }
  }
  const auto write = [&](const char* sub_axis, const char* cuts, TensorId id, size_t axis) {
    const AxisCut cut = axis_cut(id, axis, place);
    attrs[sub_axis] = Ints{cut.sub_axis.dim, cut.sub_axis.outer, cut.sub_axis.inner};
    attrs[cuts] = flat(cut.intervals);
  };
  const auto axis = static_cast<size_t>(attr_int(op.attrs, "group")) + 1;
  const auto write_all = [&](const TensorIds& bucket) {
    Ints sub_axes, cuts;
    for (const TensorId id : bucket) {
      const AxisCut cut = axis_cut(id, axis, place);
      sub_axes.insert(sub_axes.end(), {cut.sub_axis.dim, cut.sub_axis.outer, cut.sub_axis.inner});
      const Ints intervals = flat(cut.intervals);
      cuts.insert(cuts.end(), intervals.begin(), intervals.end());
    }
    attrs["sub_axis"] = std::move(sub_axes);
    attrs["cuts"] = std::move(cuts);
  };
  if (op.code == OpCode::k_adasum) {
    Place other = place;
    Ints weights;
    // Axes over which the gradient is summed or combined already do not cut the samples that it is of.
    uint64_t cut = 1;
    for (size_t a = 1; a <= axis; ++a)
      if (!g_.by_micro_batch(a) && g_.at(op.inputs[0], a).placement == Placement::kPartial) cut |= uint64_t{1} << a;
    for (int64_t k = 0; k < g_.mesh_axis(axis, op.stage).size; ++k) {
      other.coordinates[axis - 1] = k;
      const Interval run = micro_batches(other, axis);
      int64_t all = 0;  // each micro-batch is cut by itself: the first members have more of every one
      for (const int64_t u : watched(run.begin, run.end)) {
        other.micro_batch = u;
        all += samples(cut, other).size();
      }
      weights.push_back(all);
    }
    attrs["weights"] = std::move(weights);
    return attrs;
  }
  switch (op.code) {
    case OpCode::k_all_gather: write_all(op.inputs); return attrs;
    case OpCode::k_reduce_scatter: write_all(op.outputs); return attrs;
    case OpCode::k_all_to_all:
      write("sub_axis", "cuts", op.inputs[0], axis);
      write("to_sub_axis", "to_cuts", op.outputs[0], axis);
      return attrs;
    case OpCode::k_local_slice:
    case OpCode::k_part_view: {
      const SubAxis sub_axis = local_sub_axis(op.outputs[0], axis, place).first;
      const Interval mine = sliced_part(op, place);
      attrs["sub_axis"] = Ints{sub_axis.dim, sub_axis.outer, sub_axis.inner};
      attrs["begin"] = mine.begin;
      attrs["end"] = mine.end;
      attrs.erase("group");
      return attrs;
    }
    default: break;
  }
  if (!d.factors) return attrs;
  for (const Factor& f : factors_.of(op).list) {
    if (f.size_attrs.empty() && !begins(f) && !f.window.present()) continue;
    const auto look = [&](TensorId id, const SubAxis& sub_axis) {
      if (id == kNone || !sub_axis.present()) return;
      each_cut(id, place, SIZE_MAX, [&](const SubAxisCut& c) {
        const int64_t each = positions(f, sub_axis, c.sub_axis);
        if (each == 0) return;
        for (const char* name : f.size_attrs) attrs[name] = c.at.size();
        if (begins(f)) attrs[f.begin_attr] = (c.at.begin - first_in_time(id, c, place)) * each;
        if (f.window.present()) localise_window(attrs, f, c.at);
      });
    };
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (!f.reads_through(i)) look(op.inputs[i], f.inputs[i]);
    for (size_t o = 0; o < op.outputs.size() && o < f.outputs.size(); ++o) look(op.outputs[o], f.outputs[o]);
  }
  return attrs;
}

TensorId Localiser::box_tensor(const Op& op) const {
  if (placed_dims(g_.graph, op) == 0) return kNone;
  if (has_flag(op.code, kBoxOfInput)) return op.inputs[0];
  TensorId id = op.outputs.empty() ? kNone : op.outputs[0];
  if ((id == kNone || g_.graph.tensor(id).dims.empty()) && !op.inputs.empty() && op.inputs[0] != kNone)
    id = op.inputs[0];
  return id;
}

Box Localiser::box(const Op& op, const Place& place) const {
  const TensorId id = box_tensor(op);
  if (id == kNone) return {};
  Box box;
  box.global = g_.graph.tensor(id).dims;
  box.origin.assign(box.global.size(), 0);
  const uint32_t placed = placed_dims(g_.graph, op);
  for (size_t a = 0; a < g_.axes(); ++a)
    if (g_.at(id, a).placement == Placement::kShard && g_.at(id, a).samples) box.batch = g_.at(id, a).sub_axis;
  for (const SubAxisCut& c : cuts(id, place)) {
    if (c.sub_axis == box.batch || !contains(placed, c.sub_axis.dim)) continue;
    int in_dimension = box.batch.present() && box.batch.dim == c.sub_axis.dim;
    for (const SubAxisCut& other : cuts(id, place))
      in_dimension += other.sub_axis.dim == c.sub_axis.dim && !(other.sub_axis == box.batch);
    if (c.sub_axis.outer == 1 && in_dimension == 1)
      box.origin[c.sub_axis.dim] = c.at.begin * c.sub_axis.inner;
    else
      box.cuts.push_back({c.sub_axis, c.extent, c.at.begin, c.at.size()});
  }
  return box;
}

OpCost Localiser::cost(const Op& op, const Attrs& attrs, const Place& place) const {
  OpView view{op.code, &attrs, {}, {}, {}};
  view.inputs.reserve(op.inputs.size());
  const auto type = [&](TensorId id) { return TensorType{g_.graph.tensor(id).dtype, dims(id, place)}; };
  for (const TensorId id : op.inputs) {
    view.present.push_back(id != kNone);
    view.inputs.push_back(id == kNone ? TensorType{} : type(id));
  }
  view.outputs.reserve(op.outputs.size());
  for (const TensorId id : op.outputs) view.outputs.push_back(type(id));
  return cost_of(view);
}

}  // namespace whale
