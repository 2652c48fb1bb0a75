// The gradient of a table as rows: what looked it up and the gradients of what was looked up, from the last use to the
// first.
#pragma once

#include "grad/updates.h"

namespace whale {

struct RowGradient {
  TensorId ids = kNone;  // [...], or bags [..., bag] when of dy's rank
  TensorId dy = kNone;   // [..., d]; kNone: not a table
  bool mean = false;     // dy is to be divided by the size of the bag
};

// For a parameter that is only looked up. Throws when it has a dense use besides, naming that op. Emits what joins
// several uses.
RowGradient row_gradient(UpdateBuilder& b, TensorId parameter, TensorId grad);

}  // namespace whale
