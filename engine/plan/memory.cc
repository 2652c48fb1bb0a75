#include "plan/memory.h"

#include <algorithm>
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

// Placed blocks that follow one another by offset, and what can be said of all of them at once.
struct Shelf {
  std::vector<Placed> blocks;
  int64_t end = 0;  // of the bytes
  int64_t earliest_first = INT64_MAX, latest_first = INT64_MIN, earliest_last = INT64_MAX, latest_last = INT64_MIN;
  mutable int64_t largest_gap = -1;  // -1: not known since a block was added

  void count_in(const Placed& x) {
    end = std::max(end, x.end), largest_gap = -1;
    earliest_first = std::min(earliest_first, x.first), latest_first = std::max(latest_first, x.first);
    earliest_last = std::min(earliest_last, x.last), latest_last = std::max(latest_last, x.last);
  }
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
// that is asked for, or everything does and leaves no gap that is large enough.
class Shelves {
 public:
  // The offset of the smallest gap of `need` bytes between those that live at the same time; the first of several.
  int64_t find(int64_t need, int64_t first, int64_t last) const {
    int64_t end = 0, best = -1, best_gap = 0;
    for (const Shelf& shelf : shelves_) {
      if (shelf.latest_last < first || last < shelf.earliest_first) continue;
      const int64_t begin = shelf.blocks.front().begin;
      const bool all = shelf.latest_first <= last && first <= shelf.earliest_last && end <= begin;
      const bool closed = all && !shelf.has_gap(need);
      for (const Placed& x : shelf.blocks) {
        if (x.last < first || last < x.first) continue;
        const int64_t gap = x.begin - end;
        if (gap >= need && (best < 0 || gap < best_gap)) best = end, best_gap = gap;
        if (best >= 0 && best_gap == need) return best;
        end = std::max(end, closed ? shelf.end : x.end);
        if (closed) break;
      }
    }
    return best >= 0 ? best : end;
  }

  // Behind those of the same offset.
  void add(const Placed& block) {
    constexpr size_t kFull = 128;
    if (shelves_.empty()) shelves_.emplace_back();
    const auto behind = [](int64_t offset, const Placed& x) { return offset < x.begin; };
    auto shelf = std::upper_bound(shelves_.begin(), shelves_.end(), block.begin, [&](int64_t offset, const Shelf& s) {
      return !s.blocks.empty() && behind(offset, s.blocks.front());
    });
    if (shelf != shelves_.begin()) --shelf;
    auto& blocks = shelf->blocks;
    blocks.insert(std::upper_bound(blocks.begin(), blocks.end(), block.begin, behind), block);
    shelf->count_in(block);
    if (blocks.size() <= kFull) return;
    Shelf halves[2];
    for (size_t k = 0; k < blocks.size(); ++k) {
      Shelf& half = halves[k >= kFull / 2];
      half.blocks.push_back(blocks[k]), half.count_in(blocks[k]);
    }
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
