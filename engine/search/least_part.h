// A bound: how fast the part that holds a certain group can be at best.
#pragma once

#include "search/partition_groups.h"

namespace whale {

// Milliseconds of the fastest set of groups that holds `group`, on a device: what it computes, and what passes its
// border. Sets need not be contiguous, so that no part is faster. A smallest cut.
double least_part_ms(const PartitionGroups& groups, int group);

}  // namespace whale
