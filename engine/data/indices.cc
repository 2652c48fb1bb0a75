#include "data/indices.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace whale {
namespace {

constexpr int64_t kBlock = 4096;  // elements that are looked at together: the fast loop only says whether one is bad

// Whether one of x[begin..end) is outside of 0 to top and is not `ignored`. In sign bits alone, which any compiler
// makes vectors of, for 64 bits too: x and top - x have none where x is inside, and the difference to `ignored` has
// one, or its negative has, where it is not zero.
template <bool kIgnores, class T>
bool any_outside(const T* x, int64_t begin, int64_t end, T top, T ignored) {
  using U = std::make_unsigned_t<T>;
  U signs = 0;
  for (int64_t i = begin; i < end; ++i) {
    const U value = static_cast<U>(x[i]), difference = value ^ static_cast<U>(ignored);
    const U outside = value | (static_cast<U>(top) - value);
    signs |= kIgnores ? outside & (difference | (U{0} - difference)) : outside;
  }
  return static_cast<T>(signs) < 0;
}

template <class T>
std::optional<BadIndex> find(const T* x, int64_t count, const IndexRange& range) {
  const T top =
      static_cast<T>(std::clamp<int64_t>(range.limit, 0, int64_t{std::numeric_limits<T>::max()} + (sizeof(T) < 8)) - 1);
  const bool ignores = range.ignored && std::in_range<T>(*range.ignored);
  const T ignored = ignores ? static_cast<T>(*range.ignored) : T{0};
  const auto outside = ignores ? any_outside<true, T> : any_outside<false, T>;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    if (!outside(x, begin, end, top, ignored)) continue;
    for (int64_t i = begin; i < end; ++i)
      if (!range.permits(x[i])) return BadIndex{i, x[i]};
  }
  return {};
}

}  // namespace

std::optional<BadIndex> first_outside(DType dtype, const void* indices, int64_t count, const IndexRange& range) {
  return dtype == DType::kI64 ? find(static_cast<const int64_t*>(indices), count, range)
                              : find(static_cast<const int32_t*>(indices), count, range);
}

std::string position_text(const Dims& dims, int64_t position) {
  Ints at(dims.size());
  for (size_t d = dims.size(); d-- > 0; position /= std::max<int64_t>(dims[d], 1))
    at[d] = position % std::max<int64_t>(dims[d], 1);
  return fmt::format("[{}]", fmt::join(at, ", "));
}

}  // namespace whale
