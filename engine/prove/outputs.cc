#include "prove/outputs.h"

#include <algorithm>
#include <map>

#include "base/watch.h"
#include "plan/fault.h"
#include "prove/stopped.h"

namespace whale::proof {
namespace {

// A fetch in a row of the schedule.
struct Fetched {
  const ScheduleRow* row = nullptr;
  const Segment* segment = nullptr;
  size_t instruction = 0;
  work::Fetch fetch;
};

std::vector<Fetched> fetches_of(const Program& p) {
  std::vector<Fetched> out;
  for (const ScheduleRow& row : p.schedule) {
    const Segment& s = p.segments[row.segment];
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (const auto* fetch = s.instructions[k].as<work::Fetch>()) out.push_back({&row, &s, k, *fetch});
  }
  return out;
}

// Of what devices hand over of one output.
struct Part {
  Ints box;  // intervals of each cut, one after the other
  const DeviceRow* device = nullptr;
  const Fetched* fetched = nullptr;
};

// One output, by all devices.
class Parts {
 public:
  Parts(const Plan& plan, const Entry& entry, const PlanOutput& port) : plan_(plan), entry_(entry), port_(port) {}

  void add(const DeviceRow& row, const Fetched& fetched) {
    const std::vector<SubAxisCut> cuts = handed_over(plan_, entry_, row, *fetched.row, fetched.fetch);
    Part part{{}, &row, &fetched};
    for (const SubAxisCut& c : cuts) part.box.insert(part.box.end(), {c.at.begin, c.at.end});
    const int64_t elements = element_count(local_dims(port_.dims, cuts));
    elements_ += elements;
    of_devices_[row.device] += elements;
    if (port_.merge != OutputMerge::kConcat && elements != element_count(port_.dims))
      stop({&part}, row.device, "of output {}, {} of {} elements are fetched at once", port_.name, elements,
           element_count(port_.dims));
    if (elements > 0) parts_.push_back(std::move(part));
  }

  void check() {
    const int64_t whole = element_count(port_.dims);
    if (whole == 0) return;
    if (parts_.empty()) stop({}, lacking(), "it does not fetch output {}, nor does any other device", port_.name);
    if (port_.merge != OutputMerge::kConcat) return;
    std::ranges::stable_sort(parts_, {}, &Part::box);
    for (const Part& part : parts_)
      if (part.box.size() != parts_[0].box.size()) no_rule("output {} that is cut in two ways", port_.name);
    check_apart(0, parts_.size(), 0);
    if (elements_ == whole) return;
    constexpr size_t kMost = 8;
    std::vector<const Part*> some;
    for (const Part& part : parts_)
      if (some.size() < kMost) some.push_back(&part);
    stop(some, lacking(), "of output {}, {} of {} elements are fetched", port_.name, elements_, whole);
  }

 private:
  template <class... Args>
  [[noreturn]] void stop(const std::vector<const Part*>& parts, int32_t device, fmt::format_string<Args...> format,
                         Args&&... args) const {
    Stopped out{{true, fmt::format(format, std::forward<Args>(args)...)}, {device, -1, -1}};
    for (const Part* part : parts)
      out.path.push_back(fmt::format("device {} hands it over by instruction {}, micro-batch {}", part->device->device,
                                     told(plan_, *part->fetched->segment, part->fetched->instruction),
                                     part->fetched->row->micro_batch));
    throw out;
  }

  // The first device that has to hand over more than it does; -1: by its own cuts none has.
  int32_t lacking() const {
    for (const DeviceRow& row : entry_.rows) {
      if (!hands_over(row, port_)) continue;
      const auto of_device = of_devices_.find(row.device);
      if (of_device == of_devices_.end()) return row.device;
      const auto has = [&](const Part& part) { return part.device == &row; };
      const auto mine = std::ranges::find_if(parts_, has);
      if (mine == parts_.end()) continue;  // without elements
      work::Fetch fetch = mine->fetched->fetch;
      fetch.whole_batch = true;
      const auto cuts = handed_over(plan_, entry_, row, *mine->fetched->row, fetch);
      if (of_device->second < element_count(local_dims(port_.dims, cuts))) return row.device;
    }
    return kNone;
  }

  // Of these, which are alike up to `at` and in ascending order, no two meet. Intervals of a cut that overlap without
  // being the same make one bundle, in which each is held against each.
  void check_apart(size_t begin, size_t end, size_t at) const {
    if (end - begin < 2) return;
    if (at == parts_[begin].box.size()) overlap(parts_[begin], parts_[begin + 1]);
    while (begin < end) {
      size_t next = begin + 1;
      int64_t last = parts_[begin].box[at + 1];
      bool same = true;
      for (; next < end && parts_[next].box[at] < last; ++next) {
        last = std::max(last, parts_[next].box[at + 1]);
        same &= parts_[next].box[at] == parts_[begin].box[at] && parts_[next].box[at + 1] == parts_[begin].box[at + 1];
      }
      if (same)
        check_apart(begin, next, at + 2);
      else
        check_each(begin, next);
      begin = next;
    }
  }
  void check_each(size_t begin, size_t end) const {
    constexpr size_t kMost = 4096;
    if (end - begin > kMost)
      no_rule("output {} that is put together from {} parts that overlap", port_.name, end - begin);
    for (size_t a = begin; a < end; ++a)
      for (size_t b = a + 1; b < end; ++b)
        if (meet(parts_[a].box, parts_[b].box)) overlap(parts_[a], parts_[b]);
  }
  [[noreturn]] void overlap(const Part& a, const Part& b) const {
    const std::string other = a.device == b.device ? "it" : fmt::format("device {}", a.device->device);
    stop({&a, &b}, b.device->device, "it hands over a part of output {} that {} hands over too", port_.name, other);
  }
  static bool meet(const Ints& a, const Ints& b) {
    for (size_t k = 0; k + 1 < a.size(); k += 2)
      if (a[k] >= b[k + 1] || b[k] >= a[k + 1]) return false;
    return true;
  }

  const Plan& plan_;
  const Entry& entry_;
  const PlanOutput& port_;
  std::vector<Part> parts_;
  std::map<int32_t, int64_t> of_devices_;  // elements
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
  const PlanOutput& port = entry.outputs[fetch.output];
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
  std::vector<Parts> parts;
  for (const PlanOutput& port : entry.outputs) parts.emplace_back(plan, entry, port);
  std::vector<std::vector<Fetched>> fetches;
  for (const Program& p : entry.programs) fetches.push_back(fetches_of(p));
  for (const DeviceRow& row : entry.rows)
    for (const Fetched& f : fetches[row.program]) {
      Watch::look();
      if (hands_over(row, entry.outputs[f.fetch.output])) parts[f.fetch.output].add(row, f);
    }
  for (Parts& each : parts) each.check();
}

}  // namespace whale::proof
