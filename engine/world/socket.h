// Sockets of TCP as the meeting uses them: frames of a length and bytes.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace whale {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  ~Socket();
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Throw unavailable, saying what the system said; what waits also throws Stopped (base/watch.h).
Socket listen_on(const std::string& address, uint16_t port);
// Also deadline_exceeded. `spent`: of the timeout, which are over; it is tried once in any case.
Socket connect_to(const std::string& address, uint16_t port, double timeout_seconds, double spent = 0);
bool is_ready(int fd, short events, double timeout_seconds);  // of poll(); false: not in this time
// All of it, or false: the other end is gone. One that takes nothing for `timeout_seconds` is as good as gone.
bool write_all(int fd, const void* data, size_t bytes, double timeout_seconds);

}  // namespace whale
