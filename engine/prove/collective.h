// The rules of what moves between devices.
#pragma once

#include <vector>

#include "prove/join.h"
#include "prove/reference.h"
#include "prove/tree.h"

namespace whale::proof {

// One operand of a collective, of each member in the order of the group.
struct Exchange {
  const work::Collective* work = nullptr;
  size_t operand = 0;  // which of the bucket
  std::vector<Held> in;
  std::vector<Dims> in_dims, out_dims;
};
// What each member has then.
std::vector<Held> exchanged(Reference& reference, Tree& tree, const Exchange& e);

}  // namespace whale::proof
