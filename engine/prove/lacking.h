// Which samples a sum has and lacks, in the user's words.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/value.h"

namespace whale::proof {

// Of a value without all of its terms, at `device`: "without samples 4 to 5, which device 2 has in micro-batch 0". Of
// several devices that have them the one that is nearest in the mesh.
struct Lacking {
  std::string what;        // empty: it is whole, or samples do not tell
  int32_t device = kNone;  // that has them
};
Lacking lacking(const Entry& entry, Reference& reference, int32_t device, const Value& value);

// Of how many samples a value has terms; none: it does not say.
std::optional<int64_t> samples_in(const Entry& entry, Reference& reference, const Value& value);

// How a sum at `device` came to be: of the sums that each was made of, the one nearest to the device `of`, back to what
// that device gave.
std::vector<Held> traced(const Entry& entry, const Held& sum, int32_t of);

}  // namespace whale::proof
