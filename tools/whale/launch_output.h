// What ranks print, brought together line by line.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace tool {

// A standard stream of this process, or a file, that the lines of several ranks go into. Never waits.
class Sink {
 public:
  explicit Sink(int fd) : fd_(fd) {}
  // Whole lines; the last may be without its end, which it gets before other lines come. What is added after the stream
  // was lost is dropped.
  void add(std::string_view lines);
  void write();      // as much as it takes now, some at most
  void write_all();  // waits
  int fd() const { return fd_; }
  bool pending() const { return done_ < text_.size(); }
  bool full() const { return text_.size() - done_ > kMost; }
  // Whether a line is written in part.
  bool amid() const { return pending() && amid_; }
  int lost() const { return lost_; }  // 0, or why it takes no more: an errno
  bool open_line() const { return open_; }

 private:
  static constexpr size_t kMost = 1 << 20;
  int fd_, lost_ = 0;
  bool open_ = false, amid_ = false;
  std::string text_;
  size_t done_ = 0;
};

// One stream of one rank. Its lines go into sinks, each with a prefix.
class Lines {
 public:
  Lines() = default;
  explicit Lines(int fd) : fd_(fd) {}
  void to(Sink& sink, std::string prefix = "") { targets_.push_back({&sink, std::move(prefix)}); }
  // What comes before the line `first`, and that line, are not part of the stream: such lines go to `before`.
  void begin_at(std::string_view first, std::function<void(std::string_view)> before);
  bool begun() const { return first_.empty(); }
  int fd() const { return fd_; }  // -1: has ended
  // Whether somebody takes more of it now.
  bool wanted() const;
  void read();    // once; ends where all targets are lost, as the reader of a pipe does
  void finish();  // what is in the pipe, which nobody is going to write into

 private:
  struct Target {
    Sink* sink;
    std::string prefix;
  };
  bool take();  // whether there was something
  void give(std::string_view lines);
  void close();
  int fd_ = -1;
  std::string rest_;  // a line that has not ended
  std::string first_;
  std::function<void(std::string_view)> before_;
  std::vector<Target> targets_;
};

}  // namespace tool
