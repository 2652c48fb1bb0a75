#include "plan/accumulation.h"

namespace whale {

std::vector<SegmentRun> accumulation_schedule(int64_t micro_batches) {
  if (micro_batches <= 1) return {{Region::kBody, 0}};
  std::vector<SegmentRun> rows{{Region::kPrologue, 0}};
  for (int64_t u = 0; u < micro_batches; ++u) rows.push_back({Region::kBody, u});
  rows.push_back({Region::kEpilogue, 0});
  return rows;
}

}  // namespace whale
