// A run in a process of its own under a watchdog, so that a crash or a hang is a result.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace whale::test {

struct Ended {
  enum class How : uint8_t { kWell, kCrash, kHang } how = How::kWell;
  std::string said;  // by `body`; an exception: "X" and its text
};
Ended in_process(const std::function<std::string()>& body, int seconds = 60);

}  // namespace whale::test
