// How long something takes.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>

namespace whale {

inline constexpr size_t kBlocks = 7;

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Seconds of a call, the median of blocks that take `budget` together. `calls_of(seconds of one)`: in a block.
// `before`: before each block.
template <class Body, class CallsOf, class Before>
double median_seconds(Body body, CallsOf calls_of, Before before) {
  body();
  before();
  auto begin = std::chrono::steady_clock::now();
  body();
  const int calls = calls_of(seconds_since(begin));
  std::array<double, kBlocks> seconds{};
  for (double& block : seconds) {
    before();
    begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) body();
    block = seconds_since(begin) / calls;
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kBlocks / 2];
}

inline int calls_for(double budget, double seconds) {
  return std::clamp(static_cast<int>(budget / kBlocks / std::max(seconds, 1e-8)), 1, 100'000);
}

}  // namespace whale
