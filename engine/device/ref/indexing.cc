// Ops that read indices or order elements: gather, one_hot, cumsum, top_k. An index outside its axis reads zeros, and
// its gradient goes nowhere.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "device/ref/table.h"

namespace whale::ref {
namespace {

Body bind_gather(const KernelSpec& spec) {
  const In indices = in(spec, 1);
  const AxisShape shape(spec.in[0].dims, axis_of(attr_int(*spec.attrs, "axis"), spec.in[0].dims.size()));
  const size_t run = static_cast<size_t>(shape.inner * size_of(spec.in[0].dtype));
  const char* x = static_cast<const char*>(spec.in[0].data);
  char* y = static_cast<char*>(spec.out[0].data);
  const int64_t begin = attr_int(*spec.attrs, "begin");
  return [=] {
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t i = 0; i < indices.count; ++i) {
        char* to = y + static_cast<size_t>(o * indices.count + i) * run;
        const int64_t at = indices.integer(i) - begin;
        if (at >= 0 && at < shape.extent)
          std::memcpy(to, x + static_cast<size_t>(o * shape.extent + at) * run, run);
        else
          std::memset(to, 0, run);
      }
    }
  };
}

Body bind_gather_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0), indices = in(spec, 1);
  const Out dx = out(spec, 0);
  const AxisShape shape(spec.out[0].dims, axis_of(attr_int(*spec.attrs, "axis"), spec.out[0].dims.size()));
  const int64_t begin = attr_int(*spec.attrs, "begin");
  return [=, sum = room(dx.count)]() mutable {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t i = 0; i < indices.count; ++i) {
        const int64_t at = indices.integer(i) - begin;
        if (at < 0 || at >= shape.extent) continue;
        for (int64_t e = 0; e < shape.inner; ++e)
          sum[(o * shape.extent + at) * shape.inner + e] += dy[(o * indices.count + i) * shape.inner + e];
      }
    }
    write(dx, sum);
  };
}

Body bind_one_hot(const KernelSpec& spec) {
  const In indices = in(spec, 0);
  const Out y = out(spec, 0);
  const int64_t depth = spec.out[0].dims.back(), begin = attr_int(*spec.attrs, "begin");
  return [=] {
    for (int64_t i = 0; i < indices.count; ++i)
      for (int64_t d = 0; d < depth; ++d) y.set(i * depth + d, indices.integer(i) - begin == d ? 1.0 : 0.0);
  };
}

template <class T>
Body bind_cumsum_of(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const AxisShape shape(spec.in[0].dims, axis_of(attr_int(*spec.attrs, "axis"), spec.in[0].dims.size()));
  const bool reverse = attr_bool(*spec.attrs, "reverse"), exclusive = attr_bool(*spec.attrs, "exclusive");
  return [=] {
    for (int64_t o = 0; o < shape.outer; ++o) {
      for (int64_t i = 0; i < shape.inner; ++i) {
        T sum = 0;
        for (int64_t step = 0; step < shape.extent; ++step) {
          const int64_t e = reverse ? shape.extent - 1 - step : step;
          const int64_t at = (o * shape.extent + e) * shape.inner + i;
          const T next = plus(sum, x.as<T>(at));
          y.set(at, exclusive ? sum : next);
          sum = next;
        }
      }
    }
  };
}

Body bind_cumsum(const KernelSpec& spec) {
  return is_integer(spec.in[0].dtype) ? bind_cumsum_of<int64_t>(spec) : bind_cumsum_of<double>(spec);
}

template <class T>
Body bind_top_k_of(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out values = out(spec, 0), indices = out(spec, 1);
  const RowShape shape(spec.in[0].dims);
  const int64_t k = spec.out[0].dims.back();
  return [=, order = std::vector<int64_t>(static_cast<size_t>(shape.width))]() mutable {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const auto value = [&](int64_t i) { return x.as<T>(r * shape.width + i); };
      const auto before = [&](int64_t i, int64_t j) {  // NaN counts as the largest
        const T a = value(i), b = value(j);
        const bool greater = a > b || (a != a && b == b);
        const bool smaller = b > a || (b != b && a == a);
        return greater || (!smaller && i < j);
      };
      std::iota(order.begin(), order.end(), int64_t{0});
      std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
      for (int64_t i = 0; i < k; ++i) {
        const int64_t at = order[i];
        values.set(r * k + i, value(at));
        indices.set(r * k + i, at);
      }
    }
  };
}

Body bind_top_k(const KernelSpec& spec) {
  return is_integer(spec.in[0].dtype) ? bind_top_k_of<int64_t>(spec) : bind_top_k_of<double>(spec);
}

Body bind_top_k_grad(const KernelSpec& spec) {
  const In dvalues = in(spec, 0), indices = in(spec, 1);
  const Out dx = out(spec, 0);
  const RowShape shape(spec.out[0].dims), chosen(spec.in[0].dims);
  return [=] {
    for (int64_t i = 0; i < dx.count; ++i) dx.set(i, 0);
    for (int64_t r = 0; r < shape.rows; ++r)
      for (int64_t i = 0; i < chosen.width; ++i)
        if (const int64_t at = indices.integer(r * chosen.width + i); at >= 0 && at < shape.width)
          dx.set(r * shape.width + at, dvalues[r * chosen.width + i]);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_gather, bind_gather},   {OpCode::k_gather_grad, bind_gather_grad},
    {OpCode::k_one_hot, bind_one_hot}, {OpCode::k_cumsum, bind_cumsum},
    {OpCode::k_top_k, bind_top_k},     {OpCode::k_top_k_grad, bind_top_k_grad},
};

}  // namespace

Rows indexing_rows() { return kRows; }

}  // namespace whale::ref
