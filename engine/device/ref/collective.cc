// The reshards that one device can do alone. Collectives proper are run by the executor with Device::combine and
// copies.
#include <cmath>
#include <cstring>

#include "device/ref/scalar.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

Body bind_local_slice(const KernelSpec& spec) {
  const Ints& sub_axis = attr_ints(*spec.attrs, "sub_axis");  // dim, outer, inner
  const auto dim = static_cast<size_t>(sub_axis.at(0));
  const int64_t begin = attr_int(*spec.attrs, "begin"), end = attr_int(*spec.attrs, "end");
  const AxisShape shape(spec.in[0].dims, dim);
  const int64_t outer = shape.outer * sub_axis.at(1), inner = shape.inner * sub_axis.at(2);
  const int64_t extent = shape.extent / (sub_axis.at(1) * sub_axis.at(2)), bytes = size_of(spec.in[0].dtype);
  const size_t run = static_cast<size_t>((end - begin) * inner * bytes);
  const char* x = static_cast<const char*>(spec.in[0].data);
  char* y = static_cast<char*>(spec.out[0].data);
  return [=] {
    for (int64_t o = 0; run != 0 && o < outer; ++o)
      std::memcpy(y + static_cast<size_t>(o) * run, x + (o * extent + begin) * inner * bytes, run);
  };
}

Body bind_accumulate(const KernelSpec& spec) {
  const In sum = in(spec, 0), x = in(spec, 1);
  const Out y = out(spec, 0);
  const std::string& combine = attr_string(*spec.attrs, "combine");
  const OpCode op = combine == "max" ? OpCode::k_maximum : combine == "min" ? OpCode::k_minimum : OpCode::k_add;
  return [=, f = scalar(op, y.dtype, y.dtype)] {
    for (int64_t i = 0; i < y.count; ++i) {
      const Number pair[] = {sum.number(i), x.number(i)};
      y.set(i, f(pair));
    }
  };
}

Body bind_logaddexp(const KernelSpec& spec) {
  const In a = in(spec, 0), b = in(spec, 1);
  const Out y = out(spec, 0);
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) {
      const double most = max_nan(a[i], b[i]);  // of nothing but -inf: -inf
      y.set(i, std::isinf(most) ? most : most + std::log(std::exp(a[i] - most) + std::exp(b[i] - most)));
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_logaddexp, bind_logaddexp},
    {OpCode::k_local_slice, bind_local_slice},
    {OpCode::k_accumulate, bind_accumulate},
};

}  // namespace

Rows collective_rows() { return kRows; }

}  // namespace whale::ref
