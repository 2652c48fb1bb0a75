// bfloat16 in scalar code: the upper half of a float, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace whale::cpu {

struct Bf16 {
  uint16_t bits;
};
inline float to_float(Bf16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(float x) { return x; }
inline Bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;  // a NaN must not round to infinity
  return {static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded)};
}
template <class T>
inline T from_float(float x) {
  if constexpr (sizeof(T) == 2)
    return to_bf16(x);
  else
    return static_cast<T>(x);
}

}  // namespace whale::cpu
