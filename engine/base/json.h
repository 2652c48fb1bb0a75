// JSON that is written: members stay in their order.
#pragma once

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "base/format.h"

namespace whale {

using Json = nlohmann::ordered_json;

// A number; JSON has no infinity and no NaN, which are "inf" and "nan".
inline Json json_number(double x) { return std::isfinite(x) ? Json(x) : Json(fmt::format("{}", x)); }

// On one line. Bytes that are no UTF-8 become replacement characters.
inline std::string text_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace whale
