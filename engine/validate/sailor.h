// Training steps of GPTs on GH200s and on mixed RTX nodes (Sailor), by its times of layers.
#pragma once

#include "validate/validate.h"

namespace whale {

bool is_sailor(const std::string& path);
// Reads layer_times.csv from options.profiles, or from the file's folder.
Json validate_sailor(const std::string& path, const ValidateOptions& options);

}  // namespace whale
