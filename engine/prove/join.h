// Parts of one tensor put together.
#pragma once

#include <vector>

#include "prove/reference.h"
#include "prove/value.h"

namespace whale::proof {

// A value and where it lies in what is made of it: an interval for each local dimension.
struct Piece {
  Held value;
  std::vector<Interval> at;
};

// The value of these local dims that the pieces make; stops where they are none of one tensor, or lie elsewhere in it.
Held joined(const Reference& ref, const std::vector<Piece>& pieces, const Dims& local);
// The part of a region that lies, locally, in these intervals.
std::optional<Region> box_of(const Region& region, const Dims& local, const std::vector<Interval>& at);

}  // namespace whale::proof
