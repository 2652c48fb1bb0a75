// What a sum lacks, in the user's words.
#pragma once

#include <string>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/value.h"

namespace whale::proof {

// Of a value without all of its terms, at `device`: "without samples 4 to 5, which device 2 has in micro-batch 0". Of
// several devices that have them the one that is nearest in the mesh. "": it is whole, or samples do not tell.
std::string lacking(const Entry& entry, Reference& reference, int32_t device, const Value& value);

}  // namespace whale::proof
