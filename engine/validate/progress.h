// Rows that are done, on a terminal, where it takes more than a second.
#pragma once

#include <chrono>
#include <cstddef>

namespace whale {

class RowsDone {
 public:
  explicit RowsDone(size_t rows);
  ~RowsDone();
  RowsDone(const RowsDone&) = delete;
  RowsDone& operator=(const RowsDone&) = delete;
  void add();

 private:
  using Clock = std::chrono::steady_clock;
  const size_t rows_;
  const bool terminal_;
  const Clock::time_point start_ = Clock::now();
  size_t done_ = 0;
  int shown_ = -1;  // percent
};

}  // namespace whale
