#include "device/cpu/large_copy.h"

#include <cstdint>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/large_copy.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// What is not whole lines of 64 bytes in the target is copied as ever.
void stream(uint8_t* to, const uint8_t* from, size_t bytes) {
  const hn::ScalableTag<uint8_t> d;
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine)
    for (size_t i = 0; i < kLine; i += hn::Lanes(d)) hn::Stream(hn::LoadU(d, from + at + i), d, to + at + i);
  hwy::FlushStream();
  std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whale::cpu {
namespace {

constexpr size_t kLarge = 1 << 20;  // half of what a core has for itself

HWY_EXPORT(stream);

}  // namespace

void large_copy(void* to, const void* from, size_t bytes) {
  if (bytes >= kLarge)
    HWY_DYNAMIC_DISPATCH(stream)(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), bytes);
  else if (bytes != 0)
    std::memcpy(to, from, bytes);
}

}  // namespace whale::cpu
#endif
