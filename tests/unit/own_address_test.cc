// Where other hosts reach this one, as far as a host can say that knows no others.
#include "world/own_address.h"

#include <doctest/doctest.h>

#include "base/error.h"
#include "world/socket.h"

using namespace whale;

TEST_CASE("own address: a number stays, a loopback's name stays a name, another name is a number") {
  CHECK(own_address("192.0.2.7") == "192.0.2.7");
  CHECK(own_address("localhost") == "localhost");
  CHECK_FALSE(own_address("").empty());
  try {
    const std::string number = own_address("no-such-name.invalid");  // of the first network, where there is one
    CHECK(number.find_first_not_of("0123456789.") == number.npos);
  } catch (const Error& e) {
    CHECK(e.message().find("'no-such-name.invalid' that other hosts could reach: set MASTER_ADDR") !=
          std::string::npos);
  }
}

TEST_CASE("own address: a free port is one to listen on") {
  for (int i = 0; i < 20; ++i) {
    const uint16_t port = free_port("127.0.0.1");
    CHECK(port >= 20000);
    CHECK(port < 30000);
    CHECK(listen_on("127.0.0.1", port));
  }
  CHECK_THROWS_AS(free_port("192.0.2.7"), Error);
}
