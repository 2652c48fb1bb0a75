#include "base/text.h"

#include <charconv>

#include "base/format.h"

namespace whale {

namespace {

// Of texts that C strings and terminals take: \x00 for a character that would end or rule them. Lines and tabs stay.
std::string shown(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if ((code < 0x20 && c != '\n' && c != '\t') || code == 0x7f)
      out += fmt::format("\\x{:02x}", code);
    else
      out += c;
  }
  return out;
}

}  // namespace

std::string brief(std::string_view text, size_t most) {
  if (text.size() <= most) return shown(text);
  const auto inside = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; };
  size_t head = most * 2 / 3, tail = text.size() - most / 3;
  while (head > 0 && inside(head)) --head;
  while (tail < text.size() && inside(tail)) ++tail;
  return fmt::format("{}... ({} bytes) ...{}", shown(text.substr(0, head)), text.size(), shown(text.substr(tail)));
}

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string starred(std::string_view name) {
  std::string out;
  for (const char c : name) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit || out.empty() || out.back() != '*') out += digit ? '*' : c;
  }
  return out;
}

}  // namespace whale
