#include "joined.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "base/watch.h"
#include "world/socket.h"

namespace whale::test {

uint16_t free_port() {
  const Socket socket = listen_on("127.0.0.1", 0);
  sockaddr_in at{};
  socklen_t size = sizeof at;
  getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&at), &size);
  return ntohs(at.sin_port);
}

std::string ucx_folder() {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");
  for (const char* place : {"", "/../../comm/ucx"})
    if (const std::string path = (folder ? folder : "") + std::string(place);
        folder != nullptr && access((path + "/libwhale_ucx.so").c_str(), R_OK) == 0)
      return path;
  return {};
}

ProcessOptions process_of(int rank, int size, uint16_t port, const std::string& token) {
  ProcessOptions options;
  options.rank = rank, options.size = size, options.port = port, options.token = token;
  options.folder = ucx_folder();
  return options;
}

std::vector<std::shared_ptr<Worlds>> join(int ranks) {
  const uint16_t port = free_port();
  std::vector<std::shared_ptr<Worlds>> worlds(static_cast<size_t>(ranks));
  std::vector<std::exception_ptr> failures(worlds.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        worlds[r] = join_processes(process_of(r, ranks, port));
      } catch (...) {
        failures[r] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures)
    if (failure) std::rethrow_exception(failure);
  return worlds;
}

std::vector<std::optional<Error>> on_each(size_t ranks, const std::function<void(size_t)>& body) {
  std::vector<std::optional<Error>> ends(ranks);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const Error& e) {
        ends[r] = e;
      } catch (const Stopped& e) {
        ends[r] = e.error();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return ends;
}

}  // namespace whale::test
