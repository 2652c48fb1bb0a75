#include "prove/symmetry.h"

#include <algorithm>
#include <array>
#include <map>

#include "plan/part.h"
#include "prove/flow.h"

namespace whale::proof {

namespace {

bool even(int64_t first, int64_t second, int64_t at, int64_t steps) { return at == first + steps * (second - first); }
bool even(const Interval& first, const Interval& second, const Interval& at, int64_t steps) {
  return even(first.begin, second.begin, at.begin, steps) && even(first.end, second.end, at.end, steps);
}
bool even(const Ints& first, const Ints& second, const Ints& at, int64_t steps) {
  if (first.size() != at.size() || second.size() != at.size()) return false;
  for (size_t k = 0; k < at.size(); ++k)
    if (!even(first[k], second[k], at[k], steps)) return false;
  return true;
}
bool even(const std::vector<SampleCut>& first, const std::vector<SampleCut>& second, const std::vector<SampleCut>& at,
          int64_t steps) {
  if (first.size() != at.size() || second.size() != at.size()) return false;
  for (size_t k = 0; k < at.size(); ++k) {
    const size_t n = at[k].micro_batches.size();
    if (!even(first[k].whole, second[k].whole, at[k].whole, steps) || first[k].micro_batches.size() != n ||
        second[k].micro_batches.size() != n)
      return false;
    for (size_t u = 0; u < n; ++u)
      if (!even(first[k].micro_batches[u], second[k].micro_batches[u], at[k].micro_batches[u], steps)) return false;
  }
  return true;
}
bool even(const std::vector<SubAxisCut>& first, const std::vector<SubAxisCut>& second,
          const std::vector<SubAxisCut>& at, int64_t steps) {
  if (first.size() != at.size() || second.size() != at.size()) return false;
  for (size_t k = 0; k < at.size(); ++k)
    if (!(first[k].sub_axis == at[k].sub_axis) || first[k].extent != at[k].extent ||
        !even(first[k].at, second[k].at, at[k].at, steps))
      return false;
  return true;
}

std::vector<Runs> runs_of_axes(const Plan& plan, const Entry& entry, Symmetry::Sought sought) {
  std::vector<Runs> out;
  for (size_t a = 0; a < plan.meshes.at(0).axes.size(); ++a) {
    int64_t n = 1;
    for (const PlanMesh& mesh : plan.meshes) n = std::max(n, mesh.axes[a].size);
    std::vector<bool> joined(static_cast<size_t>(n), sought != Symmetry::Sought::kNo);
    for (const PlanMesh& mesh : plan.meshes)
      if (mesh.axes[a].size != n || mesh.axes[a].only >= 0 ||
          std::ranges::any_of(mesh.axes, [](const MeshAxis& x) { return x.ragged(); }) ||
          std::ranges::count(mesh.devices, -1) > 0)
        joined.assign(joined.size(), false);
    std::vector<std::vector<int32_t>> programs(static_cast<size_t>(n));
    for (const PlanMesh& mesh : plan.meshes)
      for (size_t p = 0; p < mesh.devices.size() && joined.back(); ++p)
        programs[mesh.coordinates(static_cast<int64_t>(p))[a]].push_back(entry.rows[mesh.devices[p]].program);
    for (size_t c = 1; c < programs.size(); ++c) joined[c] = joined[c] && programs[c] == programs[c - 1];
    out.emplace_back(joined);
  }
  return out;
}

// The segments that a program runs for each micro-batch, in their order.
std::map<int32_t, Ints> rounds_of(const Program& program) {
  std::map<int32_t, Ints> out;
  for (const ScheduleRow& row : program.schedule)
    if (!row.whole) out[row.micro_batch].push_back(row.segment);
  return out;
}

Runs runs_of_micro_batches(const Entry& entry, Symmetry::Sought sought) {
  int64_t n = 1;
  for (const Program& p : entry.programs)
    for (const ScheduleRow& row : p.schedule) n = std::max<int64_t>(n, row.micro_batch + 1);
  std::vector<bool> joined(static_cast<size_t>(n), sought == Symmetry::Sought::kYes && n > 3);
  if (joined.back())
    for (const Program& p : entry.programs) {
      std::map<int32_t, Ints> rounds = rounds_of(p);
      for (int32_t u = 1; u < n; ++u)
        if (joined[u] && rounds[u] != rounds[u - 1]) joined[u] = false;
    }
  Runs out(joined);
  for (const DeviceRow& row : entry.rows)
    for (const SampleCut& cut : row.samples)
      for (int64_t u = 0; u < std::ssize(cut.micro_batches) && u < n; ++u) {
        const auto& all = cut.micro_batches;
        const int64_t b = out.begin(u);
        if (out.long_at(u) && (out.last(u) >= std::ssize(all) || !even(all[b], all[b + 1], all[u], u - b)))
          out.split(b, out.last(u));
      }
  const auto flows = [&](const Program& p) { return flows_evenly(p, out); };
  if (out.any_long() && !std::ranges::all_of(entry.programs, flows)) out.split(0, n - 1);
  return out;
}

}  // namespace

// Whether runs along an axis are what they seem.
class Regular {
 public:
  Regular(const Symmetry& symmetry, size_t axis) : s_(symmetry), plan_(s_.plan_), entry_(s_.entry_), axis_(axis) {
    for (const Group& g : plan_.groups) {
      std::vector<Place> of(entry_.rows.size());
      for (size_t p = 0; p < g.parts.size(); ++p)
        for (size_t k = 0; k < g.parts[p].size(); ++k)
          of[g.parts[p][k]] = {static_cast<int64_t>(p), static_cast<int64_t>(k)};
      places_.push_back(std::move(of));
    }
  }
  bool links() const;  // of all runs at once
  // The devices of a run with one first device.
  bool line(int32_t first) const;

