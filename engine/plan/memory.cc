#include "plan/memory.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

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

// Places blocks in the given order, each into the smallest gap between those that live at the same time.
MemoryPlan place(const std::vector<Block>& blocks, const std::vector<size_t>& order) {
  MemoryPlan plan{.offsets = std::vector<int64_t>(blocks.size()), .bytes = 0, .peak_live = 0};
  std::vector<size_t> placed;  // by offset
  for (const size_t i : order) {
    Watch::look();
    const Block& b = blocks[i];
    const int64_t need = aligned(b.bytes);
    int64_t end = 0, best = -1, best_gap = 0;
    for (const size_t j : placed) {
      if (blocks[j].last < b.first || b.last < blocks[j].first) continue;
      const int64_t gap = plan.offsets[j] - end;
      if (gap >= need && (best < 0 || gap < best_gap)) best = end, best_gap = gap;
      end = std::max(end, plan.offsets[j] + aligned(blocks[j].bytes));
    }
    plan.offsets[i] = best >= 0 ? best : end;
    plan.bytes = std::max(plan.bytes, plan.offsets[i] + need);
    const auto at = std::upper_bound(placed.begin(), placed.end(), plan.offsets[i],
                                     [&](int64_t offset, size_t j) { return offset < plan.offsets[j]; });
    placed.insert(at, i);
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
  MemoryPlan best;
  for (const auto& before : orders) {
    std::vector<size_t> order = all;
    std::stable_sort(order.begin(), order.end(), before);
    MemoryPlan plan = place(blocks, order);
    if (best.offsets.empty() || plan.bytes < best.bytes) best = std::move(plan);
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
