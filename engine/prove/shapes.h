// How much of each op kernels compute at once, on devices that are not walked too: in exact mode it is a part of what
// tells bits apart.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <vector>

#include "prove/symmetry.h"
#include "prove/value.h"

namespace whale::proof {

class Shapes {
 public:
  Shapes(const Symmetry& symmetry, size_t devices);
  // A device that is walked has made this; `order`: of the op and of the shapes of its operands.
  void add(int32_t device, Value made);
  const std::set<uint64_t>& all() const { return all_; }  // each as a number

 private:
  // Devices that stand for others, and those that they stand for.
  struct Line {
    std::vector<int32_t> devices;
    size_t walked = 0;
    std::deque<std::map<int32_t, Held>> waiting;  // until each that is walked has made it
    int64_t complete = 0;
  };
  Held of(int32_t device, const std::map<int32_t, Held>& walked) const;

  const Symmetry& symmetry_;
  std::vector<size_t> line_of_;  // each device
  std::vector<Line> lines_;
  std::vector<int64_t> made_;
  std::set<uint64_t> all_;
};

}  // namespace whale::proof
