#include "base/default_settings.h"

#include <doctest/doctest.h>

#include <atomic>
#include <thread>

namespace whale {
namespace {

std::string value_of(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "(none)" : value;
}

TEST_CASE("default settings stand while they do; the user's go before them, and what others set meanwhile stays") {
  setenv("WHALE_TEST_OF_USER", "mine", 1);
  {
    const DefaultSettings settings({"WHALE_TEST_OF_USER=other", "WHALE_TEST_DEFAULT=1=2"});
    CHECK(value_of("WHALE_TEST_OF_USER") == "mine");
    CHECK(value_of("WHALE_TEST_DEFAULT") == "1=2");
  }
  CHECK(value_of("WHALE_TEST_DEFAULT") == "(none)");
  {
    const DefaultSettings settings({"WHALE_TEST_DEFAULT=1", "WHALE_TEST_CHANGED=1"});
    setenv("WHALE_TEST_LATER", "theirs", 1);
    setenv("WHALE_TEST_CHANGED", "theirs", 1);
  }
  CHECK(value_of("WHALE_TEST_DEFAULT") == "(none)");
  CHECK(value_of("WHALE_TEST_LATER") == "theirs");
  CHECK(value_of("WHALE_TEST_CHANGED") == "theirs");
  CHECK(value_of("WHALE_TEST_OF_USER") == "mine");
  for (const char* name : {"WHALE_TEST_OF_USER", "WHALE_TEST_LATER", "WHALE_TEST_CHANGED"}) unsetenv(name);
}

TEST_CASE("threads read the environment while default settings come and go") {
  const std::string path = value_of("PATH");
  std::atomic<bool> over{false};
  std::atomic<int> wrong{0}, read{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i)
    readers.emplace_back([&] {
      while (!over) {
        wrong += value_of("PATH") != path || value_of("WHALE_TEST_NOBODY") != "(none)";
        ++read;
      }
    });
  for (int i = 0; i < 500 || read < 1000; ++i) {
    const DefaultSettings settings({"WHALE_TEST_A=1", "WHALE_TEST_B=2", "WHALE_TEST_C=3"});
    std::this_thread::yield();
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace whale
