// What is found wrong by a test that looks at many things: told at its end, a few times for each of them.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <string>

#include "base/error.h"

namespace whale::test {

class Faults {
 public:
  void add(const std::string& what, const std::string& text) {
    constexpr int kTold = 2;
    if (++count_[what] <= kTold) text_ += fmt::format("\n{}: {}", what, text);
  }
  ~Faults() {
    for (const auto& [what, count] : count_) text_ += fmt::format("\n{} times: {}", count, what);
    CHECK_MESSAGE(count_.empty(), text_);
  }

 private:
  std::map<std::string, int> count_;
  std::string text_;
};

}  // namespace whale::test
