#include "launch_output.h"

#include <limits.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace tool {
namespace {

constexpr size_t kLongestLine = 1 << 20;  // of what is longer a part is taken for a line
constexpr size_t kLargestPipe = 1 << 20;  // as the kernel's default limit

}  // namespace

void Sink::add(std::string_view lines) {
  if (lines.empty() || lost_ != 0) return;
  if (done_ > kMost) text_.erase(0, std::exchange(done_, 0));
  text_ += lines;
  open_ = lines.back() != '\n';
}

void Sink::write() {
  if (!pending()) return;
  // A pipe that can be written to takes this much without waiting. Whole lines, where they are no longer.
  size_t size = std::min<size_t>(text_.size() - done_, PIPE_BUF);
  if (const size_t end = text_.rfind('\n', done_ + size - 1); end != text_.npos && end >= done_) size = end + 1 - done_;
  const ssize_t written = ::write(fd_, text_.data() + done_, size);
  if (written < 0 && errno != EINTR && errno != EAGAIN) lost_ = errno;
  if (written > 0) done_ += static_cast<size_t>(written), amid_ = text_[done_ - 1] != '\n';
  if (lost_ != 0 || !pending()) text_.clear(), done_ = 0;
}

void Sink::write_all() {
  while (pending()) {
    pollfd ready{fd_, POLLOUT, 0};
    ::poll(&ready, 1, -1);
    write();
  }
}

void Lines::begin_at(std::string_view first, std::function<void(std::string_view)> before) {
  first_ = std::string(first) + "\n";
  before_ = std::move(before);
}

bool Lines::wanted() const {
  return fd_ >= 0 && std::none_of(targets_.begin(), targets_.end(), [](const Target& t) { return t.sink->full(); });
}

void Lines::read() {
  const bool lost = !targets_.empty() &&
                    std::all_of(targets_.begin(), targets_.end(), [](const Target& t) { return t.sink->lost(); });
  if (lost) {
    close();
  } else {
    take();
  }
}

bool Lines::take() {
  char bytes[1 << 16];
  const ssize_t read = ::read(fd_, bytes, sizeof bytes);
  if (read < 0) return errno == EINTR;
  if (read == 0) {
    if (!rest_.empty()) give(std::exchange(rest_, ""));
    close();
    return false;
  }
  rest_.append(bytes, static_cast<size_t>(read));
  size_t whole = rest_.rfind('\n') + 1;  // 0: none
  if (whole == 0 && rest_.size() > kLongestLine) whole = rest_.size();
  if (whole > 0) {
    const std::string lines = rest_.substr(0, whole);
    rest_.erase(0, whole);
    give(lines);
  }
  return true;
}

void Lines::give(std::string_view lines) {
  while (!first_.empty() && !lines.empty()) {
    const std::string_view line = lines.substr(0, std::min(lines.find('\n'), lines.size() - 1) + 1);
    lines.remove_prefix(line.size());
    if (line == first_) {
      first_.clear();
    } else {
      before_(line);
    }
  }
  for (const auto& [sink, prefix] : targets_) {
    if (sink->open_line() && !lines.empty()) sink->add("\n");
    if (prefix.empty()) {
      sink->add(lines);
      continue;
    }
    std::string with;
    for (std::string_view left = lines; !left.empty();) {
      const std::string_view line = left.substr(0, std::min(left.find('\n'), left.size() - 1) + 1);
      with.append(prefix).append(line);
      left.remove_prefix(line.size());
    }
    if (!with.empty() && with.back() != '\n') with += '\n';
    sink->add(with);
  }
}

void Lines::finish() {
  for (size_t taken = 0; fd_ >= 0 && taken < kLargestPipe && take();) taken += 1 << 12;
  if (fd_ < 0) return;
  if (!rest_.empty()) give(std::exchange(rest_, ""));
  close();
}

void Lines::close() {
  ::close(fd_);
  fd_ = -1;
}

}  // namespace tool
