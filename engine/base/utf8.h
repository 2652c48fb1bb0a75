// Text that comes from outside: is it UTF-8, and is it fit to be a name?
#pragma once

#include <cstdint>
#include <string_view>

namespace whale {

// Well-formed UTF-8: no overlong forms, surrogates or code points above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto c = static_cast<unsigned char>(text[i]);
    const int more = c < 0x80                ? 0
                     : c >= 0xC2 && c < 0xE0 ? 1
                     : c >= 0xE0 && c < 0xF0 ? 2
                     : c >= 0xF0 && c < 0xF5 ? 3
                                             : -1;
    if (more < 0 || i + static_cast<size_t>(more) >= text.size()) return false;
    for (int k = 1; k <= more; ++k) {
      const auto d = static_cast<unsigned char>(text[i + static_cast<size_t>(k)]);
      unsigned low = 0x80, high = 0xBF;
      if (k == 1 && c == 0xE0) low = 0xA0;
      if (k == 1 && c == 0xED) high = 0x9F;
      if (k == 1 && c == 0xF0) low = 0x90;
      if (k == 1 && c == 0xF4) high = 0x8F;
      if (d < low || d > high) return false;
    }
    i += static_cast<size_t>(more) + 1;
  }
  return true;
}

// Names are printed, used in messages and in files: UTF-8 without control characters.
inline bool is_name(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return false;
  }
  return is_utf8(text);
}

}  // namespace whale
