#include "lower/program_pattern.h"

#include <algorithm>

#include "base/watch.h"
#include "rewrite/order.h"
#include "shard/sub_axes.h"

namespace whale {
namespace {

// Both say the same but for numbers that may be placed.
bool alike(const Attrs& a, const Attrs& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    const bool placed = may_be_placed(x.first) && std::holds_alternative<int64_t>(x.second) &&
                        std::holds_alternative<int64_t>(y.second);
    return x.first == y.first && (placed || x.second == y.second);
  });
}
bool alike(const Box& a, const Box& b) {
  return a.global == b.global && a.batch == b.batch && a.origin.size() == b.origin.size() &&
         std::ranges::equal(a.cuts, b.cuts, [](const BoxCut& x, const BoxCut& y) {
           return x.sub_axis == y.sub_axis && x.extent == y.extent && x.size == y.size;
         });
}

// The numbers of an instruction that may be placed, in the order of their holes.
template <class Body>
void each_number(const Attrs& attrs, const Box& box, Body body) {
  for (const auto& [name, value] : attrs)
    if (const auto* number = std::get_if<int64_t>(&value); number && may_be_placed(name))
      body(HoleKind::kAttribute, name, 0, *number);
  for (size_t d = 0; d < box.origin.size(); ++d) body(HoleKind::kOrigin, std::string(), d, box.origin[d]);
  for (size_t c = 0; c < box.cuts.size(); ++c) body(HoleKind::kCut, std::string(), c, box.cuts[c].begin);
}

}  // namespace

bool is_patched(const ShardedGraph& graph, const Op& op) {
  if (op.code == OpCode::k_transfer || op.code == OpCode::k_adasum) return false;
  const auto factors = factors_of(graph.graph, op);
  return std::none_of(factors.list.begin(), factors.list.end(), [](const Factor& f) { return f.window.present(); });
}

ProgramPattern::ProgramPattern(const Lowering& lowering, const Draft& draft, const Place& place) : low_(lowering) {
  add_instructions(draft, place);
  add_parts(draft, place);
  for (const Group& group : groups_) holes_.insert(holes_.end(), group.holes.begin(), group.holes.end());
  overlaps_.emplace(draft.program, holes_);
}

ProgramPattern::Group& ProgramPattern::group_of(const std::vector<size_t>& axes) {
  const auto at = std::ranges::find(groups_, axes, &Group::axes);
  if (at != groups_.end()) return *at;
  groups_.push_back({axes, {}, {}, {}, {}});
  return groups_.back();
}

void ProgramPattern::add_instructions(const Draft& draft, const Place& place) {
  const auto& axes = low_.lg.tasks.meshes[place.mesh].axes;
  for (size_t s = 0; s < draft.ops.size(); ++s)
    for (size_t k = 0; k < draft.ops[s].size(); ++k) {
      Watch::look();
      const Op* op = draft.ops[s][k];
      std::vector<size_t> along;
      for (size_t a = 1; op && a <= axes.size(); ++a)
        if (axes[a - 1].size > 1 && low_.local.depends_on_coordinate(*op, a)) along.push_back(a - 1);
      if (along.empty()) continue;
      const Instruction& i = draft.program.segments[s].instructions[k];
      Group& group = group_of(along);
      Place at = place;
      at.micro_batch = draft.micro_batches[s];
      const auto* kernel = i.kernel();
      group.spots.push_back({op, at.micro_batch, kernel ? kernel->attrs : low_.local.attrs(*op, at),
                             kernel ? kernel->box : low_.local.box(*op, at), i.flops, i.bytes});
      if (kernel == nullptr) continue;
      each_number(kernel->attrs, kernel->box, [&](HoleKind kind, const std::string& attribute, size_t index, int64_t) {
        group.holes.push_back(
            {kind, kNone, static_cast<int32_t>(s), static_cast<int32_t>(k), attribute, static_cast<int32_t>(index)});
      });
    }
}

