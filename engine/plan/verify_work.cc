// Who does what: groups, samples and micro-batches, from the meshes.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/watch.h"
#include "cluster/shares.h"
#include "plan/groups.h"
#include "plan/verify.h"

namespace whale {
namespace {

// The first instruction of a device's program for which `is_it` holds.
FaultSite site_on(const Entry& entry, int32_t device, const std::function<bool(const Instruction&)>& is_it) {
  for (const DeviceRow& row : entry.rows) {
    if (row.device != device || row.program < 0 || row.program >= std::ssize(entry.programs)) continue;
    FaultSite site = site_of(entry.programs[row.program], is_it);
    site.device = device;
    return site;
  }
  return {.device = device};
}

// Of the number-th cut of the batch, on a device: at what is fed by it.
[[noreturn]] void fail(const Plan& plan, const Entry& entry, int32_t device, size_t number, const std::string& what) {
  const auto feeds = [&](const Instruction& i) {
    return i.kind() == InstructionKind::kFeed && i.samples() == static_cast<int32_t>(number);
  };
  fail_at(plan, entry, site_on(entry, device, feeds), "", what);
}

// Where two cuts of the batch differ first: "micro-batch 1: [2, 5), expected [3, 6)".
std::string difference(const SampleCut& found, const SampleCut& expected) {
  const auto text = [](const Interval& i) { return fmt::format("[{}, {})", i.begin, i.end); };
  for (size_t u = 0; u < found.micro_batches.size() && u < expected.micro_batches.size(); ++u)
    if (found.micro_batches[u] != expected.micro_batches[u])
      return fmt::format("micro-batch {}: {}, expected {}", u, text(found.micro_batches[u]),
                         text(expected.micro_batches[u]));
  return fmt::format("all: {}, expected {}", text(found.whole), text(expected.whole));
}

// ---- samples ------------------------------------------------------------------------------------------------------
// The cut of a batch by time and some axes of a mesh, bits 0 and 1 + axis of a mask (lower/localise.h). Devices at the
// same coordinates along these axes have the same.
class Cuts {
 public:
  Cuts(const Mesh& mesh, const Entry& entry, size_t micro_batches)
      : mesh_(mesh), batch_(entry.batch), time_{"time", static_cast<int64_t>(micro_batches), {}, {}} {}

  const SampleCut& at(uint64_t mask, const Ints& coordinates) {
    Ints key{static_cast<int64_t>(mask)};
    for (size_t a = 0; a < mesh_.axes.size(); ++a)  // a ragged axis depends on those outside of it
      key.push_back(mask >> (a + 1) & 1 || ragged_inside(mask, a) ? coordinates[a] : -1);
    const auto [at, fresh] = known_.try_emplace(std::move(key));
    if (!fresh) return at->second;
    at->second.whole = range({0, batch_}, mask, coordinates);
    for (const int64_t u : watched(int64_t{0}, time_.size))
      at->second.micro_batches.push_back(
          range(mask & 1 ? cut_of(time_, false, batch_, u) : Interval{0, batch_}, mask, coordinates));
    return at->second;
  }

 private:
  bool ragged_inside(uint64_t mask, size_t axis) const {
    for (size_t a = axis + 1; a < mesh_.axes.size(); ++a)
      if (mask >> (a + 1) & 1 && mesh_.axes[a].ragged()) return true;
    return false;
  }
  Interval range(Interval all, uint64_t mask, const Ints& coordinates) const {
    for (size_t a = 0; a < mesh_.axes.size(); ++a) {
      if (!(mask >> (a + 1) & 1)) continue;
      const Interval inner = cut_of(mesh_.axes, a, false, all.size(), coordinates);
      all = {all.begin + inner.begin, all.begin + inner.end};
    }
    return all;
  }

