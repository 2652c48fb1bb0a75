#include "lower/accumulation.h"

#include "base/watch.h"

namespace whale {

std::vector<SegmentRun> accumulation_schedule(int64_t micro_batches) {
  if (micro_batches <= 1) return {{Region::kBody, 0}};
  std::vector<SegmentRun> rows{{Region::kPrologue, 0}};
  for (const int64_t u : watched(int64_t{0}, micro_batches)) rows.push_back({Region::kBody, u});
  rows.push_back({Region::kEpilogue, 0});
  return rows;
}

}  // namespace whale
