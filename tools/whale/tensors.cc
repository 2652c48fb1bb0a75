#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tool {
namespace {

constexpr size_t kBlock = 4096;

template <class T>
T at(const uint8_t* data, size_t i) {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return value;
}

double from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const double value = exponent == 31  ? (mantissa ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(mantissa, -24)
                                       : std::ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -value : value;
}

double from_bf16(uint16_t b) {
  const uint32_t wide = uint32_t{b} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return static_cast<double>(value);
}

uint16_t to_bf16(double value) {
  const auto single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounded to nearest, ties to even; beyond 65504 infinite.
uint16_t to_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::abs(value);
  if (std::isnan(value)) return 0x7e00;
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7c00);
  int exponent = 0;
  std::frexp(size, &exponent);                    // size = f * 2^exponent, f in [0.5, 1)
  const int unit = std::max(exponent - 11, -24);  // of the last place
  auto units = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
  // Units count up through the exponents: 1024 of them are the next one.
  return static_cast<uint16_t>(sign | (units + (unit > -24 ? (unit + 24) * 1024 : 0)));
}

template <class T>
void widen(const uint8_t* data, size_t begin, size_t count, double* to) {
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<double>(at<T>(data, begin + i));
}

}  // namespace

size_t elements(const whale_tensor* tensor) {
  size_t n = 1;
  for (size_t i = 0; i < whale_tensor_rank(tensor); ++i) n *= static_cast<size_t>(whale_tensor_dims(tensor)[i]);
  return n;
}

double root_of_elements(const whale_tensor* tensor) {
  return std::sqrt(static_cast<double>(std::max<size_t>(1, elements(tensor))));
}

void load(const whale_tensor* tensor, size_t begin, size_t count, double* to) {
  const auto* data = static_cast<const uint8_t*>(whale_tensor_data(tensor));
  switch (whale_tensor_dtype(tensor)) {
    case WHALE_F64: return widen<double>(data, begin, count, to);
    case WHALE_F32: return widen<float>(data, begin, count, to);
    case WHALE_U16: return widen<uint16_t>(data, begin, count, to);
    case WHALE_I32: return widen<int32_t>(data, begin, count, to);
    case WHALE_I64: return widen<int64_t>(data, begin, count, to);
    case WHALE_BF16:
      for (size_t i = 0; i < count; ++i) to[i] = from_bf16(at<uint16_t>(data, begin + i));
      return;
    case WHALE_F16:
      for (size_t i = 0; i < count; ++i) to[i] = from_half(at<uint16_t>(data, begin + i));
      return;
    default: return widen<uint8_t>(data, begin, count, to);
  }
}

bool storable(int dtype) {
  return dtype == WHALE_F64 || dtype == WHALE_F32 || dtype == WHALE_BF16 || dtype == WHALE_F16;
}

double rounding_of(int dtype) {
  return dtype == WHALE_F64 ? 0x1p-53 : dtype == WHALE_F32 ? 0x1p-24 : dtype == WHALE_F16 ? 0x1p-11 : 0x1p-8;
}

bool integers(const whale_tensor* tensor) { return !storable(whale_tensor_dtype(tensor)); }

bool same_bits(const whale_tensor* a, const whale_tensor* b) {
  const size_t bytes = whale_tensor_bytes(a);
  return bytes == whale_tensor_bytes(b) &&
         (bytes == 0 || std::memcmp(whale_tensor_data(a), whale_tensor_data(b), bytes) == 0);
}

void store(whale_tensor* tensor, size_t begin, size_t count, const double* from) {
  auto* data = static_cast<uint8_t*>(whale_tensor_data(tensor));
  const int dtype = whale_tensor_dtype(tensor);
  for (size_t i = 0; i < count; ++i) {
    const size_t k = begin + i;
    const auto single = static_cast<float>(from[i]);
    const uint16_t half = dtype == WHALE_F16 ? to_half(from[i]) : to_bf16(from[i]);
    if (dtype == WHALE_F64)
      std::memcpy(data + k * 8, &from[i], 8);
    else if (dtype == WHALE_F32)
      std::memcpy(data + k * 4, &single, 4);
    else
      std::memcpy(data + k * 2, &half, 2);
  }
}

namespace {

Distance of_integers(const whale_tensor* a, const whale_tensor* b) {
  const size_t n = elements(b), size = n > 0 ? whale_tensor_bytes(b) / n : 0;
  const auto* x = static_cast<const uint8_t*>(whale_tensor_data(a));
  const auto* y = static_cast<const uint8_t*>(whale_tensor_data(b));
  double differ = 0;
  for (size_t i = 0; i < n; ++i) differ += std::memcmp(x + i * size, y + i * size, size) != 0;
  return {differ, static_cast<double>(n)};
}

Distance of_floats(const whale_tensor* a, const whale_tensor* b, double scale) {
  double x[kBlock], y[kBlock], sum = 0, square = 0;
  for (size_t begin = 0, n = elements(b); begin < n; begin += kBlock) {
    const size_t count = std::min(kBlock, n - begin);
    load(a, begin, count, x), load(b, begin, count, y);
    for (size_t i = 0; i < count; ++i) {
      const double size = scale * y[i], d = scale * x[i] - size;
      if (std::isfinite(size)) square += size * size;
      if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
      sum += std::isfinite(d) ? d * d : INFINITY;
    }
  }
  return {std::sqrt(sum), std::sqrt(square)};
}

}  // namespace

Distance distance(const whale_tensor* a, const whale_tensor* b) {
  if (integers(b)) return of_integers(a, b);
  const Distance found = of_floats(a, b, 1);
  if (std::isfinite(found.difference) && std::isfinite(found.norm)) return found;
  constexpr double kSmall = 0x1p-600;  // whose squares of finite numbers add up
  const Distance small = of_floats(a, b, kSmall);
  return {small.difference / kSmall, small.norm / kSmall};
}

Values values_of(const whale_tensor* tensor) {
  Values out{{whale_tensor_dims(tensor), whale_tensor_dims(tensor) + whale_tensor_rank(tensor)}, {}};
  out.data.resize(elements(tensor));
  load(tensor, 0, out.data.size(), out.data.data());
  return out;
}

}  // namespace tool
