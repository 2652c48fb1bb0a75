// Whether a plan has races, by looking at every pair of instructions of a segment: slow, and written without a look at
// the plan verifier, whose finding it judges. Waits that are missing rarely show in numbers.
#pragma once

#include <algorithm>
#include <string>

#include "plan/plan.h"

namespace whale::test {

std::string race_in(const Entry& entry);  // "" or one of them

// Of a buffer, in the row that works on that version.
struct Bytes {
  int64_t space = 0;  // the arena, the host's, or a variable
  int64_t begin = 0, end = 0;
  bool meets(const Bytes& o) const { return space == o.space && std::max(begin, o.begin) < std::min(end, o.end); }
};
Bytes bytes_of(const Program& p, BufferId id, int64_t version);

}  // namespace whale::test
