#include "ir/attrs.h"

#include <algorithm>
#include <stdexcept>

#include "base/error.h"

namespace whale {
namespace {

template <class T>
const T* find(const Attrs& attrs, std::string_view name, const char* wanted) {
  const auto it = attrs.find(name);
  if (it == attrs.end()) return nullptr;
  const T* value = std::get_if<T>(&it->second);
  if (value == nullptr) throw invalid("attribute '{}' is {}, expected {}", name, to_string(it->second), wanted);
  return value;
}

std::string text_of(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";  // "en": exponents, inf and nan
  return text;
}

}  // namespace

Attrs::Attrs(std::initializer_list<value_type> list) {
  all_.reserve(list.size());
  for (const value_type& a : list) try_emplace(a.first, a.second);
}

// Most are added in their order.
Attrs::iterator Attrs::place_of(std::string_view name) {
  if (all_.empty() || all_.back().first < name) return all_.end();
  return std::lower_bound(all_.begin(), all_.end(), name,
                          [](const value_type& a, std::string_view other) { return a.first < other; });
}

// Of few names, looking whether each is this one is as fast as halving.

Attrs::iterator Attrs::find(std::string_view name) {
  return std::find_if(all_.begin(), all_.end(), [&](const value_type& a) { return a.first == name; });
}

Attrs::const_iterator Attrs::find(std::string_view name) const {
  return std::find_if(all_.begin(), all_.end(), [&](const value_type& a) { return a.first == name; });
}

const Attr& Attrs::at(std::string_view name) const {
  const auto it = find(name);
  if (it == end()) throw std::out_of_range(fmt::format("no attribute '{}'", name));
  return it->second;
}

Attr& Attrs::at(std::string_view name) { return const_cast<Attr&>(std::as_const(*this).at(name)); }

Attr& Attrs::operator[](std::string_view name) { return try_emplace(name, {}).first->second; }

std::pair<Attrs::iterator, bool> Attrs::try_emplace(std::string_view name, Attr value) {
  const auto at = place_of(name);
  if (at != all_.end() && at->first == name) return {at, false};
  return {all_.emplace(at, std::string(name), std::move(value)), true};
}

size_t Attrs::erase(std::string_view name) {
  const auto it = find(name);
  if (it == end()) return 0;
  all_.erase(it);
  return 1;
}

int64_t attr_int(const Attrs& attrs, std::string_view name, int64_t otherwise) {
  const int64_t* value = find<int64_t>(attrs, name, "an integer");
  return value ? *value : otherwise;
}

double attr_float(const Attrs& attrs, std::string_view name, double otherwise) {
  const double* value = find<double>(attrs, name, "a floating point number");
  return value ? *value : otherwise;
}

bool attr_bool(const Attrs& attrs, std::string_view name, bool otherwise) {
  const bool* value = find<bool>(attrs, name, "true or false");
  return value ? *value : otherwise;
}

const std::string& attr_string(const Attrs& attrs, std::string_view name) {
  static const std::string kEmpty;
  const std::string* value = find<std::string>(attrs, name, "a string");
  return value ? *value : kEmpty;
}

const Ints& attr_ints(const Attrs& attrs, std::string_view name) {
  static const Ints kEmpty;
  const Ints* value = find<Ints>(attrs, name, "a list of integers");
  return value ? *value : kEmpty;
}

std::string to_string(const Attr& attr) {
  struct Text {
    std::string operator()(int64_t v) const { return fmt::format("{}", v); }
    std::string operator()(double v) const { return text_of(v); }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(const std::string& v) const { return fmt::format("\"{}\"", v); }
    std::string operator()(const Ints& v) const { return fmt::format("[{}]", fmt::join(v, ", ")); }
    std::string operator()(const std::vector<double>& v) const {
      std::vector<std::string> parts(v.size());
      std::transform(v.begin(), v.end(), parts.begin(), text_of);
      return fmt::format("[{}]", fmt::join(parts, ", "));
    }
  };
  return std::visit(Text{}, attr);
}

}  // namespace whale
