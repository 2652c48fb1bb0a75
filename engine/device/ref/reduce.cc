// Reductions over any set of axes.
#include <algorithm>

#include "device/ref/table.h"
#include "device/ref/walk.h"

namespace whale::ref {
namespace {

std::vector<bool> reduced_axes(const KernelSpec& spec) {
  const size_t rank = spec.in[0].dims.size();
  const Ints& axes = attr_ints(*spec.attrs, "axes");
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

template <class T>
using Fold = T (*)(T, T);

template <class T>
Body bind_fold(const KernelSpec& spec, T start, Fold<T> fold, T scale = 1) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const Walk<1> walk(spec.in[0].dims, {result_strides(spec.in[0].dims, reduced_axes(spec))});
  return [=, sums = std::vector<T>(static_cast<size_t>(y.count))]() mutable {
    std::fill(sums.begin(), sums.end(), start);
    walk.each([&](int64_t i, const auto& at) {
      T& sum = sums[at[0]];
      sum = fold(sum, x.as<T>(i));
    });
    for (int64_t i = 0; i < y.count; ++i) y.set(i, sums[i] * scale);
  };
}

bool integers(const KernelSpec& spec) { return is_integer(spec.in[0].dtype); }

Body bind_sum(const KernelSpec& spec) {
  return integers(spec) ? bind_fold<int64_t>(spec, 0, plus) : bind_fold<double>(spec, 0, plus);
}
Body bind_mean(const KernelSpec& spec) {
  const int64_t from = element_count(spec.in[0].dims), to = element_count(spec.out[0].dims);
  return bind_fold<double>(spec, 0, plus, from > 0 ? static_cast<double>(to) / static_cast<double>(from) : 1);
}

// NaN beats all.
template <class T>
T larger(T most, T x) {
  return x > most || x != x ? x : most;
}
template <class T>
T smaller(T least, T x) {
  return x < least || x != x ? x : least;
}
constexpr double kInfinity = std::numeric_limits<double>::infinity();
using Integers = std::numeric_limits<int64_t>;
Body bind_max(const KernelSpec& spec) {
  return integers(spec) ? bind_fold(spec, Integers::min(), larger<int64_t>)
                        : bind_fold(spec, -kInfinity, larger<double>);
}
Body bind_min(const KernelSpec& spec) {
  return integers(spec) ? bind_fold(spec, Integers::max(), smaller<int64_t>)
                        : bind_fold(spec, kInfinity, smaller<double>);
}

template <class T>
Body bind_argmax_of(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const Dims& dims = spec.in[0].dims;
  const AxisShape shape(dims, axis_of(attr_int(*spec.attrs, "axis", -1), dims.size()));
  return [=] {
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        const auto value = [&](int64_t e) { return x.as<T>((o * shape.extent + e) * shape.inner + i); };
        int64_t best = 0;
        for (int64_t e = 1; e < shape.extent; ++e)
          if (value(e) > value(best)) best = e;
        y.set(o * shape.inner + i, best);
      }
    }
  };
}

Body bind_argmax(const KernelSpec& spec) {
  return integers(spec) ? bind_argmax_of<int64_t>(spec) : bind_argmax_of<double>(spec);
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
