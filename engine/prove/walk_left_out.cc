// Micro-batches that are left out: what is put and read where they would have written.
#include "prove/walk.h"

#include <algorithm>

namespace whale::proof {

std::shared_ptr<const std::vector<Held>> Walk::sums_read() {
  if (sums_) return sums_;
  std::vector<Held> out;
  for (const Held& v : reads_) {
    if (v->terms.whole() || v->device < 0) continue;
    const ScheduleRow &made = schedule_row({v->device, v->row, v->instruction}), &now = schedule_row(here_);
    const bool earlier =
        v->device == here_.device && made.segment == now.segment && made.micro_batch != now.micro_batch;
    if (!earlier) out.push_back(v);
  }
  sums_ = std::make_shared<const std::vector<Held>>(std::move(out));
  return sums_;
}

void Walk::put(Device& d, const Place& place, Value value) {
  value.device = d.at.device, value.row = d.at.row, value.instruction = d.at.instruction, value.before = nullptr;
  value.made_of = nullptr, value.depth = 0;
  if (!value.terms.whole()) {
    constexpr int32_t kKept = 8;  // rings of many devices would keep all that they ever added
    const auto sums = sums_read();
    for (const Held& v : *sums) value.depth = std::max(value.depth, v->depth + 1);
    if (value.depth <= kKept)
      value.made_of = sums;
    else
      value.depth = 0;
  }
  const Runs& runs = symmetry_.micro_batches();
  const ScheduleRow& row = now(d);
  if (gaps_ && !row.whole && runs.long_at(row.micro_batch) && row.micro_batch == runs.begin(row.micro_batch) + 1) {
    const Held old = d.memory.whole(place);
    const ScheduleRow* made = old && old->row >= 0 ? &d.program.schedule[old->row] : nullptr;
    if (made && old->instruction == value.instruction && made->segment == row.segment && !made->whole &&
        made->micro_batch + 1 == row.micro_batch)
      value.before = old;
  }
  if (gaps_ && !row.whole && runs.long_at(row.micro_batch) && row.micro_batch == runs.last(row.micro_batch)) {
    // The last one ends where those before it lead.
    const Held old = d.memory.whole(place);
    if (old && old->before && old->before->before && old->instruction == value.instruction) {
      const Held &second = old->before, &first = second->before;
      if (!alike(behind(*first, *second, row.micro_batch - runs.begin(row.micro_batch)), value)) throw Uneven{};
    }
  }
  d.memory.write(place, std::make_shared<const Value>(std::move(value)));
}

Place Walk::readable(Device& d, BufferId id) {
  const Place place = place_of(d.program, id, now(d).version);
  bring_up(d, place);
  return place;
}

void Walk::bring_up(Device& d, const Place& place) {
  if (gaps_) d.memory.replace(place, [&](const Held& value) { return brought_up(d, value); });
}

// What is read here of what a micro-batch wrote whose followers are left out: as the last of them leaves it. Null: it
// is as it was written.
Held Walk::brought_up(const Device& d, const Held& value) const {
  if (value->row < 0) return nullptr;
  const auto& schedule = d.program.schedule;
  const ScheduleRow& made = schedule[value->row];
  const Runs& runs = symmetry_.micro_batches();
  const int64_t u = made.micro_batch, first = runs.begin(u), last = runs.last(u);
  if (made.whole || !runs.long_at(u) || u > first + 1) return nullptr;
  const ScheduleRow* row = static_cast<size_t>(d.at.row) < schedule.size() ? &now(d) : nullptr;
  const int64_t here = row && !row->whole ? row->micro_batch : kNone;
  if (here == u || (u == first && here == first + 1)) return nullptr;
  if (here != last || !value->before) throw Uneven{};
  Value out = behind(*value->before, *value, last - 1 - first);
  out.before = value;
  const auto left_out = std::ranges::find_if(schedule, [&](const ScheduleRow& r) {
    return !r.whole && r.segment == made.segment && r.micro_batch == last - 1;
  });
  if (left_out == schedule.end()) throw Uneven{};
  out.row = static_cast<int32_t>(left_out - schedule.begin());
  return std::make_shared<const Value>(std::move(out));
}

}  // namespace whale::proof
