// Clusters in a few words: "8xV100-32GB + 8xP100-16GB", "60 nodes of 8xA100-80GB, 800Gb/s".
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace whale {

// As a device list; `packed`: without spaces. Groups joined by +, each "NxTYPE", N devices of a node, or "M nodes of
// NxTYPE", then what links_text.h says of its links behind a comma. Nothing: it is not of this form.
std::optional<std::string> list_of_preset(std::string_view packed);

}  // namespace whale
