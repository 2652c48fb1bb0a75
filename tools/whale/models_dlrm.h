// Recommendation: the row is in models.cc.
#pragma once

#include "models.h"

namespace tool {

ModelOptions dlrm_sizes();
Value dlrm(Builder& b, const ModelOptions& o);

}  // namespace tool
