#include "device/cpu/strided_copy.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

struct Plane {
  int64_t rows, columns, from_row, to_row, from_column, to_column;
};

// Blocks of 16 x 16 keep both sides' cache lines in use until they are full.
template <class T>
void copy_plane(const T* from, T* to, const Plane& p) {
  constexpr int64_t kBlock = 16;
  for (int64_t r0 = 0; r0 < p.rows; r0 += kBlock) {
    const int64_t r1 = std::min(p.rows, r0 + kBlock);
    for (int64_t c0 = 0; c0 < p.columns; c0 += kBlock) {
      const int64_t c1 = std::min(p.columns, c0 + kBlock);
      if (r1 - r0 == kBlock && c1 - c0 == kBlock && p.from_row == 1 && p.to_column == 1) {
        for (int64_t r = 0; r < kBlock; ++r) {
          T* y = to + (r0 + r) * p.to_row + c0;
          const T* x = from + r0 + r + c0 * p.from_column;
          for (int64_t c = 0; c < kBlock; ++c) y[c] = x[c * p.from_column];
        }
        continue;
      }
      for (int64_t r = r0; r < r1; ++r)
        for (int64_t c = c0; c < c1; ++c) to[r * p.to_row + c * p.to_column] = from[r * p.from_row + c * p.from_column];
    }
  }
}

template <class T>
void copy_typed(const char* from, char* to, const Plane& p) {
  const auto* x = reinterpret_cast<const T*>(from);
  auto* y = reinterpret_cast<T*>(to);
  if (p.to_column == 1 && p.from_column == 1) {
    for (int64_t r = 0; r < p.rows; ++r)
      std::memcpy(y + r * p.to_row, x + r * p.from_row, static_cast<size_t>(p.columns) * sizeof(T));
  } else if (p.to_column == 1 && p.from_column == 0) {
    for (int64_t r = 0; r < p.rows; ++r) std::fill_n(y + r * p.to_row, p.columns, x[r * p.from_row]);
  } else {
    copy_plane(x, y, p);
  }
}

void copy(int64_t bytes, const char* from, char* to, const Plane& p) {
  if (bytes == 1)
    copy_typed<uint8_t>(from, to, p);
  else if (bytes == 2)
    copy_typed<uint16_t>(from, to, p);
  else if (bytes == 4)
    copy_typed<uint32_t>(from, to, p);
  else
    copy_typed<uint64_t>(from, to, p);
}

}  // namespace

StridedCopy::StridedCopy(int64_t element_bytes, const Dims& extent, const Dims& from, const Dims& to)
    : bytes_(element_bytes) {
  total_ = element_count(extent);
  std::vector<Axis> axes;
  for (size_t d = 0; d < extent.size(); ++d) {
    if (extent[d] == 1) continue;
    const Axis axis{extent[d], from[d], to[d]};
    if (!axes.empty() && axes.back().from == axis.from * axis.extent && axes.back().to == axis.to * axis.extent)
      axes.back() = {axes.back().extent * axis.extent, axis.from, axis.to};
    else
      axes.push_back(axis);
  }
  if (axes.size() > kMaxRank)
    throw unimplemented("a copy of {} dimensions, at most {} on the cpu device", axes.size(), kMaxRank);
  if (!axes.empty()) {  // the target's innermost axis
    column_ = axes.back();
    axes.pop_back();
  } else {
    column_ = {1, 1, 1};
  }
  // The row axis: the source's innermost one, so that a plane is a transposed block; else simply the next one.
  if (!axes.empty()) {
    size_t best = axes.size() - 1;
    if (column_.from != 1)
      for (size_t d = 0; d < axes.size(); ++d)
        if (axes[d].from == 1) best = d;
    row_ = axes[best];
    axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(best));
  }
  rank_ = static_cast<int>(axes.size());
  std::copy(axes.begin(), axes.end(), axes_.begin());
}

// Rows [begin, end) of all planes, counted through.
void StridedCopy::range(const char* from, char* to, int64_t begin, int64_t end) const {
  while (begin < end) {
    const int64_t plane = begin / row_.extent, r0 = begin % row_.extent;
    const int64_t rows = std::min(row_.extent - r0, end - begin);
    int64_t x = r0 * row_.from, y = r0 * row_.to, rest = plane;
    for (int d = rank_ - 1; d >= 0; --d) {
      const Axis& axis = axes_[d];
      x += rest % axis.extent * axis.from;
      y += rest % axis.extent * axis.to;
      rest /= axis.extent;
    }
    copy(bytes_, from + x * bytes_, to + y * bytes_,
         {rows, column_.extent, row_.from, row_.to, column_.from, column_.to});
    begin += rows;
  }
}

void StridedCopy::run(int threads, const void* from, void* to) const {
  if (total_ == 0) return;
  const int64_t rows = total_ / column_.extent;
  const int64_t least = std::max<int64_t>(1, (int64_t{1} << 16) / (column_.extent * bytes_));
  if (rows == 1) {  // one run: cut it, not the rows
    const Plane p{1, 0, 0, 0, column_.from, column_.to};
    parallel_for(threads, column_.extent, (int64_t{1} << 16) / bytes_, [&](int64_t b, int64_t e) {
      Plane part = p;
      part.columns = e - b;
      copy(bytes_, static_cast<const char*>(from) + b * column_.from * bytes_,
           static_cast<char*>(to) + b * column_.to * bytes_, part);
    });
    return;
  }
  parallel_for(threads, rows, least,
               [&](int64_t b, int64_t e) { range(static_cast<const char*>(from), static_cast<char*>(to), b, e); });
}

}  // namespace whale::cpu