 private:
  struct Place {
    int64_t part = -1, index = -1;
  };
  int64_t coordinate(int32_t device) const { return row(device).coordinates[axis_]; }
  const DeviceRow& row(int32_t device) const { return entry_.rows[device]; }
  bool group(size_t g, int32_t first, int32_t second, int32_t device, int64_t steps) const;
  bool variables(int32_t first, int32_t second, int32_t device, int64_t steps) const;

  const Symmetry& s_;
  const Plan& plan_;
  const Entry& entry_;
  const size_t axis_;
  std::vector<std::vector<Place>> places_;  // [group][device]
};

// Messages stay where they are on the axis, and are the same at each place of it.
bool Regular::links() const {
  const Runs& runs = s_.axes_[axis_];
  for (const Link& link : entry_.links) {
    std::vector<std::vector<const Transfer*>> at(static_cast<size_t>(runs.size()));
    for (const Transfer& t : link.transfers) {
      if (coordinate(t.from) != coordinate(t.to)) return false;
      at[coordinate(t.from)].push_back(&t);
    }
    for (int64_t c = 0; c < runs.size(); ++c) {
      const auto &mine = at[c], &first = at[runs.begin(c)];
      if (mine.size() != first.size()) return false;
      for (size_t k = 0; k < mine.size(); ++k)
        if (mine[k]->from != s_.at(first[k]->from, axis_, c) || mine[k]->to != s_.at(first[k]->to, axis_, c) ||
            mine[k]->source != first[k]->source || mine[k]->target != first[k]->target)
          return false;
    }
  }
  return true;
}

// One part has the run's devices at equal distances, or each is in a part of its own of devices beside it.
bool Regular::group(size_t g, int32_t first, int32_t second, int32_t device, int64_t steps) const {
  const auto place = [&](int32_t d) { return places_[g][d]; };
  const Place a = place(first), b = place(second), mine = place(device);
  if (a.part < 0) return mine.part < 0;
  if (mine.part < 0 || b.part < 0) return false;
  if (mine.part == a.part) return b.part == a.part && even(a.index, b.index, mine.index, steps);
  if (mine.index != a.index) return false;
  const auto &theirs = plan_.groups[g].parts[a.part], &ours = plan_.groups[g].parts[mine.part];
  if (ours.size() != theirs.size()) return false;
  for (size_t k = 0; k < ours.size(); ++k)
    if (coordinate(theirs[k]) != coordinate(first) || ours[k] != s_.at(theirs[k], axis_, coordinate(device)))
      return false;
  return true;
}

bool Regular::variables(int32_t first, int32_t second, int32_t device, int64_t steps) const {
  for (const PlanVariable& v : plan_.variables) {
    if (v.mesh != row(first).mesh || v.storage_sharding.axes.at(axis_).placement != Placement::kShard) continue;
    const auto cuts = [&](int32_t d) {
      return cuts_of(v.dims, v.storage_sharding, plan_.meshes[v.mesh].axes, row(d).coordinates);
    };
    if (!even(cuts(first), cuts(second), cuts(device), steps)) return false;
  }
  return true;
}

bool Regular::line(int32_t first) const {
  const Runs& runs = s_.axes_[axis_];
  const int64_t begin = coordinate(first), last = runs.last(begin);
  const int32_t second = s_.at(first, axis_, begin + 1);
  for (int64_t c = begin + 1; c <= last; ++c) {
    const int32_t d = s_.at(first, axis_, c);
    const DeviceRow &a = row(first), &b = row(second), &mine = row(d);
    const int64_t steps = c - begin;
    if (!even(a.placed, b.placed, mine.placed, steps) || !even(a.samples, b.samples, mine.samples, steps) ||
        !variables(first, second, d, steps))
      return false;
    if (s_.sought_ == Symmetry::Sought::kSamplesAlike && !even(a.samples, a.samples, mine.samples, 0)) return false;
    for (size_t g = 0; g < plan_.groups.size(); ++g)
      if (!group(g, first, second, d, steps)) return false;
  }
  return true;
}

Symmetry::Symmetry(const Plan& plan, const Entry& entry, Sought sought)
    : plan_(plan),
      entry_(entry),
      sought_(sought),
      axes_(runs_of_axes(plan, entry, sought)),
      micro_batches_(runs_of_micro_batches(entry, sought)),
      devices_(entry.rows.size(), 1) {
  for (size_t a = 0; a < axes_.size(); ++a) {
    Runs& runs = axes_[a];
    if (!runs.any_long()) continue;
    const Regular regular(*this, a);
    if (!regular.links()) runs.split(0, runs.size() - 1);
    for (const DeviceRow& row : entry.rows) {
      const int64_t c = row.coordinates[a];
      if (runs.long_at(c) && runs.begin(c) == c && !regular.line(row.device)) runs.split(c, runs.last(c));
    }
  }
  for (const DeviceRow& row : entry.rows)
    for (size_t a = 0; a < axes_.size(); ++a) devices_[row.device] *= axes_[a].stands_for(row.coordinates[a]);
}

int32_t Symmetry::at(int32_t device, size_t axis, int64_t coordinate) const {
  const DeviceRow& row = entry_.rows[device];
  const PlanMesh& mesh = plan_.meshes[row.mesh];
  int64_t position = 0;
  for (size_t a = 0; a < mesh.axes.size(); ++a)
    position = position * mesh.axes[a].size + (a == axis ? coordinate : row.coordinates[a]);
  return mesh.devices[position];
}

Symmetry::Line Symmetry::line(int32_t device) const {
  const Ints& at_axes = entry_.rows[device].coordinates;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const int64_t c = at_axes[a], begin = axes_[a].begin(c), last = axes_[a].last(c);
    if (axes_[a].stands_for(c) == 0)
      return {at(device, a, begin), at(device, a, begin + 1), at(device, a, last), c - begin, last - begin};
  }
  return {device, device, device, 0, 0};
}

bool Symmetry::found() const {
  if (std::ranges::any_of(devices_, [](int64_t n) { return n != 1; })) return true;
  return micro_batches_.any_long();
}

}  // namespace whale::proof
