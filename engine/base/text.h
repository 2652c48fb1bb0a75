// Text that people wrote: how messages show it, and how numbers are read from it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace whale {

// As messages show it: whole up to `most` bytes; what is longer loses its middle, between characters, and says how long
// it is: "cpu:1,cpu:1,... (100000 bytes) ...,cpu:1".
std::string brief(std::string_view text, size_t most = 160);

// The whole text is one whole number that fits; nothing else (no sign "+", no spaces, no "1e3").
std::optional<int64_t> whole_number(std::string_view text);

// Names that differ in numbers alone give one text: "block12.mlp" and "block3.mlp" are "block*.mlp".
std::string starred(std::string_view name);

}  // namespace whale
