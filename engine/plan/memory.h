// Offsets from lives: offline packing of blocks of memory.
#pragma once

#include <cstdint>
#include <vector>

namespace whale {

inline constexpr int64_t kAlignment = 64;

// A block is alive from step `first` to step `last`, both included.
struct Block {
  int64_t bytes = 0;
  int64_t first = 0, last = 0;
};

struct MemoryPlan {
  std::vector<int64_t> offsets;  // aligned; blocks that are alive together never overlap
  int64_t bytes = 0;             // of the arena
  int64_t peak_live = 0;         // most bytes (rounded up to the alignment) alive at once: no plan can be smaller
};

// The best of a few orders of best fit.
MemoryPlan plan_memory(const std::vector<Block>& blocks);

}  // namespace whale
