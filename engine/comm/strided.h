// Bytes of a device's memory at equal distances: what a message takes up or puts down.
#pragma once

#include <algorithm>
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

// From place to place of a device, by way of `block` unless it is empty. What is there already stays.
inline void copy(Device& device, const std::vector<Strided>& from, const std::vector<Strided>& to,
                 std::vector<char>& block) {
  struct Walk {
    const std::vector<Strided>& list;
    size_t i = 0, row = 0, at = 0;  // run `row` of list[i], bytes of it
    size_t left() {
      for (; i < list.size(); ++i, row = 0)
        if (row < list[i].count && list[i].run > 0) return list[i].run - at;
      return 0;
    }
    char* place() const { return list[i].data + list[i].begin + row * list[i].stride + at; }
    void advance(size_t bytes) {
      at += bytes;
      if (at == list[i].run) at = 0, ++row;
    }
  };
  if (!device.has_values()) return;
  Walk source{from}, target{to};
  for (size_t n; (n = std::min(source.left(), target.left())) > 0; source.advance(n), target.advance(n)) {
    if (!block.empty()) n = std::min(n, block.size());
    if (source.place() == target.place()) continue;
    if (!block.empty()) device.copy_out(block.data(), source.place(), n);
    device.copy_in(target.place(), block.empty() ? source.place() : block.data(), n);
  }
}

}  // namespace whale
