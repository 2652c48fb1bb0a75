// Steps of a GPT-2 on T4s and on V100s beside T4s (the trials of AMP).
#pragma once

#include "validate/validate.h"

namespace whale {

bool is_amp(const std::string& path);
Json validate_amp(const std::string& path, const ValidateOptions& options);
Json work_of_amp(const std::string& path, const ValidateOptions& options);  // for tools/fit/steps.py

}  // namespace whale
