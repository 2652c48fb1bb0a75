#include "base/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "base/format.h"

namespace whale {

Progress::Progress(size_t count, std::string what) : count_(count), what_(std::move(what)), terminal_(isatty(2) != 0) {}

void Progress::reach(size_t done) {
  done_ = done;
  if (!terminal_ || count_ == 0) return;
  const auto percent = static_cast<int>(100 * done_ / count_);
  if (percent == shown_ || Clock::now() - start_ < std::chrono::seconds(1)) return;
  shown_ = percent;
  const auto marks = static_cast<size_t>(percent * 28 / 100);
  fmt::print(stderr, "\r[{}{}] {} {}/{}", std::string(marks, '#'), std::string(28 - marks, '.'), what_, done_, count_);
}

Progress::~Progress() {
  if (shown_ >= 0) fmt::print(stderr, "\r{:60}\r", "");
}

}  // namespace whale
