#include "validate/measured_json.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "validate/csv.h"

namespace whale {

Json read_json(const std::string& path) {
  const std::string text = read_measured(path);
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) throw invalid("{} is no JSON", path);
  return json;
}

const Json& json_at(const Json& json, const std::string& key, const std::string& path) {
  if (!json.is_object()) throw invalid("{}: expected an object with '{}'", path, key);
  const auto at = json.find(key);
  if (at == json.end()) throw invalid("{} has no '{}' where one is expected", path, key);
  return *at;
}

double json_number(const Json& json, const std::string& key, const std::string& path) {
  const Json& value = json_at(json, key, path);
  if (!value.is_number() || !std::isfinite(value.get<double>()) || value.get<double>() < 0)
    throw invalid("{}: '{}' is {}, expected a number from 0", path, key, text_of(value));
  return value.get<double>();
}

bool json_truth(const Json& json, const std::string& key, const std::string& path) {
  const Json& value = json_at(json, key, path);
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number() && (value.get<double>() == 0 || value.get<double>() == 1)) return value.get<double>() == 1;
  throw invalid("{}: '{}' is {}, expected true or false", path, key, text_of(value));
}

std::vector<double> json_numbers(const Json& json, const std::string& path) {
  if (!json.is_array()) throw invalid("{}: expected a list of numbers, found {}", path, text_of(json));
  std::vector<double> out;
  for (const Json& value : json) {
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      throw invalid("{}: expected a number in a list, found {}", path, text_of(value));
    out.push_back(value.get<double>());
  }
  return out;
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_directory(path, ignored);
}

std::vector<std::string> files_in(const std::string& folder, const std::string& ending) {
  std::vector<std::string> out;
  std::error_code failed;
  for (auto at = std::filesystem::recursive_directory_iterator(folder, failed);
       !failed && at != std::filesystem::recursive_directory_iterator(); at.increment(failed))
    if (std::error_code ignored; at->is_regular_file(ignored) && at->path().string().ends_with(ending))
      out.push_back(at->path().string());
  if (failed) throw invalid("{} cannot be read: {}", folder, failed.message());
  std::ranges::sort(out);
  return out;
}

}  // namespace whale