void ProgramPattern::add_parts(const Draft& draft, const Place& place) {
  const Graph& g = low_.lg.graph;
  const auto& axes = low_.lg.tasks.meshes[place.mesh].axes;
  std::vector<std::pair<TensorId, int64_t>> shown(draft.program.buffers.size(), {kNone, 0});
  draft.buffers.each([&](TensorId id, int32_t variant, BufferId buffer) {
    shown[buffer] = {id, std::max(variant, 0)};
  });
  for (size_t b = 0; b < shown.size(); ++b) {
    Watch::look();
    Part part;
    std::vector<size_t> along;
    for (auto id = static_cast<BufferId>(b);;) {
      const auto [tensor, micro_batch] = shown[id];
      bool cut = false;
      for (TensorId t = tensor; t != kNone && g.tensor(t).producer != kNone;) {
        const Op& op = g.op(g.tensor(t).producer);
        if (!is_view(op.code)) break;
        if (op.code == OpCode::k_part_view) {
          cut = true;
          const auto axis = static_cast<size_t>(attr_int(op.attrs, "group"));
          if (axes[axis].size > 1) along.push_back(axis);
        }
        t = op.inputs[0];
      }
      if (cut) part.views.emplace_back(tensor, micro_batch);
      const auto in = draft.lies_in.find(id);
      if (in == draft.lies_in.end()) break;
      id = in->second;
    }
    if (along.empty()) continue;
    std::ranges::sort(along);
    along.erase(std::unique(along.begin(), along.end()), along.end());
    part.at = draft.program.buffers[b].at - begin_of_views(part, place);
    Group& group = group_of(along);
    group.parts.push_back(std::move(part));
    group.holes.push_back({HoleKind::kAt, static_cast<BufferId>(b), 0, 0, {}, 0});
  }
}

int64_t ProgramPattern::begin_of_views(const Part& part, Place place) const {
  int64_t begin = 0;
  for (const auto& [tensor, micro_batch] : part.views) {
    place.micro_batch = micro_batch;
    begin += begin_of_view(low_, place, tensor);
  }
  return begin;
}

bool ProgramPattern::add_values(const Spot& spot, Place place, Ints& values) const {
  place.micro_batch = spot.micro_batch;
  const Attrs attrs = low_.local.attrs(*spot.op, place);
  const Box box = low_.local.box(*spot.op, place);
  const OpCost cost = low_.local.cost(*spot.op, attrs, place);
  if (!alike(attrs, spot.attrs) || !alike(box, spot.box) || cost.flops != spot.flops || cost.bytes != spot.bytes)
    return false;
  each_number(attrs, box, [&](HoleKind, const std::string&, size_t, int64_t value) { values.push_back(value); });
  return true;
}

std::optional<Ints> ProgramPattern::values_of(const Group& group, const Place& place) const {
  Ints values;
  values.reserve(group.holes.size());
  for (const Spot& spot : group.spots) {
    Watch::look();
    if (!add_values(spot, place, values)) return std::nullopt;
  }
  for (const Part& part : watched(group.parts)) values.push_back(part.at + begin_of_views(part, place));
  return values;
}

std::optional<Ints> ProgramPattern::at(const Program& program, const Place& place) {
  Ints all, parts;
  all.reserve(holes_.size());
  for (Group& group : groups_) {
    Ints coordinates;
    for (const size_t axis : group.axes) coordinates.push_back(place.coordinates[axis]);
    const auto [known, fresh] = group.known.try_emplace(std::move(coordinates));
    if (fresh) known->second = values_of(group, place);
    if (!known->second) return std::nullopt;
    all.insert(all.end(), known->second->begin(), known->second->end());
  }
  for (size_t k = 0; k < holes_.size(); ++k)
    if (holes_[k].kind == HoleKind::kAt) parts.push_back(all[k]);
  const auto [known, fresh] = overlaps_hold_.try_emplace(std::move(parts));
  if (fresh) known->second = overlaps_->hold(program, all);
  if (!known->second) return std::nullopt;
  return all;
}

}  // namespace whale
