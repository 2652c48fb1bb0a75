#include "validate/progress.h"

#include <unistd.h>

#include <cstdio>
#include <string>

#include "base/format.h"

namespace whale {

RowsDone::RowsDone(size_t rows) : rows_(rows), terminal_(isatty(2) != 0) {}

void RowsDone::add() {
  ++done_;
  const auto percent = static_cast<int>(100 * done_ / rows_);
  if (!terminal_ || percent == shown_ || Clock::now() - start_ < std::chrono::seconds(1)) return;
  shown_ = percent;
  const auto marks = static_cast<size_t>(percent * 28 / 100);
  fmt::print(stderr, "\r[{}{}] row {}/{}", std::string(marks, '#'), std::string(28 - marks, '.'), done_, rows_);
}

RowsDone::~RowsDone() {
  if (shown_ >= 0) fmt::print(stderr, "\r{:60}\r", "");
}

}  // namespace whale
