#include "data/indices.h"

#include <algorithm>
#include <vector>

namespace whale {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are looked at together: the fast loop only says whether one is bad

template <class T>
std::optional<BadIndex> find(const T* x, int64_t count, const IndexRange& range) {
  const auto limit = static_cast<uint64_t>(std::max<int64_t>(range.limit, 0));
  // An index that is ignored in any case does no harm as a second permitted value.
  const int64_t ignored = range.ignored.value_or(0), other = range.ignored || range.limit > 0 ? ignored : -1;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, count);
    unsigned bad = 0;
    for (int64_t i = begin; i < end; ++i)
      bad |= static_cast<unsigned>(static_cast<uint64_t>(x[i]) >= limit) & static_cast<unsigned>(x[i] != other);
    if (bad == 0) continue;
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
  std::vector<int64_t> at(dims.size());
  for (size_t d = dims.size(); d-- > 0; position /= std::max<int64_t>(dims[d], 1))
    at[d] = position % std::max<int64_t>(dims[d], 1);
  return fmt::format("[{}]", fmt::join(at, ", "));
}

}  // namespace whale
