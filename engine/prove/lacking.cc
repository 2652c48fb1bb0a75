#include "prove/lacking.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <set>

namespace whale::proof {
namespace {

Set others(const Set& set, int64_t extent) {
  Set out;
  int64_t at = 0;
  for (const Interval& run : set.runs()) {
    if (run.begin > at) out.append({at, run.begin});
    at = run.end;
  }
  if (at < extent) out.append({at, extent});
  return out;
}

// The positions along the batch of what a summand's boxes have, of so many; none: boxes do not say samples.
struct OfBatch {
  Set set;
  int64_t extent = 0;
  bool any = false;  // so many, whichever they are
};
std::optional<OfBatch> of_batch(const Entry& entry, Reference& reference, const Summand& summand) {
  if (summand.boxes.empty()) return {};
  for (const FactorSet& first : summand.boxes[0]) {
    const FactorKey key = first.key;
    if (first.extent % entry.batch != 0 || !reference.is_of_batch(key.op, key.factor)) continue;
    OfBatch out{.set = {}, .extent = first.extent, .any = false};
    bool told = true;
    for (const TermBox& box : summand.boxes) {
      const auto mine = std::ranges::find(box, key, &FactorSet::key);
      told &= mine != box.end() && (!mine->any || summand.boxes.size() == 1);
      if (told) out.set = out.set.united(mine->set), out.any |= mine->any;
    }
    if (told) return out;
  }
  return {};
}

// Samples of the batch that no box of a summand has; empty: nothing that boxes say is of samples.
Set missing_samples(const Entry& entry, Reference& reference, const Summand& summand) {
  const auto there = of_batch(entry, reference, summand);
  if (!there || there->any) return {};
  const int64_t each = there->extent / entry.batch;
  Set out;
  const Set missing = others(there->set, there->extent);
  for (const Interval& run : missing.runs()) {
    const Interval samples{run.begin / each, (run.end + each - 1) / each};
    out = out.united(Set(samples));
  }
  return out;
}

// "0, 2, 5 to 9 and 3 more": of more than five runs the first four.
std::string listed(const std::set<int64_t>& numbers) {
  std::vector<std::string> parts;
  for (auto at = numbers.begin(); at != numbers.end();) {
    const int64_t first = *at;
    int64_t last = first;
    for (++at; at != numbers.end() && *at == last + 1; ++at) last = *at;
    parts.push_back(first == last ? fmt::format("{}", first) : fmt::format("{} to {}", first, last));
  }
  constexpr size_t kShown = 4;
  const size_t left = parts.size() > kShown + 1 ? parts.size() - kShown : 0;
  if (left > 0) parts.resize(kShown);
  return fmt::format("{}{}", fmt::join(parts, ", "), left > 0 ? fmt::format(" and {} more", left) : "");
}

int64_t axes_between(const DeviceRow& a, const DeviceRow& b) {
  if (a.mesh != b.mesh) return std::numeric_limits<int64_t>::max();
  int64_t out = 0;
  for (size_t i = 0; i < a.coordinates.size() && i < b.coordinates.size(); ++i)
    out += a.coordinates[i] != b.coordinates[i];
  return out;
}

}  // namespace

std::optional<int64_t> samples_in(const Entry& entry, Reference& reference, const Value& value) {
  if (entry.batch <= 0 || reference.constant(value.tensor)) return {};
  if (value.terms.whole()) return entry.batch;
  std::optional<int64_t> out;
  for (const Summand& s : value.terms.summands()) {
    const auto there = of_batch(entry, reference, s);
    if (!there) continue;
    const int64_t each = there->extent / entry.batch;
    out = std::max(out.value_or(0), (there->set.size() + each - 1) / each);
  }
  return out;
}

Lacking lacking(const Entry& entry, Reference& reference, int32_t device, const Value& value) {
  if (entry.batch <= 0) return {};  // the model has no batch
  Set missing;
  for (const Summand& s : value.terms.summands()) missing = missing.united(missing_samples(entry, reference, s));
  if (missing.empty()) return {};
  const auto of = std::ranges::find(entry.rows, device, &DeviceRow::device);
  // Whose samples are those and few others, and who is near in the mesh.
  struct Owner {
    int64_t others = 0, axes = 0;
    const DeviceRow* row = nullptr;
    const SampleCut* cut = nullptr;
  };
  std::optional<Owner> owner;
  for (const DeviceRow& row : entry.rows) {
    if (of == entry.rows.end() || row.mesh != of->mesh) continue;
    for (const SampleCut& cut : row.samples) {
      Owner each{.others = 0, .axes = 0, .row = &row, .cut = &cut};
      bool meets = false;
      const auto look = [&](const Interval& samples) {
        meets |= Set(samples).meets(missing);
        each.others += Set(samples).united(missing).size() - missing.size();
      };
      if (cut.micro_batches.empty()) look(cut.whole);
      for (const Interval& u : cut.micro_batches) look(u);
      if (!meets) continue;
      each.axes = axes_between(row, *of);
      if (!owner || std::pair(each.others, each.axes) < std::pair(owner->others, owner->axes)) owner = each;
    }
  }
  std::set<int64_t> samples, micro_batches;
  for (const Interval& run : missing.runs())
    for (int64_t s = run.begin; s < run.end; ++s) samples.insert(s);
  Lacking out{fmt::format("without sample{} {}", samples.size() == 1 ? "" : "s", listed(samples))};
  if (!owner) return out;
  out.device = owner->row->device;
  for (size_t u = 0; u < owner->cut->micro_batches.size(); ++u)
    if (Set(owner->cut->micro_batches[u]).meets(missing)) micro_batches.insert(static_cast<int64_t>(u));
  out.what += fmt::format(", which device {} has", owner->row->device);
  if (!micro_batches.empty())
    out.what += fmt::format(" in micro-batch{} {}", micro_batches.size() == 1 ? "" : "es", listed(micro_batches));
  return out;
}

std::vector<Held> traced(const Entry& entry, const Held& sum, int32_t of) {
  const auto row = [&](int32_t device) { return std::ranges::find(entry.rows, device, &DeviceRow::device); };
  const auto wanted = row(of);
  std::vector<Held> out;
  if (wanted == entry.rows.end()) return out;
  const auto far = [&](const Held& v) {
    const auto at = row(v->device);
    return at == entry.rows.end() ? std::numeric_limits<int64_t>::max() : axes_between(*at, *wanted);
  };
  for (Held at = sum; at->made_of && !at->made_of->empty();) {
    const Held next = *std::ranges::min_element(*at->made_of, {}, far);
    const bool of_several = std::ranges::any_of(*at->made_of, [&](const Held& v) { return v->device != next->device; });
    if (far(next) > far(at) || (of_several && far(next) == far(at) && far(at) > 0)) break;
    out.push_back(next);
    at = next;
  }
  return out;
}

}  // namespace whale::proof
