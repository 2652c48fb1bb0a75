// JSON that is read: what people and other programs wrote.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace whale {

// Throws invalid with the line and column at which it stops being JSON, or with the place (a JSON pointer, RFC 6901) of
// a name that an object has twice, and of lists and objects that are deeper in each other than `kMostJsonLevels`.
inline constexpr size_t kMostJsonLevels = 64;
Json parse_json(std::string_view content);

// A part of a JSON pointer, with its /.
std::string pointer_part(std::string_view name);
std::string pointer_part(size_t index);

}  // namespace whale
