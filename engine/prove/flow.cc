#include "prove/flow.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/watch.h"
#include "prove/memory.h"
#include "prove/ranges.h"

namespace whale::proof {
namespace {

// An operand of which a row reads something that it has not written itself.
struct Read {
  int32_t instruction = 0, operand = 0;
  bool versions = false;  // of which the row says one
  Place place;
};
struct Touched {
  std::vector<Read> reads;
  std::vector<Place> writes;
};
using Kind = std::pair<int32_t, int32_t>;  // segment and version

Touched touched_by(const Program& p, const Kind& kind) {
  Touched out;
  Ranges<char> known;
  const auto& list = p.segments[kind.first].instructions;
  for (size_t k = 0; k < list.size(); ++k) {
    Watch::look();
    const auto place = [&](BufferId id) { return place_of(p, id, kind.second); };
    const auto counts = [&](BufferId id) { return id != kNone && p.buffers[id].kind != BufferKind::kStep; };
    for (size_t n = 0; n < list[k].in.size(); ++n)
      if (const BufferId id = list[k].in[n]; counts(id)) {
        bool outside = false;
        known.each(place(id), [&](int64_t, int64_t, const char* own) { outside |= own == nullptr; });
        if (outside)
          out.reads.push_back(
              {static_cast<int32_t>(k), static_cast<int32_t>(n), p.buffers[id].versions > 1, place(id)});
      }
    for (const BufferId id : list[k].out)
      if (counts(id)) known.put(place(id), 0), out.writes.push_back(place(id));
  }
  return out;
}

// What segments do with bytes that one row reads and another, of a micro-batch or between them, writes, and with those
// of which there are several versions; the rest never leaves a row, or comes from before all of them.
std::map<Kind, Touched> exchanged_by(const Program& p) {
  std::map<Kind, Touched> out;
  Ranges<char> written, read;
  const auto of_one = [](const ScheduleRow& row) { return !row.whole; };
  const auto first = std::ranges::find_if(p.schedule, of_one);
  const auto end = std::find_if(p.schedule.rbegin(), p.schedule.rend(), of_one).base();
  for (auto row_at = p.schedule.begin(); row_at != p.schedule.end(); ++row_at) {
    const ScheduleRow& row = *row_at;
    const Kind kind{row.segment, row.version};
    const auto [at, fresh] = out.try_emplace(kind);
    if (fresh) at->second = touched_by(p, kind);
    if (first <= row_at && row_at < end)
      for (const Place& w : at->second.writes) written.put(w, 0);
  }
  for (auto& [_, t] : out) {
    std::erase_if(t.reads, [&](const Read& r) { return !r.versions && !written.meets(r.place); });
    for (const Read& r : t.reads) read.put(r.place, 0);
  }
  for (auto& [_, t] : out) std::erase_if(t.writes, [&](const Place& w) { return !read.meets(w); });
  return out;
}

// A part of an operand, and who wrote it: the segment, how many micro-batches before (kWhole: of no micro-batch) and,
// of no micro-batch, in which row of the schedule.
using Source = std::tuple<int32_t, int32_t, int64_t, int64_t, int32_t, int64_t, int64_t>;
constexpr int64_t kWhole = INT64_MIN;

}  // namespace

bool flows_evenly(const Program& p, const Runs& runs) {
  const std::map<Kind, Touched> touched = exchanged_by(p);
  Ranges<const ScheduleRow*> writers;
  std::map<int64_t, std::vector<std::vector<Source>>> of;  // micro-batches from the second of a run on, row by row
  const auto left_out = [&](const ScheduleRow& row) { return !row.whole && runs.stands_for(row.micro_batch) == 0; };
  for (const ScheduleRow& row : p.schedule) {
    Watch::look();
    const Touched& t = touched.at({row.segment, row.version});
    const int64_t u = row.micro_batch;
    const bool compared = !row.whole && runs.long_at(u) && u > runs.begin(u);
    const bool stands = compared && u == runs.begin(u) + 1;
    std::vector<Source> sources{{row.segment, 0, 0, 0, 0, 0, 0}};
    bool even = true;
    for (const Read& r : t.reads)
      writers.each(r.place, [&](int64_t begin, int64_t end, const ScheduleRow* const* writer) {
        const ScheduleRow* w = writer ? *writer : nullptr;
        const int64_t behind = w && !w->whole ? u - w->micro_batch : kWhole;
        if (compared)
          sources.emplace_back(r.instruction, r.operand, begin - r.place.begin, end - r.place.begin,
                               w ? w->segment : kNone, behind, w && w->whole ? w - p.schedule.data() : 0);
        if (stands && behind != kWhole && behind != 0 && behind != 1) even = false;
        if ((!compared || stands) && w && left_out(*w)) even = false;
      });
    if (!even) return false;
    for (const Place& place : t.writes) writers.put(place, &row);
    if (compared) of[u].push_back(std::move(sources));
  }
  for (const auto& [u, rows] : of)
    if (const int64_t second = runs.begin(u) + 1; u > second && rows != of[second]) return false;
  return true;
}

}  // namespace whale::proof
