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

inline double seconds_now() { return seconds_since({}); }

// Seconds of a call, the median of blocks that take `budget` together. `calls_of(seconds of one)`: in a block.
// `before`: before each block. `now`: by this clock.
template <class Body, class CallsOf, class Before>
double median_seconds(Body body, CallsOf calls_of, Before before, double (*now)() = seconds_now) {
  body();
  before();
  double begin = now();
  body();
  const int calls = calls_of(now() - begin);
  std::array<double, kBlocks> seconds{};
  for (double& block : seconds) {
    before();
    begin = now();
    for (int i = 0; i < calls; ++i) body();
    block = (now() - begin) / calls;
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kBlocks / 2];
}

// Seconds of a call, of calls that go on for `window`.
template <class Body>
double sustained_seconds(Body body, double window) {
  const auto begin = std::chrono::steady_clock::now();
  int calls = 0;
  do body(), ++calls;
  while (seconds_since(begin) < window);
  return seconds_since(begin) / calls;
}

inline int calls_for(double budget, double seconds) {
  return std::clamp(static_cast<int>(budget / kBlocks / std::max(seconds, 1e-8)), 1, 100'000);
}

}  // namespace whale
