// Cutting a model into the stages of a pipeline where no `stage` is written.
#pragma once

#include <vector>

#include "cost/cost.h"
#include "ir/graph.h"

namespace whale {

// For every op of `ops` (in order) the number of its stage, 0 .. stages - 1, never decreasing along the data: runs of
// ops so that the slowest stage has as little to compute as possible, cut where least is alive (dynamic programming
// over the places where few bytes cross). `keep_groups`: never between a value and the elementwise op that alone reads
// it, which may be fused. Throws when there are too few ops; `virtual_stages`: stages of a device, for that message.
// `rates`: of the slowest device of each stage; empty: all are as the cost model has them.
std::vector<int32_t> cut_stages(const Graph& graph, const std::vector<OpId>& ops, int64_t stages,
                                int64_t virtual_stages, const CostModel& cost, bool keep_groups = false,
                                const std::vector<DeviceRates>& rates = {});

}  // namespace whale
