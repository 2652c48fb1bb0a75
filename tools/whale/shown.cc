#include "api.h"

namespace tool {

std::string shown(std::string_view text, size_t most) {
  // Bytes of one character; 0: none begins here.
  const auto length = [&](size_t at) -> size_t {
    const auto c = static_cast<unsigned char>(text[at]);
    const size_t n = c < 0x80                ? 1
                     : c >= 0xC2 && c < 0xE0 ? 2
                     : c >= 0xE0 && c < 0xF0 ? 3
                     : c >= 0xF0 && c < 0xF5 ? 4
                                             : 0;
    if (n == 0 || at + n > text.size() || c == 0x7F || (c < 0x20 && c != '\n' && c != '\t')) return 0;
    for (size_t k = 1; k < n; ++k)
      if ((static_cast<unsigned char>(text[at + k]) & 0xC0) != 0x80) return 0;
    return n;
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
