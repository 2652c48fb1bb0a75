// Softmax over the last dimension. Results may be written over operands: each row is read to the end before it is
// written.
#include "device/ref/table.h"

namespace whale::ref {
namespace {

Body bind_softmax(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const RowShape shape(spec.in[0].dims);
  const bool logarithm = spec.op == OpCode::k_log_softmax;
  return [=] {
    for (int64_t row = 0; row < x.count; row += shape.width) {
      const RowSum s(x, row, shape.width);
      for (int64_t i = row; i < row + shape.width; ++i)
        y.set(i, logarithm ? (x[i] - s.top) - std::log(s.sum) : std::exp(x[i] - s.top) / s.sum);
    }
  };
}

Body bind_softmax_grad(const KernelSpec& spec) {
  const In y = in(spec, 0), dy = in(spec, 1);
  const Out dx = out(spec, 0);
  const RowShape shape(spec.in[0].dims);
  return [=] {
    for (int64_t row = 0; row < y.count; row += shape.width) {
      double dot = 0;
      for (int64_t i = row; i < row + shape.width; ++i) dot += y[i] * dy[i];
      for (int64_t i = row; i < row + shape.width; ++i) dx.set(i, y[i] * (dy[i] - dot));
    }
  };
}

Body bind_log_softmax_grad(const KernelSpec& spec) {
  const In y = in(spec, 0), dy = in(spec, 1);
  const Out dx = out(spec, 0);
  const RowShape shape(spec.in[0].dims);
  return [=] {
    for (int64_t row = 0; row < y.count; row += shape.width) {
      double sum = 0;
      for (int64_t i = row; i < row + shape.width; ++i) sum += dy[i];
      for (int64_t i = row; i < row + shape.width; ++i) dx.set(i, dy[i] - std::exp(y[i]) * sum);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_softmax, bind_softmax},
    {OpCode::k_softmax_grad, bind_softmax_grad},
    {OpCode::k_log_softmax, bind_softmax},
    {OpCode::k_log_softmax_grad, bind_log_softmax_grad},
};

}  // namespace

Rows softmax_rows() { return kRows; }

}  // namespace whale::ref
