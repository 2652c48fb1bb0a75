// The part of a logical tensor that one device holds (semantics.md section 4): per dimension, the intervals of it in
// ascending order. Locally they lie one after the other.
#pragma once

#include <functional>
#include <vector>

#include "ir/layout.h"
#include "task/shares.h"
#include "plan/plan.h"

namespace whale {

// One digit of a tensor cut down to an interval of it.
struct DigitCut {
  Digit digit;
  int64_t extent = 0;  // of the digit, whole
  Interval at;
  friend bool operator==(const DigitCut&, const DigitCut&) = default;
};

struct Part {
  std::vector<std::vector<Interval>> dims;
  Dims extents() const;  // local
  bool empty() const;
  friend bool operator==(const Part&, const Part&) = default;
};

Part part_of(const Dims& dims, const std::vector<DigitCut>& cuts);
// The cuts of the device at these coordinates, one a digit.
std::vector<DigitCut> cuts_of(const Dims& dims, const Layout& layout, const std::vector<MeshAxis>& axes,
                              const Ints& coordinates);
// What the device at these coordinates holds; partial values count as whole. The axes are those of the layout's mesh.
Part part_of(const Dims& dims, const Layout& layout, const std::vector<MeshAxis>& axes, const Ints& coordinates);

// A dimension after a cut of it.
void cut_down(Dims& dims, const DigitCut& cut);
// Local dimensions after the cuts, which are of different digits: arithmetic only.
Dims local_dims(const Dims& dims, const std::vector<DigitCut>& cuts);

// Every maximal run of elements that is contiguous both in the logical tensor and in the part: offsets and length in
// elements, in the order of the part.
void for_each_run(const Dims& dims, const Part& part,
                  const std::function<void(int64_t logical, int64_t local, int64_t elements)>& run);

}  // namespace whale
