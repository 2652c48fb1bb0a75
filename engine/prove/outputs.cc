#include "prove/outputs.h"

#include <algorithm>

#include "base/watch.h"
#include "prove/value.h"

namespace whale::proof {
namespace {

// A fetch in a row of the schedule.
struct Fetched {
  const ScheduleRow* row = nullptr;
  work::Fetch fetch;
};

std::vector<Fetched> fetches_of(const Program& p) {
  std::vector<std::vector<work::Fetch>> of_segments;
  for (const Segment& s : p.segments) {
    of_segments.emplace_back();
    for (const Instruction& i : s.instructions)
      if (const auto* fetch = i.as<work::Fetch>()) of_segments.back().push_back(*fetch);
  }
  std::vector<Fetched> out;
  for (const ScheduleRow& row : p.schedule)
    for (const work::Fetch& fetch : of_segments[static_cast<size_t>(row.segment)]) out.push_back({&row, fetch});
  return out;
}

// Boxes of one output: intervals of each cut, one after the other.
class Boxes {
 public:
  explicit Boxes(const PlanOutput& port) : port_(port) {}
  void add(const std::vector<SubAxisCut>& cuts) {
    Ints box;
    for (const SubAxisCut& c : cuts) box.insert(box.end(), {c.at.begin, c.at.end});
    const int64_t elements = element_count(local_dims(port_.dims, cuts));
    if (elements > 0) boxes_.push_back(std::move(box));
    elements_ += elements;
    if (port_.merge != OutputMerge::kConcat && elements != element_count(port_.dims))
      refuse("of output {}, {} of {} elements are fetched at once", port_.name, elements, element_count(port_.dims));
  }
  void check() {
    const int64_t whole = element_count(port_.dims);
    if (whole == 0) return;
    if (boxes_.empty()) refuse("output {} is not fetched", port_.name);
    if (port_.merge != OutputMerge::kConcat) return;
    std::sort(boxes_.begin(), boxes_.end());
    for (size_t k = 1; k < boxes_.size(); ++k)
      if (boxes_[k].size() != boxes_[0].size()) no_rule("output {} that is cut in two ways", port_.name);
    check_apart(0, boxes_.size(), 0);
    if (elements_ != whole) refuse("of output {}, {} of {} elements are fetched", port_.name, elements_, whole);
  }

 private:
  // Of these, which are alike up to `at` and in ascending order, no two meet. Intervals of a cut that overlap without
  // being the same make one bundle, in which each is held against each.
  void check_apart(size_t begin, size_t end, size_t at) {
    if (end - begin < 2) return;
    if (at == boxes_[begin].size()) refuse("a part of output {} is handed over twice", port_.name);
    while (begin < end) {
      size_t next = begin + 1;
      int64_t last = boxes_[begin][at + 1];
      bool same = true;
      for (; next < end && boxes_[next][at] < last; ++next) {
        last = std::max(last, boxes_[next][at + 1]);
        same &= boxes_[next][at] == boxes_[begin][at] && boxes_[next][at + 1] == boxes_[begin][at + 1];
      }
      if (same)
        check_apart(begin, next, at + 2);
      else
        check_each(begin, next);
      begin = next;
    }
  }
  void check_each(size_t begin, size_t end) {
    constexpr size_t kMost = 4096;
    if (end - begin > kMost)
      no_rule("output {} that is put together from {} parts that overlap", port_.name, end - begin);
    for (size_t a = begin; a < end; ++a)
      for (size_t b = a + 1; b < end; ++b)
        if (meet(boxes_[a], boxes_[b])) refuse("parts of output {} overlap", port_.name);
  }
  static bool meet(const Ints& a, const Ints& b) {
    for (size_t k = 0; k + 1 < a.size(); k += 2)
      if (a[k] >= b[k + 1] || b[k] >= a[k + 1]) return false;
    return true;
  }

  const PlanOutput& port_;
  std::vector<Ints> boxes_;
  int64_t elements_ = 0;
};

}  // namespace

bool hands_over(const DeviceRow& row, const PlanOutput& output) {
  if (output.mesh != row.mesh && output.mesh != kNone) return false;
  for (size_t a = 0; a < row.coordinates.size(); ++a)
    if (row.coordinates[a] != 0 && !(a < output.cut_by.size() && output.cut_by[a])) return false;
  return true;
}

std::vector<SubAxisCut> handed_over(const Plan& plan, const Entry& entry, const DeviceRow& row, const ScheduleRow& at,
                                    const work::Fetch& fetch) {
  const PlanOutput& port = entry.outputs[static_cast<size_t>(fetch.output)];
  std::vector<SubAxisCut> cuts;
  if (!port.parts.axes.empty() && port.mesh != kNone)
    cuts = cuts_of(port.dims, port.parts, plan.meshes.at(static_cast<size_t>(port.mesh)).axes, row.coordinates);
  if (port.merge == OutputMerge::kConcat && port.batch_dim >= 0) {
    const SampleCut& cut = row.samples.at(static_cast<size_t>(fetch.samples));
    const bool whole = fetch.whole_batch || at.whole || cut.micro_batches.empty();
    const int64_t inner = port.dims.at(static_cast<size_t>(port.batch_dim)) / entry.batch;
    cuts.push_back({SubAxis{port.batch_dim, 1, inner}, entry.batch,
                    whole ? cut.whole : cut.micro_batches.at(static_cast<size_t>(at.micro_batch))});
  }
  return cuts;
}

void check_outputs(const Plan& plan, const Entry& entry) {
  const auto has = [&](const std::string& name) {
    return std::ranges::any_of(entry.outputs, [&](const PlanOutput& o) { return o.name == name; });
  };
  for (const NamedTensor& o : plan.source.outputs)
    if (!has(o.name)) refuse("output {} of the model is none of the entry's", o.name);
  if (plan.source.training.loss != kNone && !has("loss")) refuse("the loss is none of the entry's outputs");
  std::vector<Boxes> boxes(entry.outputs.begin(), entry.outputs.end());
  std::vector<std::vector<Fetched>> fetches;
  for (const Program& p : entry.programs) fetches.push_back(fetches_of(p));
  for (const DeviceRow& row : entry.rows)
    for (const Fetched& f : fetches[static_cast<size_t>(row.program)]) {
      Watch::look();
      const PlanOutput& port = entry.outputs[static_cast<size_t>(f.fetch.output)];
      if (!hands_over(row, port)) continue;
      boxes[static_cast<size_t>(f.fetch.output)].add(handed_over(plan, entry, row, *f.row, f.fetch));
    }
  for (Boxes& each : boxes) each.check();
}

}  // namespace whale::proof
