#include "plan/memory.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "base/watch.h"

namespace whale {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t peak_of(const std::vector<Block>& blocks) {
  std::map<int64_t, int64_t> change;
  for (const Block& b : blocks) change[b.first] += aligned(b.bytes), change[b.last + 1] -= aligned(b.bytes);
  int64_t now = 0, peak = 0;
  for (const auto& [at, bytes] : change) peak = std::max(peak, now += bytes);
  return peak;
}

// A block at its offset.
struct Placed {
  int64_t begin = 0, end = 0;  // bytes
  int64_t first = 0, last = 0;
};

// Of the blocks of a shelf, a bit each by their place on it: those whose time is not later than one that is asked for.
class Times {
 public:
  uint64_t until(int64_t time) const { return masks_[std::ranges::upper_bound(times_, time) - times_.begin()]; }
  // Of a block that comes to this place; those from there on go up by one.
  void insert(int64_t time, size_t place) {
    const uint64_t bit = uint64_t{1} << place, below = bit - 1;
    for (uint64_t& mask : masks_) mask = (mask & below) | (mask & ~below) << 1;
    const auto at = std::ranges::upper_bound(times_, time) - times_.begin();
    times_.insert(times_.begin() + at, time);
    masks_.insert(masks_.begin() + at, masks_[at]);
    for (auto mask = masks_.begin() + at + 1; mask != masks_.end(); ++mask) *mask |= bit;
  }

 private:
  std::vector<int64_t> times_;      // rising
  std::vector<uint64_t> masks_{0};  // [k]: of the k earliest
};

// Placed blocks that follow one another by offset, and what can be said of all of them at once.
struct Shelf {
  static constexpr size_t kFull = 64;  // fewer are on it
  std::vector<Placed> blocks;
  int64_t begin = INT64_MAX, end = 0;  // of the bytes
  int64_t earliest_first = INT64_MAX, latest_first = INT64_MIN, earliest_last = INT64_MAX, latest_last = INT64_MIN;
  Times firsts, lasts;
  uint64_t linked = 0;               // a bit for each block that begins inside or at the end of the one before it, and
                                     // does not end before that one
  mutable int64_t largest_gap = -1;  // -1: not known since a block was added

  // Behind those of the same offset.
  void add(const Placed& x) {
    const auto at = std::ranges::upper_bound(blocks, x.begin, {}, &Placed::begin);
    const auto place = static_cast<size_t>(at - blocks.begin());
    blocks.insert(at, x);
    firsts.insert(x.first, place), lasts.insert(x.last, place);
    const uint64_t below = (uint64_t{1} << place) - 1;
    linked = (linked & below) | (linked & ~below) << 1;
    for (size_t k = std::max<size_t>(place, 1); k < std::min(place + 2, blocks.size()); ++k) {
      const bool link = blocks[k].begin <= blocks[k - 1].end && blocks[k - 1].end <= blocks[k].end;
      linked = (linked & ~(uint64_t{1} << k)) | static_cast<uint64_t>(link) << k;
    }
    begin = std::min(begin, x.begin), end = std::max(end, x.end), largest_gap = -1;
    earliest_first = std::min(earliest_first, x.first), latest_first = std::max(latest_first, x.first);
    earliest_last = std::min(earliest_last, x.last), latest_last = std::max(latest_last, x.last);
  }
  // A bit each: those that live at some time of these.
  uint64_t live(int64_t first, int64_t last) const { return firsts.until(last) & ~lasts.until(first - 1); }
  bool has_gap(int64_t need) const {  // between its blocks
    if (largest_gap < 0) {
      largest_gap = 0;
      int64_t until = blocks.front().end;
      for (const Placed& x : blocks)
        largest_gap = std::max(largest_gap, x.begin - until), until = std::max(until, x.end);
    }
    return largest_gap >= need;
  }
};

// Placed blocks by offset, on shelves: most shelves are passed as a whole, because nothing on them lives at the time
// that is asked for, or everything does and leaves no gap that is large enough. On the others, runs of live blocks that
// leave no gap are passed at once.
class Shelves {
 public:
  // The offset of the smallest gap of `need` bytes between those that live at the same time; the first of several.
  int64_t find(int64_t need, int64_t first, int64_t last) const {
    int64_t end = 0, best = -1, best_gap = 0;
    const auto before = [&](int64_t begin) {  // whether none is better than the gap before this offset
      const int64_t gap = begin - end;
      if (gap >= need && (best < 0 || gap < best_gap)) best = end, best_gap = gap;
      return best >= 0 && best_gap == need;
    };
    for (const Shelf& shelf : shelves_) {
      if (shelf.latest_last < first || last < shelf.earliest_first) continue;
      const bool all = shelf.latest_first <= last && first <= shelf.earliest_last && end <= shelf.begin;
      if (all && !shelf.has_gap(need)) {
        if (before(shelf.begin)) return best;
        end = std::max(end, shelf.end);
        continue;
      }
      const uint64_t live = shelf.live(first, last), linked = need > 0 ? shelf.linked : 0;  // nothing has room anywhere
      uint64_t begins = live & ~(live << 1 & linked), ends = live & ~((live & linked) >> 1);
      for (; begins != 0; begins &= begins - 1, ends &= ends - 1) {
        if (before(shelf.blocks[std::countr_zero(begins)].begin)) return best;
        end = std::max(end, shelf.blocks[std::countr_zero(ends)].end);
      }
    }
    return best >= 0 ? best : end;
  }

