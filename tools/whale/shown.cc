#include "api.h"

namespace tool {

size_t character_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[at + k]); };
  const unsigned char c = byte(0);
  const size_t n = c < 0x80 ? 1 : c >= 0xC2 && c < 0xE0 ? 2 : c >= 0xE0 && c < 0xF0 ? 3 : c >= 0xF0 && c < 0xF5 ? 4 : 0;
  if (n == 0 || n > text.size() - at) return 0;
  for (size_t k = 1; k < n; ++k)
    if ((byte(k) & 0xC0) != 0x80) return 0;
  const bool overlong = (c == 0xE0 && byte(1) < 0xA0) || (c == 0xF0 && byte(1) < 0x90);
  const bool beyond = (c == 0xED && byte(1) >= 0xA0) || (c == 0xF4 && byte(1) >= 0x90);  // surrogates; past U+10FFFF
  return overlong || beyond ? 0 : n;
}

std::string shown(std::string_view text, size_t most) {
  const auto length = [&](size_t at) -> size_t {
    const auto c = static_cast<unsigned char>(text[at]);
    return c == 0x7F || (c < 0x20 && c != '\n' && c != '\t') ? 0 : character_at(text, at);
  };
  std::string clean;
  for (size_t at = 0; at < text.size();) {
    const size_t n = length(at);
    clean += n > 0 ? text.substr(at, n) : std::string_view("?");
    at += n > 0 ? n : 1;
  }
  if (clean.size() <= most) return clean;
  const auto inside = [&](size_t at) { return (static_cast<unsigned char>(clean[at]) & 0xC0) == 0x80; };
  size_t head = most * 2 / 3, tail = clean.size() - most / 3;
  while (head > 0 && inside(head)) --head;
  while (tail < clean.size() && inside(tail)) ++tail;
  return clean.substr(0, head) + "... (" + std::to_string(text.size()) + " bytes) ..." + clean.substr(tail);
}

}  // namespace tool
