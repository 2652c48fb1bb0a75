// What may be done again, so that its result need not lie there from the forward to the backward pass.
#pragma once

#include <algorithm>

#include "cost/cost.h"

namespace whale {

// The time that freeing these bytes is worth where a user asks for recompute: what they are worth anyway, or as long as
// so many passes over them take. Where devices compute much while they move a byte, memory alone would never be worth
// it.
inline double spared_seconds(const CostModel& cost, double bytes, double passes) {
  return std::max(cost.held_seconds(bytes), pass_seconds(passes * bytes, cost.device));
}
inline constexpr double kRemadePasses = 5;     // as memory is worth on a machine of cores: held_seconds() there
inline constexpr double kGatheredPasses = 15;  // goes beside the products of the block

}  // namespace whale