  const Mesh& mesh_;
  int64_t batch_;
  MeshAxis time_;
  std::map<Ints, SampleCut> known_;
};

// One set of axes explains the number-th samples of all devices.
void check_samples(const Plan& plan, const Entry& entry) {
  const size_t cuts = entry.rows[0].samples.size(), runs = entry.rows[0].samples[0].micro_batches.size();
  for (const DeviceRow& row : entry.rows) {
    Watch::look();
    bool same = row.samples.size() == cuts;
    for (const SampleCut& cut : row.samples) same &= cut.micro_batches.size() == runs;
    if (!same)
      fail(plan, entry, row.device, 0, fmt::format("devices 0 and {} cut the batch in different ways", row.device));
  }
  std::vector<Cuts> of_mesh;
  for (const Mesh& mesh : plan.meshes) of_mesh.emplace_back(mesh, entry, runs);
  const size_t axes = plan.meshes[0].axes.size();
  for (size_t number = 0; number < cuts; ++number) {
    const auto is_share = [&](const DeviceRow& row, uint64_t mask) {
      Watch::look();
      return of_mesh[row.mesh].at(mask, row.coordinates) == row.samples[number];
    };
    const uint64_t masks = uint64_t{2} << axes;
    uint64_t mask = 0;
    while (mask < masks && !std::ranges::all_of(entry.rows, [&](const DeviceRow& row) { return is_share(row, mask); }))
      ++mask;
    if (mask < masks) continue;
    // The set that explains most rows says what the others should be.
    ptrdiff_t most = -1;
    for (uint64_t each = 0; each < masks; ++each)
      if (const auto n = std::ranges::count_if(entry.rows, [&](const DeviceRow& row) { return is_share(row, each); });
          n > most)
        most = n, mask = each;
    const DeviceRow& row = *std::ranges::find_if(entry.rows, [&](const DeviceRow& r) { return !is_share(r, mask); });
    fail(
        plan, entry, row.device, number,
        fmt::format("the samples of device {} ({} of its cuts of the batch) are not its share of {}; {}", row.device,
                    number, entry.batch, difference(row.samples[number], of_mesh[row.mesh].at(mask, row.coordinates))));
  }
}

// ---- micro-batches ------------------------------------------------------------------------------------------------
// Which of `all` micro-batches a program works on, each in as many rows as the others, no row twice.
std::vector<uint8_t> micro_batches_of(const Plan& plan, const Entry& entry, size_t number, size_t all) {
  const Program& p = entry.programs[number];
  const VerifyContext c{plan, entry, number, p};
  std::vector<std::vector<int32_t>> of_segment(p.segments.size());
  std::vector<int32_t> rows(all);
  for (const ScheduleRow& row : watched(p.schedule)) {
    if (static_cast<size_t>(row.micro_batch) >= all)
      c.fail_row(row, fmt::format("program {} has no micro-batch {}", number, row.micro_batch));
    of_segment[row.segment].push_back(row.micro_batch);
    if (!row.whole) ++rows[row.micro_batch];
  }
  std::vector<int32_t> last(all, kNone);  // segment that was seen on each micro-batch
  for (size_t s = 0; s < of_segment.size(); ++s)
    for (const int32_t u : watched(of_segment[s]))
      if (std::exchange(last[u], static_cast<int32_t>(s)) == static_cast<int32_t>(s))
        c.fail({.segment = &p.segments[s], .instruction = 0, .micro_batch = u},
               fmt::format("program {} runs segment '{}' twice on micro-batch {}", number, p.segments[s].name, u));
  std::vector<uint8_t> out(all);
  size_t first = all;
  for (const size_t u : watched(size_t{0}, all)) {
    if (rows[u] == 0) continue;
    first = std::min(first, u);
    if (rows[u] != rows[first])
      c.fail({.micro_batch = static_cast<int32_t>(u)},
             fmt::format("program {} runs {} segments on micro-batch {}, {} on {}", number, rows[first], first, rows[u],
                         u));
    out[u] = 1;
  }
  return out;
}

void check_micro_batches(const Plan& plan, const Entry& entry) {
  const size_t all = entry.rows[0].samples[0].micro_batches.size();
  std::vector<std::vector<uint8_t>> of_program;
  for (size_t p = 0; p < entry.programs.size(); ++p) of_program.push_back(micro_batches_of(plan, entry, p, all));
  for (size_t m = 0; m < plan.meshes.size(); ++m) {
    Watch::look();
    std::set<int32_t> programs;
    for (const DeviceRow& row : entry.rows)
      if (row.mesh == static_cast<int32_t>(m)) programs.insert(row.program);
    const auto less = [&](int32_t a, int32_t b) {
      const auto &x = of_program[a], &y = of_program[b];
      return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end());
    };
    std::set<int32_t, decltype(less)> different(less);
    for (const int32_t p : watched(programs)) different.insert(p);
    for (const size_t u : watched(size_t{0}, all)) {
      const auto times =
          std::count_if(different.begin(), different.end(), [&](int32_t p) { return of_program[p][u] != 0; });
      if (times != 1) {
        const auto of_mesh = [&](const DeviceRow& row) { return row.mesh == static_cast<int32_t>(m); };
        const auto works = [&](const DeviceRow& row) { return of_mesh(row) && of_program[row.program][u] != 0; };
        auto at = std::ranges::find_if(entry.rows, works);
        if (at == entry.rows.end()) at = std::ranges::find_if(entry.rows, of_mesh);
        fail_at(plan, entry,
                {.device = at == entry.rows.end() ? kNone : at->device, .micro_batch = static_cast<int32_t>(u)}, "",
                fmt::format("micro-batch {} is worked on {} times by the devices of mesh {}", u, times, m));
      }
    }
  }
}

// The first device that is in another place.
int32_t first_other(const Group& group, const Group& wanted) {
  for (size_t p = 0; p < wanted.parts.size(); ++p)
    for (size_t k = 0; k < wanted.parts[p].size(); ++k)
      if (p >= group.parts.size() || k >= group.parts[p].size() || group.parts[p][k] != wanted.parts[p][k])
        return wanted.parts[p][k];
  return group.parts.empty() || group.parts[0].empty() ? kNone : group.parts[0][0];
}

// The part that a device is in; empty: it is in none.
std::vector<int32_t> part_with(const Group& group, int32_t device) {
  const auto with = [&](const auto& part) { return std::ranges::count(part, device) > 0; };
  const auto found = std::ranges::find_if(group.parts, with);
  return found == group.parts.end() ? std::vector<int32_t>{} : *found;
}

}  // namespace

