// bfloat16 as an element type of scalar code that the compiler vectorises.
#pragma once

#include "base/bf16.h"

namespace whale::cpu {

struct Bf16 {
  uint16_t bits;
};
inline float to_float(Bf16 x) { return bf16_to_float(x.bits); }
inline float to_float(float x) { return x; }
inline Bf16 to_bf16(float x) { return {float_to_bf16(x)}; }
template <class T>
inline T from_float(float x) {
  if constexpr (sizeof(T) == 2)
    return to_bf16(x);
  else
    return static_cast<T>(x);
}

}  // namespace whale::cpu
