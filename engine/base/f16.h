// float16 (IEEE binary16), stored as uint16_t; converting rounds to nearest, ties to even, and what is too large
// becomes infinite.
#pragma once

#include <bit>
#include <cstdint>

namespace whale {

inline float f16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, exponent = x >> 10 & 0x1Fu, mantissa = x & 0x3FFu;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal or zero: exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
}

inline uint16_t float_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | (size >> 13 & 0x3FFu));  // NaN stays NaN, quiet
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);                         // 65520 and more
  if (size < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24 in the mantissa
    const float half = std::bit_cast<float>(size) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(half) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((size - 0x38000000u + 0xFFFu + (size >> 13 & 1u)) >> 13));
}

}  // namespace whale
