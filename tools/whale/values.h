// A tensor's values as numbers.
#pragma once

#include <cstdint>
#include <vector>

namespace tool {

struct Values {
  std::vector<int64_t> dims;
  std::vector<double> data;
};

}  // namespace tool
