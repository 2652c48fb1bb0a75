// Where a proof ends before its end.
#pragma once

#include <string>
#include <vector>

#include "prove/value.h"

namespace whale::proof {

// Where a device is.
struct At {
  int32_t device = -1;
  int32_t row = 0, instruction = 0;  // -1: it is over
};
struct Stopped {
  Stop stop;
  At at;  // device -1: behind the last instruction
  std::vector<Held> reads = {};
  std::vector<std::string> path = {};  // what is to be told beside what it reads
};

}  // namespace whale::proof
