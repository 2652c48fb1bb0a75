// Reductions over any set of axes.
#include <algorithm>

#include "device/ref/table.h"
#include "device/ref/walk.h"

namespace whale::ref {
namespace {

std::vector<bool> reduced_axes(const KernelSpec& spec) {
  const size_t rank = spec.in[0].dims.size();
  const std::vector<int64_t>& axes = attr_ints(*spec.attrs, "axes");
  std::vector<bool> reduced(rank, axes.empty());
  for (const int64_t axis : axes) reduced.at(axis_of(axis, rank)) = true;
  return reduced;
}

// Where each element of the operand goes: strides of the result, 0 along the reduced axes.
Strides result_strides(const Dims& dims, const std::vector<bool>& reduced) {
  Strides strides(dims.size(), 0);
  int64_t stride = 1;
  for (size_t d = dims.size(); d-- > 0;) {
    if (reduced[d]) continue;
    strides[d] = stride;
    stride *= dims[d];
  }
  return strides;
}

using Fold = double (*)(double, double);

Body bind_fold(const KernelSpec& spec, double start, Fold fold, bool mean = false) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const Walk<1> walk(spec.in[0].dims, {result_strides(spec.in[0].dims, reduced_axes(spec))});
  const double scale = mean && x.count > 0 ? static_cast<double>(y.count) / static_cast<double>(x.count) : 1.0;
  return [=, sums = room(y.count)]() mutable {
    std::fill(sums.begin(), sums.end(), start);
    walk.each([&](int64_t i, const auto& at) {
      double& sum = sums[static_cast<size_t>(at[0])];
      sum = fold(sum, x[i]);
    });
    for (int64_t i = 0; i < y.count; ++i) y.set(i, sums[static_cast<size_t>(i)] * scale);
  };
}

constexpr double kInfinity = std::numeric_limits<double>::infinity();
double plus(double a, double b) { return a + b; }

Body bind_sum(const KernelSpec& spec) { return bind_fold(spec, 0, plus); }
Body bind_mean(const KernelSpec& spec) { return bind_fold(spec, 0, plus, true); }
Body bind_max(const KernelSpec& spec) {
  return bind_fold(spec, -kInfinity, [](double a, double b) { return b > a || std::isnan(b) ? b : a; });
}
Body bind_min(const KernelSpec& spec) {
  return bind_fold(spec, kInfinity, [](double a, double b) { return b < a || std::isnan(b) ? b : a; });
}

Body bind_argmax(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const Dims& dims = spec.in[0].dims;
  const AxisShape shape(dims, axis_of(attr_int(*spec.attrs, "axis", -1), dims.size()));
  return [=] {
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        const auto value = [&](int64_t e) { return x[(o * shape.extent + e) * shape.inner + i]; };
        int64_t best = 0;
        for (int64_t e = 1; e < shape.extent; ++e)
          if (value(e) > value(best)) best = e;
        y.set(o * shape.inner + i, static_cast<double>(best));
      }
    }
  };
}

Body bind_sum_of_squares(const KernelSpec& spec) {
  std::vector<In> operands;
  for (size_t i = 0; i < spec.in.size(); ++i) operands.push_back(in(spec, i));
  const Out y = out(spec, 0);
  return [=] {
    double sum = 0;
    for (const In& x : operands)
      for (int64_t i = 0; i < x.count; ++i) sum += x[i] * x[i];
    y.set(0, sum);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_reduce_sum, bind_sum}, {OpCode::k_reduce_mean, bind_mean},
    {OpCode::k_reduce_max, bind_max}, {OpCode::k_reduce_min, bind_min},
    {OpCode::k_argmax, bind_argmax},  {OpCode::k_sum_of_squares, bind_sum_of_squares},
};

}  // namespace

Rows reduce_rows() { return kRows; }

}  // namespace whale::ref
