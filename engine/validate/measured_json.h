// JSON files that others wrote: read with errors that name the file and the key.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"

namespace whale {

Json read_json(const std::string& path);  // throws invalid for what is no JSON
// A member; throws where there is none.
const Json& json_at(const Json& json, const std::string& key, const std::string& path);
double json_number(const Json& json, const std::string& key, const std::string& path);  // a finite number from 0
bool json_truth(const Json& json, const std::string& key, const std::string& path);     // true, false, 0 or 1
std::vector<double> json_numbers(const Json& json, const std::string& path);            // a list of finite numbers

bool is_folder(const std::string& path);
std::vector<std::string> files_in(const std::string& folder, const std::string& ending);  // also in its folders, sorted

}  // namespace whale
