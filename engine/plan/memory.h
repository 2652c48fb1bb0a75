// Offsets from lives: offline packing of blocks of memory.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

namespace whale {

inline constexpr int64_t kAlignment = 64;

// A block is alive from step `first` to step `last`, both included.
struct Block {
  int64_t bytes = 0;
  int64_t first = 0, last = 0;
  friend bool operator==(const Block&, const Block&) = default;
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  // aligned; blocks that are alive together never overlap
  int64_t bytes = 0;             // of the arena
  int64_t peak_live = 0;         // most bytes (rounded up to the alignment) alive at once: no plan can be smaller
};

// The best of a few orders of best fit.
MemoryPlan plan_memory(const std::vector<Block>& blocks);

// Remembers what it planned: programs of devices that differ in their place alone have the same blocks.
class MemoryPlanner {
 public:
  const MemoryPlan& plan(std::vector<Block> blocks);

 private:
  std::deque<std::pair<std::vector<Block>, MemoryPlan>> known_;  // the latest first
};

}  // namespace whale
