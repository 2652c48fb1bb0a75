#include "world/own_address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <random>

#include "base/error.h"
#include "world/socket.h"

namespace whale {
namespace {

// Empty: none.
std::string number(const sockaddr* address) {
  if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return {};
  std::array<char, 256> text{};
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

bool is_loopback(const std::string& number) { return number.starts_with("127.") || number == "::1"; }

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

}  // namespace

std::string own_address(std::string name) {
  if (name.empty()) {
    std::array<char, 256> own{};
    if (gethostname(own.data(), own.size() - 1) == 0) name = own.data();
  }
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &found) == 0) {
    const Addresses all(found, freeaddrinfo);
    for (const addrinfo* a = all.get(); a != nullptr; a = a->ai_next)
      if (std::string known = number(a->ai_addr); !known.empty() && !is_loopback(known)) return known;
    return name;
  }
  ifaddrs* networks = nullptr;
  if (getifaddrs(&networks) == 0) {
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> all(networks, freeifaddrs);
    for (const ifaddrs* n = all.get(); n != nullptr; n = n->ifa_next)
      if ((n->ifa_flags & IFF_UP) != 0 && (n->ifa_flags & IFF_LOOPBACK) == 0 && n->ifa_addr != nullptr &&
          n->ifa_addr->sa_family == AF_INET)
        return number(n->ifa_addr);
  }
  throw error(Code::kUnavailable,
              "rank 0 finds no address of its host '{}' that other hosts could reach: set MASTER_ADDR to one on rank 0",
              name);
}

uint16_t free_port(const std::string& address) {
  std::random_device random;
  for (int tries = 0;; ++tries) {
    const auto port = static_cast<uint16_t>(20000 + random() % 10000);
    try {
      const Socket free = listen_on(address, port);
      return port;
    } catch (const Error&) {
      if (tries == 100) throw;
    }
  }
}

}  // namespace whale
