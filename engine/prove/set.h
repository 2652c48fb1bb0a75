// Positions along one dimension: ascending intervals that neither touch nor overlap.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "base/small_vector.h"
#include "ir/sharding.h"

namespace whale::proof {

class Set {
 public:
  Set() = default;
  explicit Set(Interval all) {
    if (all.size() > 0) runs_.push_back(all);
  }
  static Set first(int64_t n) { return Set(Interval{0, n}); }

  // Behind all that is there.
  void append(Interval run);
  int64_t size() const;
  bool empty() const { return runs_.empty(); }
  bool is_first(int64_t n) const { return n == 0 ? empty() : runs_.size() == 1 && runs_[0] == Interval{0, n}; }
  bool meets(const Set& other) const;
  Set united(const Set& other) const;
  const SmallVector<Interval, 2>& runs() const { return runs_; }

  // Those of its elements that stand at these places among them; none: some place lies behind the last.
  std::optional<Set> at(const Set& places) const;
  // (a, b) as a * extent + b, for b in [0, extent). None: more runs than anybody follows.
  std::optional<Set> times(const Set& inner, int64_t extent) const;
  // The opposite: none where it is no product.
  std::optional<std::pair<Set, Set>> over(int64_t extent) const;

  friend bool operator==(const Set&, const Set&) = default;

 private:
  SmallVector<Interval, 2> runs_;
};

std::string to_string(const Set& set);  // "[0:4, 8:12]"

// Of a dimension that is outer x extent x inner, where the middle one lies in `part`.
std::optional<Set> places_of(int64_t outer, int64_t extent, int64_t inner, const Set& part);

}  // namespace whale::proof
