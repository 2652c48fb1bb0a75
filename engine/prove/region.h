// Which elements of a logical tensor a range of memory holds. Both are row-major and what a device holds stands in the
// order of the whole: so this is a set of positions in the flat tensor, written as a product of digits, outermost
// first. A reshape changes nothing of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ir/shape.h"
#include "prove/set.h"

namespace whale::proof {

struct Digit {
  int64_t extent = 1;
  Set set;
  // The tensor is the same all along this digit: set.size() of its positions, whichever.
  bool any = false;
  bool whole() const { return set.is_first(extent); }
  bool open() const { return any && !whole(); }  // which of its positions is not said
  friend bool operator==(const Digit&, const Digit&) = default;
};

class Region {
 public:
  Region() = default;
  explicit Region(std::vector<Digit> digits) : digits_(std::move(digits)) {}
  static Region whole(const Dims& dims);

  const std::vector<Digit>& digits() const { return digits_; }
  int64_t size() const;  // elements
  bool is_whole() const;
  bool open() const;  // which elements is not said

  // One digit for each dimension; none: it is no box of a tensor of these dimensions.
  std::optional<Region> in(const Dims& dims) const;
  // Where any positions are held all along some dimensions, as many along each of them as are there locally.
  Region spread(const Dims& dims, const Dims& local) const;
  // The part of it that lies, locally, in `part` of the middle of outer x extent x inner.
  std::optional<Region> cut(int64_t outer, int64_t extent, int64_t inner, Interval part) const;
  std::optional<Region> cut(const Dims& local, const SubAxis& sub_axis, Interval part) const;
  // The elements [begin, begin + n), locally.
  std::optional<Region> run(int64_t begin, int64_t n) const;

 private:
  std::vector<Digit> digits_;
};

// The same elements of one tensor: digits that hold any of their positions fit all of their number.
bool same(const Region& a, const Region& b);
// Of two that are the same, what a sum of both is: the positions that either knows, and the same all along only what
// both are. None: one cannot be written in the other's digits.
std::optional<Region> known(const Region& a, const Region& b);
// Boxes of so many elements that have all of these, the smallest one first; of others, where there are none: what is
// missing, or there twice. Where digits hold any positions, the number of one grows: which of them, the place of each
// part says. Empty: they have unlike digits.
std::vector<Region> hulls(const std::vector<Region>& parts, int64_t elements);

std::string to_string(const Region& region);  // "[0:4, 0:32]"

}  // namespace whale::proof
