// Sources and random ops. A random number is a function of (seed, iteration, key, global element) only.
#include "base/philox.h"
#include "device/global_index.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

Body bind_fill(const KernelSpec& spec) {
  const Out y = out(spec, 0);
  const double value = attr_float(*spec.attrs, "value");
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) y.set(i, value);
  };
}

Body bind_iota(const KernelSpec& spec) {
  const Out y = out(spec, 0);
  const Dims& dims = spec.out[0].dims;
  const size_t dim = axis_of(attr_int(*spec.attrs, "dim"), dims.size());
  const AxisShape shape(dims, dim);
  const GlobalIndex global(spec.box, dims);
  const RowContext* row = spec.row;
  return [=] {
    const int64_t batch_begin = row ? row->batch_begin : 0;
    for (int64_t i = 0; i < y.count; ++i) {
      const int64_t at = i / shape.inner % shape.extent;
      y.set(i, static_cast<double>(global.coordinate(static_cast<int>(dim), at, batch_begin)));
    }
  };
}

Body bind_dropout(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const double rate = attr_float(*spec.attrs, "rate");
  const uint64_t key = spec.key != 0 ? spec.key : static_cast<uint64_t>(attr_int(*spec.attrs, "key"));
  const GlobalIndex global(spec.box, spec.out[0].dims);
  const StepParameters* step = spec.step;
  const RowContext* row = spec.row;
  return [=] {
    const RandomStream random(step->seed, key, static_cast<uint64_t>(step->iteration));
    const uint32_t threshold = drop_threshold(rate);
    for (int64_t i = 0; i < y.count; ++i) {
      const int64_t index = global(i, row->batch_begin);
      y.set(i, random.word(static_cast<uint64_t>(index)) >= threshold ? x[i] / (1 - rate) : 0.0);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_fill, bind_fill},
    {OpCode::k_iota, bind_iota},
    {OpCode::k_dropout, bind_dropout},
};

}  // namespace

Rows random_rows() { return kRows; }

}  // namespace whale::ref
