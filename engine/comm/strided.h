// Bytes of a device's memory at equal distances: what a message takes up or puts down.
#pragma once

#include <cstddef>
#include <vector>

#include "device/device.h"

namespace whale {

struct Strided {
  char* data = nullptr;
  size_t begin = 0;                       // bytes behind `data`
  size_t run = 0, stride = 0, count = 1;  // bytes, bytes, runs
  size_t bytes() const { return run * count; }
};

inline size_t bytes_of(const std::vector<Strided>& list) {
  size_t sum = 0;
  for (const Strided& s : list) sum += s.bytes();
  return sum;
}

// The bytes one behind the other, to and from the host's memory. A device that holds no values moves none.
inline void pack(Device& device, const std::vector<Strided>& from, char* to) {
  if (!device.has_values()) return;
  for (const Strided& s : from)
    for (size_t i = 0; s.run > 0 && i < s.count; ++i, to += s.run)
      device.copy_out(to, s.data + s.begin + i * s.stride, s.run);
}
inline void unpack(Device& device, const char* from, const std::vector<Strided>& to) {
  if (!device.has_values()) return;
  for (const Strided& s : to)
    for (size_t i = 0; s.run > 0 && i < s.count; ++i, from += s.run)
      device.copy_in(s.data + s.begin + i * s.stride, from, s.run);
}

}  // namespace whale
