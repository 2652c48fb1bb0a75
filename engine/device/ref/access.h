// Elements of an operand: doubles, and integers where a tensor has them. Every reference kernel computes in float64 and
// rounds once, when it stores, but for integers: those are int64 inside, modulo 2^64, and the low bits are stored. Ops
// that only move data copy bytes instead.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/f16.h"
#include "device/device.h"

namespace whale::ref {

inline double load(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kF64: return static_cast<const double*>(data)[i];
    case DType::kBF16: return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::kI32: return static_cast<const int32_t*>(data)[i];
    case DType::kI64: return static_cast<double>(static_cast<const int64_t*>(data)[i]);
    case DType::kI8: return static_cast<const int8_t*>(data)[i];
    case DType::kU8: return static_cast<const uint8_t*>(data)[i];
    case DType::kBool: return static_cast<const uint8_t*>(data)[i] != 0;
    case DType::kU16: return static_cast<const uint16_t*>(data)[i];
    case DType::kF16: return f16_to_float(static_cast<const uint16_t*>(data)[i]);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// Towards zero; what does not fit saturates, NaN is 0.
inline int64_t to_integer(double x) {
  if (!(x > -9223372036854775808.0)) return std::isnan(x) ? 0 : std::numeric_limits<int64_t>::min();
  if (x >= 9223372036854775808.0) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(x);
}

inline int64_t to_integer(int64_t x) { return x; }

// T, here and below: double, or int64_t, which is rounded once where it becomes a float and wraps in a narrower
// integer.
template <class T>
inline void store(DType dtype, void* data, int64_t i, T x) {
  switch (dtype) {
    case DType::kF32: static_cast<float*>(data)[i] = static_cast<float>(x); break;
    case DType::kF64: static_cast<double*>(data)[i] = static_cast<double>(x); break;
    case DType::kBF16: static_cast<uint16_t*>(data)[i] = float_to_bf16(static_cast<float>(x)); break;
    case DType::kI32: static_cast<int32_t*>(data)[i] = static_cast<int32_t>(to_integer(x)); break;
    case DType::kI64: static_cast<int64_t*>(data)[i] = to_integer(x); break;
    case DType::kI8: static_cast<int8_t*>(data)[i] = static_cast<int8_t>(to_integer(x)); break;
    case DType::kU8: static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(to_integer(x)); break;
    case DType::kBool: static_cast<uint8_t*>(data)[i] = x != 0; break;
    case DType::kU16: static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(to_integer(x)); break;
    case DType::kF16: static_cast<uint16_t*>(data)[i] = float_to_f16(static_cast<float>(x)); break;
  }
}

template <class T>
T load_as(DType dtype, const void* data, int64_t i) {
  if constexpr (std::is_same_v<T, double>)
    return load(dtype, data, i);
  else
    return dtype == DType::kI64 ? static_cast<const int64_t*>(data)[i] : to_integer(load(dtype, data, i));
}

// The value that `x` has after it went through a tensor of this type.
template <class T>
T rounded(DType dtype, T x) {
  int64_t cell = 0;
  store(dtype, &cell, 0, x);
  return load_as<T>(dtype, &cell, 0);
}

// Sums of doubles, and of integers modulo 2^64.
inline double plus(double a, double b) { return a + b; }
inline int64_t plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

// An element: of a tensor of integers `whole`, of any other `real`.
union Number {
  double real = 0;
  int64_t whole;
};

// An operand to read, to write. Absent operands have count 0 and must not be touched.
struct In {
  const void* data = nullptr;
  DType dtype{};
  int64_t count = 0;
  bool whole = false;  // integers
  In() = default;
  explicit In(const Operand& x)
      : data(x.data),
        dtype(x.dtype),
        count(x.present() ? element_count(x.dims) : 0),
        whole(x.present() && is_integer(x.dtype)) {}
  bool present() const { return dtype != DType{}; }
  double operator[](int64_t i) const { return load(dtype, data, i); }
  template <class T>
  T as(int64_t i) const {
    return load_as<T>(dtype, data, i);
  }
  int64_t integer(int64_t i) const { return as<int64_t>(i); }
  Number number(int64_t i) const { return whole ? Number{.whole = integer(i)} : Number{.real = (*this)[i]}; }
};

struct Out {
  void* data = nullptr;
  DType dtype{};
  int64_t count = 0;
  bool whole = false;  // integers
  Out() = default;
  explicit Out(const Operand& x)
      : data(x.data),
        dtype(x.dtype),
        count(x.present() ? element_count(x.dims) : 0),
        whole(x.present() && is_integer(x.dtype)) {}
  bool present() const { return dtype != DType{}; }
  template <class T>
  void set(int64_t i, T x) const {
    using Kind = std::conditional_t<std::is_integral_v<T>, int64_t, double>;
    store(dtype, data, i, static_cast<Kind>(x));
  }
  void set(int64_t i, Number x) const { whole ? set(i, x.whole) : set(i, x.real); }
};

// Room for a whole operand as doubles, for kernels that read or accumulate into elements many times. Made when a kernel
// is bound.
using Values = std::vector<double>;
inline Values room(int64_t count) { return Values(static_cast<size_t>(count)); }
inline void read(const In& in, Values& values) {
  for (int64_t i = 0; i < in.count; ++i) values[i] = in[i];
}
inline void write(const Out& out, const Values& values) {
  for (int64_t i = 0; i < out.count; ++i) out.set(i, values[i]);
}

}  // namespace whale::ref
