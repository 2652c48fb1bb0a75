// What is done of something long, on a terminal, where it takes more than a second.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

namespace whale {

class Progress {
 public:
  Progress(size_t count, std::string what);  // "row": row 3/20
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void add() { reach(done_ + 1); }
  void reach(size_t done);

 private:
  using Clock = std::chrono::steady_clock;
  const size_t count_;
  const std::string what_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  size_t done_ = 0;
  int shown_ = -1;  // percent
};

}  // namespace whale