  // Behind those of the same offset.
  void add(const Placed& block) {
    if (shelves_.empty()) shelves_.emplace_back();
    auto shelf = std::ranges::upper_bound(shelves_, block.begin, {}, &Shelf::begin);
    if (shelf != shelves_.begin()) --shelf;
    shelf->add(block);
    if (shelf->blocks.size() < Shelf::kFull) return;
    Shelf halves[2];
    for (size_t k = 0; k < Shelf::kFull; ++k) halves[k >= Shelf::kFull / 2].add(shelf->blocks[k]);
    *shelf = std::move(halves[0]);
    shelves_.insert(shelf + 1, std::move(halves[1]));
  }

 private:
  std::vector<Shelf> shelves_;
};

// Places blocks in the given order, each into the smallest gap between those that live at the same time. Gives up when
// the arena would have `limit` bytes or more.
std::optional<MemoryPlan> place(const std::vector<Block>& blocks, const std::vector<size_t>& order, int64_t limit) {
  MemoryPlan plan{.offsets = std::vector<int64_t>(blocks.size()), .bytes = 0, .peak_live = 0};
  Shelves shelves;
  for (const size_t i : order) {
    Watch::look();
    const Block& b = blocks[i];
    const int64_t need = aligned(b.bytes), offset = shelves.find(need, b.first, b.last);
    plan.offsets[i] = offset;
    plan.bytes = std::max(plan.bytes, offset + need);
    if (plan.bytes >= limit) return std::nullopt;
    shelves.add({offset, offset + need, b.first, b.last});
  }
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const std::vector<Block>& blocks) {
  std::vector<size_t> all(blocks.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const auto life = [&](size_t i) { return blocks[i].last - blocks[i].first + 1; };
  const std::function<bool(size_t, size_t)> orders[] = {
      [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; },
      [&](size_t a, size_t b) {
        return blocks[a].first < blocks[b].first ||
               (blocks[a].first == blocks[b].first && blocks[a].bytes > blocks[b].bytes);
      },
      [&](size_t a, size_t b) {
        return static_cast<double>(blocks[a].bytes) * static_cast<double>(life(a)) >
               static_cast<double>(blocks[b].bytes) * static_cast<double>(life(b));
      },
      [&](size_t a, size_t b) {
        return life(a) > life(b) || (life(a) == life(b) && blocks[a].bytes > blocks[b].bytes);
      },
  };
  const int64_t peak = peak_of(blocks);
  MemoryPlan best{.offsets = std::vector<int64_t>(blocks.size()), .bytes = INT64_MAX, .peak_live = 0};
  for (const auto& before : orders) {
    std::vector<size_t> order = all;
    std::stable_sort(order.begin(), order.end(), before);
    if (auto plan = place(blocks, order, best.bytes)) best = *std::move(plan);
    if (best.bytes == peak) break;
  }
  best.peak_live = peak;
  return best;
}

const MemoryPlan& MemoryPlanner::plan(std::vector<Block> blocks) {
  constexpr size_t kRemembered = 8;
  for (const auto& [same, plan] : known_)
    if (same == blocks) return plan;
  MemoryPlan plan = plan_memory(blocks);
  if (known_.size() == kRemembered) known_.pop_back();
  return known_.emplace_front(std::move(blocks), std::move(plan)).second;
}

}  // namespace whale
