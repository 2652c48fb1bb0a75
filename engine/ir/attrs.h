// The attributes of an op: named values.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/small_vector.h"

namespace whale {

using Attr = std::variant<int64_t, double, bool, std::string, Ints, std::vector<double>>;

// A map from names, sorted by them, so that printing is stable. An op has few attributes, and a graph hundreds of
// thousands of ops: they lie in one piece of memory. Adding and erasing moves the others.
class Attrs {
 public:
  using value_type = std::pair<std::string, Attr>;  // names are not to be changed
  using iterator = std::vector<value_type>::iterator;
  using const_iterator = std::vector<value_type>::const_iterator;

  Attrs() = default;
  Attrs(std::initializer_list<value_type> list);  // of one name, the first

  iterator begin() { return all_.begin(); }
  iterator end() { return all_.end(); }
  const_iterator begin() const { return all_.begin(); }
  const_iterator end() const { return all_.end(); }
  size_t size() const { return all_.size(); }
  bool empty() const { return all_.empty(); }
  void reserve(size_t n) { all_.reserve(n); }

  iterator find(std::string_view name);
  const_iterator find(std::string_view name) const;
  bool contains(std::string_view name) const { return find(name) != end(); }
  const Attr& at(std::string_view name) const;  // throws std::out_of_range
  Attr& at(std::string_view name);
  Attr& operator[](std::string_view name);  // made where it is not there

  // What is there already stays; second: it was not.
  std::pair<iterator, bool> try_emplace(std::string_view name, Attr value);
  iterator erase(const_iterator at) { return all_.erase(at); }
  size_t erase(std::string_view name);  // how many: 0 or 1

  friend bool operator==(const Attrs&, const Attrs&) = default;

 private:
  iterator place_of(std::string_view name);

  std::vector<value_type> all_;
};

int64_t attr_int(const Attrs& attrs, std::string_view name, int64_t otherwise = 0);
double attr_float(const Attrs& attrs, std::string_view name, double otherwise = 0);
bool attr_bool(const Attrs& attrs, std::string_view name, bool otherwise = false);
const std::string& attr_string(const Attrs& attrs, std::string_view name);  // "" when absent
const Ints& attr_ints(const Attrs& attrs, std::string_view name);           // empty when absent
std::string to_string(const Attr& attr);

}  // namespace whale
