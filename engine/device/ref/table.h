// What a family file gives to the back end: rows of (op, bind). bind() reads a KernelSpec once and returns the loop
// that runs each time; the loop allocates nothing.
#pragma once

#include <cmath>
#include <functional>
#include <span>

#include "device/device.h"
#include "device/ref/access.h"

namespace whale::ref {

using Body = std::function<void()>;
using Bind = Body (*)(const KernelSpec& spec);

struct Row {
  OpCode op;
  Bind bind;
};
using Rows = std::span<const Row>;

// std::fmax leaves NaN out.
inline double max_nan(double a, double b) { return a > b || std::isnan(a) ? a : b; }

// One function a family, in the order of ops.def.
Rows elementwise_rows();
Rows fused_rows();
Rows random_rows();
Rows reduce_rows();
Rows matmul_rows();
Rows movement_rows();
Rows indexing_rows();
Rows embedding_rows();
Rows norm_rows();
Rows batch_norm_rows();
Rows softmax_rows();
Rows loss_rows();
Rows attention_rows();
Rows conv_rows();
Rows pool_rows();
Rows moe_rows();
Rows optimizer_rows();
Rows recommend_rows();
Rows row_update_rows();
Rows collective_rows();

// Operand i, absent when the op has fewer.
inline Operand input(const KernelSpec& spec, size_t i) { return i < spec.in.size() ? spec.in[i] : Operand{}; }
inline In in(const KernelSpec& spec, size_t i) { return In(input(spec, i)); }
inline Out out(const KernelSpec& spec, size_t i) { return i < spec.out.size() ? Out(spec.out[i]) : Out{}; }

// Optional results stand in order behind the first ones, with or without gaps: takes the next one that is there.
class Results {
 public:
  explicit Results(const KernelSpec& spec, size_t first = 0) : spec_(spec), next_(first) {}
  Out take(bool wanted = true) {
    if (!wanted) return {};
    while (next_ < spec_.out.size() && !spec_.out[next_].present()) ++next_;
    if (next_ == spec_.out.size()) throw internal("op '{}' is bound with too few results", spec_.name);
    return Out(spec_.out[next_++]);
  }

 private:
  const KernelSpec& spec_;
  size_t next_;
};

// Rows of the last dimension: `rows` of `width` elements.
struct RowShape {
  int64_t rows = 0, width = 0;
  explicit RowShape(const Dims& dims) : width(dims.empty() ? 1 : dims.back()) {
    rows = 1;
    for (size_t d = 0; d + 1 < dims.size(); ++d) rows *= dims[d];
  }
};

// The softmax of a row is exp(x - top) / sum, its logarithm (x - top) - log(sum): right at any magnitude, where top +
// log(sum) has rounded to top. The sum of a row with NaN or infinity, or of nothing but -infinity, is NaN.
struct RowSum {
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  RowSum(const In& x, int64_t row, int64_t width) {
    for (int64_t i = row; i < row + width; ++i) top = max_nan(top, x[i]);
    for (int64_t i = row; i < row + width; ++i) sum += std::exp(x[i] - top);
  }
};

// What a saved lse has lost by rounding is what exp(x - lse) is wrong by: from this size on, a gradient that has the
// whole row sums it again.
inline constexpr double kExactLse = 64;

// Index of a possibly negative axis.
inline size_t axis_of(int64_t axis, size_t rank) {
  return static_cast<size_t>(axis < 0 ? axis + static_cast<int64_t>(rank) : axis);
}

// dims[0..axis) x dims[axis] x dims(axis..]
struct AxisShape {
  int64_t outer = 1, extent = 1, inner = 1;
  AxisShape(const Dims& dims, size_t axis) {
    for (size_t d = 0; d < axis; ++d) outer *= dims[d];
    if (axis < dims.size()) extent = dims[axis];
    for (size_t d = axis + 1; d < dims.size(); ++d) inner *= dims[d];
  }
};

}  // namespace whale::ref
