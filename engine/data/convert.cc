#include "data/convert.h"

#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "base/f16.h"

namespace whale {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
double get(const float& x) { return x; }
double get(const double& x) { return x; }
double get(const Bf16& x) { return bf16_to_float(x.bits); }
double get(const F16& x) { return f16_to_float(x.bits); }
template <class T>
double get(const T& x) {
  return static_cast<double>(x);
}
template <class T>
void put(T& to, double x) {
  to = static_cast<T>(x);
}
void put(Bf16& to, double x) { to.bits = float_to_bf16(static_cast<float>(x)); }
void put(F16& to, double x) { to.bits = float_to_f16(static_cast<float>(x)); }
void put(bool& to, double x) { to = x != 0; }

// Calls body with a value of the C++ type of `dtype`.
template <class Body>
void with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kF32: return body(float{});
    case DType::kF64: return body(double{});
    case DType::kBF16: return body(Bf16{});
    case DType::kI32: return body(int32_t{});
    case DType::kI64: return body(int64_t{});
    case DType::kU8: return body(uint8_t{});
    case DType::kI8: return body(int8_t{});
    case DType::kBool: return body(bool{});
    case DType::kU16: return body(uint16_t{});
    case DType::kF16: return body(F16{});
  }
  throw unimplemented("values of type {} cannot be made or converted here", name_of(dtype));
}

}  // namespace

bool convertible(DType from, DType to) { return from == to || (is_float(from) && is_float(to)); }

void convert(DType from_dtype, const void* from, DType to_dtype, void* to, size_t count) {
  if (from_dtype == to_dtype) {
    if (count != 0) std::memcpy(to, from, count * static_cast<size_t>(size_of(to_dtype)));
    return;
  }
  if (!convertible(from_dtype, to_dtype))
    throw invalid("{} does not convert to {}", name_of(from_dtype), name_of(to_dtype));
  with_type(from_dtype, [&](auto a) {
    with_type(to_dtype, [&](auto b) {
      const auto* source = static_cast<const decltype(a)*>(from);
      auto* target = static_cast<decltype(b)*>(to);
      for (size_t i = 0; i < count; ++i) put(target[i], get(source[i]));
    });
  });
}

void fill(DType dtype, void* to, size_t count, double value) {
  with_type(dtype, [&](auto x) {
    put(x, value);
    auto* target = static_cast<decltype(x)*>(to);
    for (size_t i = 0; i < count; ++i) target[i] = x;
  });
}

double element(DType dtype, const void* at) {
  double value = 0;
  with_type(dtype, [&](auto x) {
    std::memcpy(&x, at, sizeof x);
    value = get(x);
  });
  return value;
}

}  // namespace whale
