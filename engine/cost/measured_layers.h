// Which layers of a profile of layers (MeasuredLayers) the scopes of a model are.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/measured.h"
#include "ir/graph.h"

namespace whale {

struct Blocks {
  std::vector<int32_t> of_scope;  // the block that a scope is of; kNone: none
  int32_t count = 0;
};
// Blocks are named scopes that are in no other and end with a number ("block7"), in their order.
Blocks blocks_of(const std::vector<Scope>& scopes);

// Of each layer, with so many ways of a split and samples of a micro-batch: interpolated over samples as ops are; ways
// that were not measured divide the time of the nearest that were.
std::vector<MeasuredLayer> layers_at(const MeasuredDevice& device, int64_t ways, double samples);

}  // namespace whale
