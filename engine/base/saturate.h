// Numbers to integers, as the op `cast` does it on every device.
#pragma once

#include <limits>

namespace whale {

// Towards zero; what does not fit becomes the end of the range that is nearest, NaN the lowest number.
template <class Int, class Float>
Int saturated(Float x) {
  constexpr Float least = static_cast<Float>(std::numeric_limits<Int>::min());  // a power of two or 0: exact
  constexpr Float past = 2 * static_cast<Float>(std::numeric_limits<Int>::max() / 2 + 1);
  if (!(x > least)) return std::numeric_limits<Int>::min();
  return x < past ? static_cast<Int>(x) : std::numeric_limits<Int>::max();
}

}  // namespace whale