void verify_groups(const Plan& plan) {
  if (plan.groups.empty()) return;  // nor is there a collective
  const std::vector<Group> lines = groups_of(plan.meshes);
  if (plan.groups.size() != lines.size())
    fail_at(plan, kNone, fmt::format("{} groups for {} axes of its meshes", plan.groups.size(), lines.size()));
  for (size_t g = 0; g < lines.size(); ++g) {
    if (plan.groups[g].axis != lines[g].axis)
      fail_at(plan, kNone,
              fmt::format("group {} is along axis '{}', expected '{}', as its meshes have it", g, plan.groups[g].axis,
                          lines[g].axis));
    if (plan.groups[g].parts != lines[g].parts) {
      const int32_t device = first_other(plan.groups[g], lines[g]);
      const std::string what = fmt::format(
          "group {} ('{}') is not the devices along axis '{}' of its meshes in their order; with device {}: [{}], "
          "expected [{}]",
          g, plan.groups[g].axis, lines[g].axis, device, fmt::join(part_with(plan.groups[g], device), ","),
          fmt::join(part_with(lines[g], device), ","));
      for (const Entry& entry : plan.entries) {
        FaultSite site =
            site_on(entry, device, [&](const Instruction& i) { return i.group() == static_cast<int32_t>(g); });
        if (site.segment != nullptr) fail_at(plan, entry, site, "", what);
      }
      fail_at(plan, device, what);
    }
  }
}

void verify_work(const Plan& plan, const Entry& entry) {
  if (entry.rows.empty()) return;
  check_samples(plan, entry);
  check_micro_batches(plan, entry);
}

}  // namespace whale
