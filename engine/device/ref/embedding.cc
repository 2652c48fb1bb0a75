// Table lookup and rotary position embedding.
#include <algorithm>
#include <cstring>

#include "device/global_index.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

// An id outside the table gives zeros: a cut of the rows then gives partial sums.
Body bind_embedding(const KernelSpec& spec) {
  const In ids = in(spec, 1);
  const int64_t rows = spec.in[0].dims[0], begin = attr_int(*spec.attrs, "row_begin");
  const size_t run = static_cast<size_t>(spec.in[0].dims[1] * size_of(spec.in[0].dtype));
  const char* table = static_cast<const char*>(spec.in[0].data);
  char* y = static_cast<char*>(spec.out[0].data);
  return [=] {
    for (int64_t i = 0; i < ids.count; ++i) {
      const int64_t id = ids.integer(i) - begin;
      char* to = y + static_cast<size_t>(i) * run;
      if (id >= 0 && id < rows)
        std::memcpy(to, table + static_cast<size_t>(id) * run, run);
      else
        std::memset(to, 0, run);
    }
  };
}

Body bind_embedding_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0), ids = in(spec, 1);
  const Out dtable = out(spec, 0);
  const int64_t rows = spec.out[0].dims[0], width = spec.out[0].dims[1];
  const int64_t begin = attr_int(*spec.attrs, "row_begin");
  return [=, sum = room(dtable.count)]() mutable {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t i = 0; i < ids.count; ++i) {
      const int64_t id = ids.integer(i) - begin;
      if (id < 0 || id >= rows) continue;
      for (int64_t e = 0; e < width; ++e) sum[id * width + e] += dy[i * width + e];
    }
    write(dtable, sum);
  };
}

// x [b, t, h, d]. Pair p of a head turns by position * base^(-2 p / d). Pairs are (p, p + d/2), interleaved: (2p, 2p +
// 1).
Body bind_rotary(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const Dims& dims = spec.in[0].dims;
  const int64_t batch = dims[0], time = dims[1], heads = dims[2], d = dims[3];
  const double base = attr_float(*spec.attrs, "base", 10000);
  const int64_t limit = attr_int(*spec.attrs, "heads", -1);
  const bool interleaved = attr_bool(*spec.attrs, "interleaved");
  const double direction = attr_bool(*spec.attrs, "inverse") ? -1 : 1;
  const GlobalIndex global(spec.box, dims);
  const RowContext* row = spec.row;
  return [=] {
    const int64_t batch_begin = row ? row->batch_begin : 0;
    for (int64_t i = 0; i < batch * time * heads; ++i) {
      const int64_t head = global.coordinate(2, i % heads, batch_begin);
      const double position = static_cast<double>(global.coordinate(1, i / heads % time, batch_begin));
      const bool turned = limit < 0 || head < limit;
      for (int64_t p = 0; p < d / 2; ++p) {
        const int64_t first = i * d + (interleaved ? 2 * p : p), second = i * d + (interleaved ? 2 * p + 1 : p + d / 2);
        const double angle =
            turned ? direction * position * std::pow(base, -2.0 * static_cast<double>(p) / static_cast<double>(d)) : 0;
        const double a = x[first], b = x[second], c = std::cos(angle), s = std::sin(angle);
        y.set(first, a * c - b * s);
        y.set(second, b * c + a * s);
      }
      if (d % 2 != 0) y.set(i * d + d - 1, x[i * d + d - 1]);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_embedding, bind_embedding},
    {OpCode::k_embedding_grad, bind_embedding_grad},
    {OpCode::k_rotary, bind_rotary},
};

}  // namespace

Rows embedding_rows() { return kRows; }

}  // namespace whale::ref
