// Offsets from lives.
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include "plan/memory.h"

using namespace whale;

TEST_CASE("blocks that never meet share bytes") {
  const MemoryPlan plan = plan_memory({{100, 0, 1}, {100, 2, 3}, {50, 1, 2}});
  CHECK(plan.offsets[0] == plan.offsets[1]);
  CHECK(plan.bytes == 192);
  CHECK(plan.peak_live == 192);
  CHECK(plan_memory({}).bytes == 0);
}

TEST_CASE("a chain of large and small blocks reaches the bound") {
  std::vector<Block> blocks;
  for (int i = 0; i < 40; ++i) blocks.push_back({i % 2 ? 4096 : 64, i, i + 1});
  const MemoryPlan plan = plan_memory(blocks);
  CHECK(plan.bytes == plan.peak_live);
}

TEST_CASE("live blocks never overlap") {
  CHECK(rc::check("pairs alive together are apart, aligned, inside", [] {
    const auto n = *rc::gen::inRange<size_t>(0, 60);
    std::vector<Block> blocks;
    for (size_t i = 0; i < n; ++i) {
      const auto first = *rc::gen::inRange<int64_t>(0, 40);
      blocks.push_back({*rc::gen::inRange<int64_t>(0, 3000), first, first + *rc::gen::inRange<int64_t>(0, 12)});
    }
    const MemoryPlan plan = plan_memory(blocks);
    RC_ASSERT(plan.bytes >= plan.peak_live);
    for (size_t a = 0; a < n; ++a) {
      RC_ASSERT(plan.offsets[a] % kAlignment == 0);
      RC_ASSERT(plan.offsets[a] >= 0);
      RC_ASSERT(plan.offsets[a] + blocks[a].bytes <= plan.bytes);
      for (size_t b = a + 1; b < n; ++b) {
        const bool together = blocks[a].first <= blocks[b].last && blocks[b].first <= blocks[a].last;
        const bool apart = plan.offsets[a] + blocks[a].bytes <= plan.offsets[b] ||
                           plan.offsets[b] + blocks[b].bytes <= plan.offsets[a];
        RC_ASSERT(!together || apart || blocks[a].bytes == 0 || blocks[b].bytes == 0);
      }
    }
  }));
}
