// Writing JSON: commas, quotes and escapes, nothing else.
#pragma once

#include <cmath>
#include <string>
#include <string_view>

#include "base/format.h"

namespace whale::capi {

class Json {
 public:
  Json& open(char bracket) { return start(), out_ += bracket, first_ = true, *this; }  // '{' or '['
  Json& close(char bracket) { return out_ += bracket, first_ = false, *this; }         // '}' or ']'
  Json& key(std::string_view name) {
    quote(name);
    out_ += ':';
    after_key_ = true;
    return *this;
  }
  Json& value(std::string_view s) { return quote(s), *this; }
  Json& value(const char* s) { return value(std::string_view(s)); }
  Json& value(const std::string& s) { return value(std::string_view(s)); }
  Json& value(bool b) { return raw(b ? "true" : "false"); }
  Json& value(int64_t i) { return raw(fmt::format("{}", i)); }
  Json& value(int32_t i) { return value(int64_t{i}); }
  Json& value(double d) {
    return std::isfinite(d) ? raw(fmt::format("{}", d)) : value(fmt::format("{}", d));
  }  // "inf", "nan"
  template <class T>
  Json& value(const std::vector<T>& list) {
    open('[');
    for (const T& x : list) value(x);
    return close(']');
  }
  template <class T>
  Json& field(std::string_view name, const T& x) {
    return key(name).value(x);
  }
  const std::string& text() const { return out_; }

 private:
  void start() {
    if (!first_ && !after_key_) out_ += ',';
    first_ = after_key_ = false;
  }
  Json& raw(std::string_view s) { return start(), out_ += s, *this; }
  void quote(std::string_view s) {
    start();
    out_ += '"';
    for (const char c : s) {
      if (c == '"' || c == '\\') {
        out_ += '\\', out_ += c;
      } else if (c == '\n') {
        out_ += "\\n";
      } else if (static_cast<unsigned char>(c) < 0x20) {
        out_ += fmt::format("\\u{:04x}", static_cast<int>(c));
      } else {
        out_ += c;
      }
    }
    out_ += '"';
  }

  std::string out_;
  bool first_ = true, after_key_ = false;
};

}  // namespace whale::capi
