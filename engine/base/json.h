// JSON that is written: members stay in their order.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/format.h"

namespace whale {

using Json = nlohmann::ordered_json;

// A value; JSON has no infinity and no NaN, which are "inf" and "nan".
template <class T>
Json json_value(const T& x) {
  return x;
}
inline Json json_value(double x) { return std::isfinite(x) ? Json(x) : Json(fmt::format("{}", x)); }
inline Json json_value(const std::vector<double>& list) {
  Json out = Json::array();
  for (const double x : list) out.push_back(json_value(x));
  return out;
}

// On one line. Bytes that are no UTF-8 become replacement characters.
inline std::string text_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace whale
