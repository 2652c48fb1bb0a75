#include "world/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/watch.h"

namespace whale {
namespace {

using Clock = std::chrono::steady_clock;

std::string reason() { return std::strerror(errno); }  // NOLINT(concurrency-mt-unsafe): of glibc, which is

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& address, uint16_t port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const int failed = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (failed != 0)
    throw error(Code::kUnavailable, "the address '{}' of rank 0 is not found ({}); set MASTER_ADDR", address,
                gai_strerror(failed));
  return {found, freeaddrinfo};
}

void set(int fd, int level, int option) {
  const int on = 1;
  setsockopt(fd, level, option, &on, sizeof on);
}

// The name of this host is often one of 127.0.1.1 in its own /etc/hosts: others would not reach that.
bool is_own_name_for_itself(const std::string& address, const addrinfo& found) {
  if (found.ai_family != AF_INET || address == "localhost" || address.starts_with("127.")) return false;
  return ntohl(reinterpret_cast<const sockaddr_in*>(found.ai_addr)->sin_addr.s_addr) >> 24 == 127;
}

bool is_own(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t a = sizeof here, b = sizeof there;
  return getsockname(fd, reinterpret_cast<sockaddr*>(&here), &a) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&there), &b) == 0 && a == b && std::memcmp(&here, &there, a) == 0;
}

double seconds_to(Clock::time_point end) { return std::chrono::duration<double>(end - Clock::now()).count(); }

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

Socket listen_on(const std::string& address, uint16_t port) {
  Addresses all = resolve(address, port, AI_PASSIVE);
  if (is_own_name_for_itself(address, *all)) all = resolve("0.0.0.0", port, AI_PASSIVE);
  std::string why;
  for (const addrinfo* a = all.get(); a != nullptr; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
    if (socket) set(socket.fd(), SOL_SOCKET, SO_REUSEADDR);
    if (socket && bind(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 && listen(socket.fd(), SOMAXCONN) == 0)
      return socket;
    why = reason();
  }
  throw error(Code::kUnavailable,
              "rank 0 cannot listen on {}:{} ({}); give an address of this host (MASTER_ADDR) and a port that is free "
              "(MASTER_PORT)",
              address, port, why);
}

Socket connect_to(const std::string& address, uint16_t port, double timeout_seconds, double spent) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(std::max(timeout_seconds - spent, 0.1)));
  std::string why = "no answer";
  for (auto pause = std::chrono::milliseconds(2);; pause = std::min(pause * 2, std::chrono::milliseconds(250))) {
    try {
      const Addresses all = resolve(address, port, 0);
      for (const addrinfo* a = all.get(); a != nullptr; a = a->ai_next) {
        Socket socket(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol));
        if (!socket) continue;
        int failed = connect(socket.fd(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
        if (failed == EINPROGRESS) {
          socklen_t size = sizeof failed;
          if (!is_ready(socket.fd(), POLLOUT, std::min(seconds_to(end), 5.0)))
            failed = ETIMEDOUT;
          else
            getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &failed, &size);
        }
        // In the range of ports that outgoing connections get, one may have found itself.
        if (failed == 0 && is_own(socket.fd())) failed = ECONNREFUSED;
        if (failed == 0) {
          set(socket.fd(), IPPROTO_TCP, TCP_NODELAY);
          return socket;
        }
        errno = failed;
        why = reason();
      }
    } catch (const Error& e) {  // names of hosts that start come late
      why = e.message();
    }
    if (seconds_to(end) <= 0) break;
    Watch::look();
    std::this_thread::sleep_for(pause);
  }
  throw error(
      Code::kDeadlineExceeded,
      "rank 0 is not reached at {}:{} in {:.3g} seconds ({}): is it started, and are address and port those of its "
      "host?",
      address, port, timeout_seconds, why)
      .at_rank(0);
}

bool is_ready(int fd, short events, double timeout_seconds) {
  const auto end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_seconds));
  for (double left = timeout_seconds; left > 0; left = seconds_to(end)) {
    pollfd wait{fd, events, 0};
    const double slice = std::min(left, std::chrono::duration<double>(kWatchEvery).count());
    if (poll(&wait, 1, static_cast<int>(slice * 1000) + 1) > 0) return true;
    Watch::look();
  }
  return false;
}

bool write_all(int fd, const void* data, size_t bytes, double timeout_seconds) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(fd, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      from += n, bytes -= static_cast<size_t>(n);
      continue;
    }
    if (n < 0 && errno == EINTR) continue;
    if (n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return false;
    pollfd wait{fd, POLLOUT, 0};
    if (poll(&wait, 1, static_cast<int>(timeout_seconds * 1000)) <= 0) return false;
  }
  return true;
}

}  // namespace whale
