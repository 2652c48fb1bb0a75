#include "ir/shape.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace whale {

int64_t element_count(const Dims& dims) {
  int64_t count = 1;
  bool zero = false, negative = false, overflow = false;
  for (const int64_t d : dims) {
    zero |= d == 0, negative |= d < 0;
    overflow |= __builtin_mul_overflow(count, d, &count);
  }
  if (negative) throw invalid("negative extent in shape {}", to_string(dims));
  if (zero) return 0;
  if (overflow) throw invalid("shape {} has more than 2^63 elements", to_string(dims));
  return count;
}

std::string to_string(const Dims& dims) { return fmt::format("[{}]", fmt::join(dims, ", ")); }

Dims row_major_strides(const Dims& dims) {
  Dims strides(dims.size());
  int64_t stride = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= dims[i];
  }
  return strides;
}

Dims broadcast_dims(const Dims& a, const Dims& b) {
  const size_t rank = std::max(a.size(), b.size());
  Dims out(rank);
  for (size_t i = 0; i < rank; ++i) {  // from the last dimension
    const int64_t x = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t y = i < b.size() ? b[b.size() - 1 - i] : 1;
    if (x != y && x != 1 && y != 1)
      throw invalid(
          "shapes {} and {} do not broadcast: from the end, dimension {} is {} against {} (equal, or one of them 1)",
          to_string(a), to_string(b), i, x, y);
    out[rank - 1 - i] = x == 1 ? y : x;
  }
  return out;
}

// A sub-axis of the flat index x is floor(x / low) mod (high / low). It lies inside a dimension of stride s and extent
// d when s | low | high | s d. So the largest sub-axis that a dimension of each side share has low = lcm of the strides
// and high = gcd of the strides times extents.
std::vector<SharedSubAxis> refine_reshape(const Dims& from, const Dims& to) {
  if (element_count(from) != element_count(to))
    throw invalid("cannot reshape {} ({} elements) to {} ({} elements)", to_string(from), element_count(from),
                  to_string(to), element_count(to));
  std::vector<SharedSubAxis> shared;
  if (element_count(from) == 0) return shared;
  const Dims s = row_major_strides(from), t = row_major_strides(to);
  for (size_t i = 0; i < from.size(); ++i) {
    for (size_t j = 0; j < to.size(); ++j) {
      const int64_t low = std::lcm(s[i], t[j]);
      const int64_t high = std::gcd(s[i] * from[i], t[j] * to[j]);
      if (high <= low || high % low != 0) continue;
      shared.push_back({high / low,
                        {static_cast<int>(i), s[i] * from[i] / high, low / s[i]},
                        {static_cast<int>(j), t[j] * to[j] / high, low / t[j]}});
    }
  }
  return shared;
}

}  // namespace whale
