// What stands between alike things whose numbers grow by equal steps: from the first two of them, checked at the last.
#pragma once

#include <optional>
#include <vector>

#include "prove/memory.h"

namespace whale::proof {

// No equal steps: what was left out has to be walked.
struct Uneven {};

// `steps` behind `first`, where `second` is one; throws Uneven.
Value behind(const Value& first, const Value& second, int64_t steps);

// The one `steps` behind the first of a line whose last one is `span` behind it; throws Uneven.
Held between(const Held& first, const Held& second, const Held& last, int64_t steps, int64_t span);
Place between(const Place& first, const Place& second, const Place& last, int64_t steps, int64_t span);
std::vector<Memory::Part> between(const std::vector<Memory::Part>& first, const std::vector<Memory::Part>& second,
                                  const std::vector<Memory::Part>& last, int64_t steps, int64_t span);

// The same elements and terms of one tensor, whoever made it.
bool alike(const Value& a, const Value& b);

}  // namespace whale::proof
