// Iterations of GPTs under Megatron-DeepSpeed on A100 (vTrain's validation set).
#pragma once

#include "validate/validate.h"

namespace whale {

bool is_megatron(const std::string& path);
Json validate_megatron(const std::string& path, const ValidateOptions& options);
// The work of each row instead of its time: what tools/fit/steps.py fits.
Json work_of_megatron(const std::string& path, const ValidateOptions& options);

}  // namespace whale
