// Forms of published planning problems: clusters of mixed devices in Sailor's formula, and stage cuts of op graphs.
#pragma once

#include "validate/validate.h"

namespace whale {

bool is_planners(const std::string& path);  // Sailor's folder
Json validate_planners(const std::string& path, const ValidateOptions& options);

bool is_partition(const std::string& path);  // a graph, or a folder of them
Json validate_partition(const std::string& path, const ValidateOptions& options);

}  // namespace whale
