// Calls of every op that has a kernel: small operands, in float64 where they are floating point.
#pragma once

#include <vector>

#include "op_call.h"

namespace whale::test {

// Those of a table, of the gradients of its ops, of the smaller forms of both, and of training steps of random
// programs; no two of the same types and attributes.
const std::vector<OpCall>& op_calls();

}  // namespace whale::test
