// The data sheet of a GPU: what its maker says, as facts. Nothing here is fitted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace whale {

struct GpuSheet {
  std::string name;               // of the board, as its maker's tools say it
  std::string architecture;       // its kernels are alike; empty: not said
  double flops_per_second = 0;    // float32, dense, without matrix units of fewer bits
  double flops_per_second16 = 0;  // 16 bits, dense, with matrix units where it has them
  double bytes_per_second = 0;    // of its memory
  int64_t processors = 0;         // that run blocks of threads: streaming multiprocessors, compute units
  int64_t cache_bytes = 0;        // second level
  int64_t threads = 2048;         // that a processor holds
  bool heats = false;             // the board's power does not hold the clock: short runs are faster than long ones
};

// Names are compared without case, and - _ and blanks are alike.
bool same_gpu(std::string_view a, std::string_view b);

}  // namespace whale
