// Where ranks meet: what strangers, garbage, doubles and the dead do to those who are there.
#include "world/meeting.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/watch.h"
#include "joined.h"
#include "property.h"
#include "unit/caught.h"
#include "world/socket.h"

using namespace whale;        // NOLINT
using namespace whale::test;  // NOLINT

namespace {

// What a rank heard.
struct Heard {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::pair<int, std::string>> lost;
  MeetingOptions options(int rank, int size, uint16_t port, double timeout = 20) {
    MeetingOptions o{rank, size, "127.0.0.1", port, "secret", timeout, "host 'h', process " + std::to_string(rank), {}};
    o.lost = [this](int who, const std::string& why) {
      const std::lock_guard lock(mutex);
      lost.emplace_back(who, why);
      changed.notify_all();
    };
    return o;
  }
  std::vector<std::pair<int, std::string>> all() {
    const std::lock_guard lock(mutex);
    return lost;
  }
  std::pair<int, std::string> heard(size_t n) {  // in order, from 0
    std::unique_lock lock(mutex);
    changed.wait_for(lock, std::chrono::seconds(20), [&] { return lost.size() > n; });
    return lost.size() > n ? lost[n] : std::pair<int, std::string>{-1, "nothing"};
  }
};

// The first ranks of `size` have met, each with a thread of its own; the last one leaves first.
struct Met {
  const uint16_t port = free_port();
  std::deque<Heard> heard;
  std::vector<std::shared_ptr<MeetingStore>> stores;

  explicit Met(int here, int size, double timeout = 20) : heard(static_cast<size_t>(here)), stores(heard.size()) {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < stores.size(); ++r)
      threads.emplace_back([&, r] { stores[r] = meet(heard[r].options(static_cast<int>(r), size, port, timeout)); });
    for (std::thread& thread : threads) thread.join();
  }
  ~Met() {
    while (!stores.empty()) stores.pop_back();
  }
  Met(const Met&) = delete;
  Met& operator=(const Met&) = delete;
};

// Whether the other end closes it within 20 seconds, whatever it says before.
bool is_cut_off(const Socket& socket) {
  for (char some[256];;) {
    pollfd wait{socket.fd(), POLLIN, 0};
    if (poll(&wait, 1, 20000) <= 0) return false;
    const ssize_t n = recv(socket.fd(), some, sizeof some, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno == ECONNRESET)) return true;
  }
}

// What begins a connection, as meeting.cc has it.
std::string hello(const std::string& token, uint32_t rank, uint32_t size) {
  std::string bytes = "whale m1" + token;
  bytes.resize(8 + 64);
  bytes.append(reinterpret_cast<const char*>(&rank), 4).append(reinterpret_cast<const char*>(&size), 4);
  return bytes;
}

// 0: it is here, and at that; 4: rank 0 lets one in.
std::string frame(uint32_t say, const std::string& text) {
  const uint32_t head[4] = {static_cast<uint32_t>(text.size()), 0, 0, say};
  return std::string(reinterpret_cast<const char*>(head), sizeof head) + text;
}

// Frames of a meeting and what is none, as meeting.cc has them: a length, two numbers, what is said; cut anywhere.
std::string babble(Dice& dice) {
  std::string bytes;
  for (int64_t frames = dice.below(6); frames > 0; --frames) {
    std::string text(static_cast<size_t>(dice.below(40)), static_cast<char>(dice.next()));
    const auto number = [&] { return static_cast<uint32_t>(dice.coin() ? dice.below(4) : dice.below(1ll << 32)); };
    const auto say = static_cast<uint32_t>(dice.below(12));
    uint32_t head[4] = {static_cast<uint32_t>(text.size()), number(), number(), say};
    if (dice.below(4) == 0) head[0] = number();
    if (dice.below(8) == 0) head[3] = number();
    if ((head[3] & 255) == 9) ++head[3];  // that another is lost: a rank is believed
    bytes.append(reinterpret_cast<const char*>(head), sizeof head) += text;
  }
  if (dice.below(3) == 0) bytes.resize(static_cast<size_t>(dice.below(static_cast<int64_t>(bytes.size()) + 1)));
  return bytes;
}

}  // namespace

TEST_CASE("keys that one rank puts are there for all, before and after they are asked for") {
  Met met(3, 3);
  auto& heard = met.heard;
  auto& stores = met.stores;
  const std::string large(3 << 20, 'x');
  std::thread later([&] { stores[2]->put("late", large); });
  CHECK(stores[1]->get("late", 2, 20) == large);
  CHECK(stores[0]->get("late", 2, 20) == large);
  later.join();
  stores[0]->put("empty", "");
  CHECK(stores[1]->get("empty", 0, 20).empty());
  CHECK(has(message_of([&] { stores[1]->get("never", 2, 0.05); }), "no rank has put 'never'"));
  stores[1].reset();  // says farewell: nobody is lost
  stores[2].reset();
  stores[0].reset();
  for (Heard& h : heard) CHECK(h.all().empty());
}

TEST_CASE("strangers, garbage and slow connections do not disturb those who meet") {
  const uint16_t port = free_port();
  Heard heard[2];
  const auto first = meet(heard[0].options(0, 2, port));
  std::vector<Socket> slow;
  for (int i = 0; i < 40; ++i) slow.push_back(connect_to("127.0.0.1", port, 5));  // that say nothing
  Dice dice(7);
  for (int i = 0; i < 40; ++i) {
    const Socket socket = connect_to("127.0.0.1", port, 5);
    std::string bytes =
        i % 2 == 0 ? hello("secret", 1, 2).substr(0, static_cast<size_t>(dice.between(0, 79))) : std::string();
    for (int64_t n = dice.between(80, 300); n > 0; --n) bytes += static_cast<char>(dice.below(256));
    if (i % 2 == 1) bytes[0] = 'x';
    write_all(socket.fd(), bytes.data(), bytes.size(), 5);
    if (i % 10 == 1) CHECK(is_cut_off(socket));
  }
  const auto second = meet(heard[1].options(1, 2, port));
  second->put("key", "value");
  CHECK(first->get("key", 1, 20) == "value");
  {  // one who knows the token and sends what is no frame harms himself alone
    const Socket socket = connect_to("127.0.0.1", port, 5);
    const std::string bytes = hello("wrong", 1, 2);
    write_all(socket.fd(), bytes.data(), bytes.size(), 5);
    CHECK(is_cut_off(socket));
  }
  first->put("more", "still");
  CHECK(second->get("more", 0, 20) == "still");
  for (Heard& h : heard) CHECK(h.all().empty());
}

TEST_CASE("who does not fit is not let in, and is told why") {
  const uint16_t port = free_port();
  Heard heard;
  const auto first = meet(heard.options(0, 2, port));
  const auto refused = [&](auto change) {
    MeetingOptions o = heard.options(1, 2, port);
    change(o);
    try {
      meet(o);
    } catch (const Error& e) {
      return e;
    }
    return error(Code::kUnknown, "it was let in");
  };
  const Error token = refused([](MeetingOptions& o) { o.token = "secret2"; });
  CHECK(token.code() == Code::kUnauthenticated);
  CHECK(first->turned_away() == 1);
  for (const double timeout : {0.5, 3.0}) {  // also where it is short
    const auto begin = std::chrono::steady_clock::now();
    const Error e = refused([&](MeetingOptions& o) { o.token = "secret2", o.timeout_seconds = timeout; });
    CHECK(e.code() == Code::kUnauthenticated);
    CHECK(has(e.message(), "the token of the job (WHALE_JOB_TOKEN)"));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(400));
  }
  CHECK(first->turned_away() == 3);
  const Error size = refused([](MeetingOptions& o) { o.size = 3; });
  CHECK(size.code() == Code::kFailedPrecondition);
  CHECK(has(size.message(), "rank 1 says that there are 3 ranks, rank 0 that there are 2"));
  const auto second = meet(heard.options(1, 2, port));
  const Error twice = refused([](MeetingOptions&) {});
  CHECK(twice.code() == Code::kFailedPrecondition);
  CHECK(has(twice.message(), "another process is rank 1 already"));
  const Error nobody = refused([&](MeetingOptions& o) { o.port = free_port(), o.timeout_seconds = 0.2; });
  CHECK(nobody.code() == Code::kDeadlineExceeded);
  CHECK(nobody.where().rank == 0);
  const Error taken = refused([](MeetingOptions& o) { o.rank = 0; });
  CHECK(taken.code() == Code::kUnavailable);
  CHECK(has(taken.message(), "cannot listen"));
  second->put("key", "value");
  CHECK(first->get("key", 1, 20) == "value");
}

TEST_CASE("a rank that ends without a farewell, or is silent, is lost to all others") {
  Met met(2, 4, 4);
  const uint16_t port = met.port;
  auto& heard = met.heard;
  auto& second = met.stores[1];
  std::atomic<bool> ended{false};
  std::string why;
  std::thread waits([&] {
    why = message_of([&] { second->get("never", 2, 100); });
    ended = true;
  });
  {
    const Socket third = connect_to("127.0.0.1", port, 5);
    const std::string bytes = hello("secret", 2, 4);
    write_all(third.fd(), bytes.data(), bytes.size(), 5);
    pollfd wait{third.fd(), POLLIN, 0};
    REQUIRE(poll(&wait, 1, 5000) == 1);  // it is let in
  }
  for (Heard& h : heard) CHECK(h.heard(0) == std::pair<int, std::string>{2, "rank 2 is lost: its process has ended"});
  waits.join();
  CHECK(has(why, "rank 2 is lost"));
  const Socket silent = connect_to("127.0.0.1", port, 5);
  const std::string bytes = hello("secret", 3, 4) + frame(0, "in step 7, at matmul of h");
  write_all(silent.fd(), bytes.data(), bytes.size(), 5);
  CHECK(is_cut_off(silent));
  const std::string last = heard[1].heard(1).second;
  CHECK_MESSAGE(last.starts_with("rank 3 is lost: it has not been heard for 4 seconds; "), last);
  CHECK_MESSAGE(last.ends_with(" seconds before, it was in step 7, at matmul of h"), last);
}

TEST_CASE("a rank that one does not reach is lost where the meeting names none in time") {
  Met met(3, 3, 2);
  auto& heard = met.heard;
  auto& stores = met.stores;
  const auto begin = std::chrono::steady_clock::now();
  CHECK(stores[1]->doubt(2, "no way to it"));
  for (Heard& h : heard)  // the doubted one too; it may only have been cut off from this one
    CHECK(h.heard(0) == std::pair<int, std::string>{
                            2, "rank 2 (host 'h', process 2) is lost: rank 1 does not reach it: no way to it"});
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::seconds(2));
}

TEST_CASE("who was only late with an answer is not lost") {
  std::atomic<bool> silent{true};
  Met met(3, 3, 2);
  CHECK(met.stores[1]->doubt(2, "it says nothing", 1.5, [&] { return silent.load(); }));
  silent = false;
  std::this_thread::sleep_for(std::chrono::seconds(3));
  for (Heard& h : met.heard) CHECK(h.all().empty());
  CHECK(met.stores[1]->doubt(2, "it said nothing", 1.5, [] { return false; }));
  CHECK(met.stores[1]->doubt(2, "it says nothing again", 1.5, [] { return true; }));  // another doubt, from then on
  CHECK(met.heard[0].heard(0).second.ends_with("rank 1 does not reach it: it says nothing again"));
}

TEST_CASE("a rank that has left is not lost, whatever was thought of it") {
  Met met(3, 3, 2);
  CHECK(met.stores[1]->doubt(2, "the connection was reset"));
  met.stores[2].reset();
  std::this_thread::sleep_for(std::chrono::seconds(3));
  for (Heard& h : met.heard) CHECK(h.all().empty());
}

TEST_CASE("all ranks may come to the door at once") {
  constexpr uint32_t kSize = 201;
  const uint16_t port = free_port();
  Heard heard;
  const auto first = meet(heard.options(0, kSize, port));
  std::vector<Socket> others;
  for (uint32_t r = 1; r < kSize; ++r) others.push_back(connect_to("127.0.0.1", port, 20));
  for (uint32_t r = 1; r < kSize; ++r) {
    const std::string bytes = hello("secret", r, kSize);
    write_all(others[r - 1].fd(), bytes.data(), bytes.size(), 5);
  }
  for (const Socket& socket : others) {
    uint32_t head[4] = {};
    REQUIRE(is_ready(socket.fd(), POLLIN, 20));
    REQUIRE(recv(socket.fd(), head, sizeof head, 0) == sizeof head);
    REQUIRE(head[3] == 4);  // welcome
  }
  CHECK(heard.all().empty());
}

TEST_CASE("who comes while others still meet there waits, may be interrupted, and is told") {
  Met met(2, 2);
  met.stores[1].reset();
  Heard again;
  CHECK(has(message_of([&] { meet(again.options(1, 2, met.port, 1)); }, {Code::kDeadlineExceeded}),
            "has not left the meeting before this one in 1 seconds"));
  std::atomic<bool> cancelled{false};
  std::thread cancels([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    cancelled = true;
  });
  const Watch watch("meeting", &cancelled, 0);
  CHECK_THROWS_AS(meet(again.options(1, 2, met.port, 1000)), Stopped);
  cancels.join();
}

TEST_CASE("a rank that ended because another is lost is not taken for the lost one") {
  Met met(2, 4, 3);
  const uint16_t port = met.port;
  auto& heard = met.heard;
  auto& second = met.stores[1];
  const Socket third = connect_to("127.0.0.1", port, 5);
  const std::string bytes = hello("secret", 2, 4);
  write_all(third.fd(), bytes.data(), bytes.size(), 5);
  pollfd wait{third.fd(), POLLIN, 0};
  REQUIRE(poll(&wait, 1, 5000) == 1);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // rank 2 is silent from now on
  CHECK(second->doubt(3, "the connection was reset"));
  CHECK(heard[1].heard(0) == std::pair<int, std::string>{2, "rank 2 is lost: it has not been heard for 3 seconds"});
  std::this_thread::sleep_for(std::chrono::seconds(3));
  CHECK(heard[1].all().size() == 1);
}

TEST_CASE("where rank 0 ends, the others know") {
  Met met(2, 2);
  auto& heard = met.heard;
  auto &first = met.stores[0], &second = met.stores[1];
  first.reset();
  CHECK(has(message_of([&] { second->get("key", 0, 20); }), "rank 0 has left"));
  CHECK(heard[1].all().empty());
  while (second->doubt(0, "nobody there")) std::this_thread::yield();  // nothing is said any more
}

TEST_CASE("where rank 0 has died, nothing is waited for") {
  const uint16_t port = free_port();
  Heard heard;
  std::shared_ptr<MeetingStore> store;
  {
    const Socket listener = listen_on("127.0.0.1", port);
    std::thread other([&] { store = meet(heard.options(1, 3, port)); });
    pollfd wait{listener.fd(), POLLIN, 0};
    REQUIRE(poll(&wait, 1, 20000) == 1);
    const Socket socket(accept(listener.fd(), nullptr, nullptr));
    const std::string welcome = frame(4, "") + frame(0, "in no run yet");
    write_all(socket.fd(), welcome.data(), welcome.size(), 5);
    other.join();
  }
  const std::string why = heard.heard(0).second;
  CHECK_MESSAGE(why.starts_with("rank 0 is lost: its process has ended; "), why);
  CHECK_MESSAGE(why.ends_with(" seconds before, it was in no run yet"), why);
  CHECK(message_of([&] { store->get("key", 2, 1e6); }) == why);
}

TEST_CASE("a key of a rank that has left does not come, and is not waited for") {
  Met met(2, 2);
  auto& heard = met.heard;
  auto &first = met.stores[0], &second = met.stores[1];
  second->put("there", "value");
  std::string why;
  std::thread waits([&] { why = message_of([&] { first->get("never", 1, 100); }); });
  CHECK(first->get("there", 1, 20) == "value");
  second.reset();
  waits.join();
  CHECK(why == "rank 1 has left the meeting of the ranks");
  CHECK(message_of([&] { first->get("later", 1, 100); }) == why);
  CHECK(first->get("there", 1, 20) == "value");
  CHECK(heard[0].all().empty());
}

TEST_CASE("why a rank leaves too early is told to those who wait for it, with the rank at fault") {
  for (const int leaves : {0, 1}) {
    CAPTURE(leaves);
    Met met(3, 4);
    auto& stores = met.stores;
    stores[leaves]->leaves_for(error(Code::kDeadlineExceeded, "rank 3 of 4 has not come in 2 seconds").at_rank(3));
    std::thread waits([&] {
      try {
        (void)stores[2]->get("never", leaves == 0 ? 3 : 1, 20);
        FAIL("it came");
      } catch (const Error& e) {
        CHECK(e.code() == Code::kUnavailable);
        CHECK(e.where().rank == 3);
        CHECK(e.message() ==
              fmt::format("rank {} has left the meeting of the ranks: rank 3 of 4 has not come in 2 seconds", leaves));
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    stores[leaves].reset();
    waits.join();
    CHECK(has(message_of([&] { (void)stores[2]->get("never", leaves == 0 ? 3 : 1, 20); }), "rank 3 of 4 has not come"));
  }
}

TEST_CASE("who has left is known to have, and nobody else") {
  Met met(3, 3);
  auto& heard = met.heard;
  auto& stores = met.stores;
  const auto leaves = [&](int who, int for_whom) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!stores[for_whom]->has_left(who) && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return stores[for_whom]->has_left(who);
  };
  CHECK_FALSE(stores[0]->has_left(1));
  stores[1].reset();
  CHECK(leaves(1, 0));
  CHECK(leaves(1, 2));
  CHECK_FALSE(stores[2]->has_left(0));
  std::thread last([&] { stores[0].reset(); });  // its listener stays until all have left
  CHECK(leaves(0, 2));
  stores[2].reset();
  last.join();
  for (Heard& h : heard) CHECK(h.all().empty());
}

TEST_CASE("ranks meet again at the same address, while rank 0 has not left yet") {
  const uint16_t port = free_port();
  Heard heard[2];
  std::thread other([&] {
    meet(heard[1].options(1, 2, port))->put("key", "1");
    meet(heard[1].options(1, 2, port))->put("key", "2");
  });
  auto first = meet(heard[0].options(0, 2, port));
  CHECK(first->get("key", 1, 20) == "1");
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the other one is at the door
  first.reset();
  first = meet(heard[0].options(0, 2, port));
  CHECK(first->get("key", 1, 20) == "2");
  other.join();
  for (Heard& h : heard) CHECK(h.all().empty());
}

TEST_CASE("what listens there and is no meeting is said to be something else") {
  const uint16_t port = free_port();
  const Socket listener = listen_on("127.0.0.1", port);
  std::thread answers([&] {
    pollfd wait{listener.fd(), POLLIN, 0};
    if (poll(&wait, 1, 20000) != 1) return;
    const Socket socket(accept(listener.fd(), nullptr, nullptr));
    write_all(socket.fd(), "SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n", 32, 5);
    char some[256];
    while (recv(socket.fd(), some, sizeof some, 0) > 0) {
    }
  });
  Heard heard;
  CHECK(has(message_of([&] { meet(heard.options(1, 2, port)); }, {Code::kUnauthenticated}),
            "something else than libwhale"));
  answers.join();
}

TEST_CASE("property: whatever a rank or a stranger says, the others meet") {
  CHECK(holds("babble to rank 0", 60, [](uint64_t seed) {
    Dice dice(seed);
    const uint16_t port = free_port();
    Heard heard[2];
    std::shared_ptr<Store> first, second;
    std::thread other([&] { second = meet(heard[1].options(1, 3, port)); });
    first = meet(heard[0].options(0, 3, port));
    other.join();
    const bool member = dice.coin();
    {
      const Socket socket = connect_to("127.0.0.1", port, 20);
      std::string all = member ? hello("secret", 2, 3) : std::string();
      all += babble(dice);
      write_all(socket.fd(), all.data(), all.size(), 20);
      if (dice.coin()) shutdown(socket.fd(), SHUT_WR);
      second->put("key", "value");
      RC_ASSERT(first->get("key", 1, 20) == "value");
    }
    first->put("after", "it");
    RC_ASSERT(second->get("after", 0, 20) == "it");
    second.reset(), first.reset();
    for (Heard& h : heard)  // a rank that ends without a farewell is lost; of 0 and 1 nothing is said
      for (const auto& [rank, why] : h.all()) RC_ASSERT(rank == 2 && member);
  }));
  CHECK(holds("babble from rank 0", 60, [](uint64_t seed) {
    Dice dice(seed);
    const uint16_t port = free_port();
    const Socket listener = listen_on("127.0.0.1", port);
    std::thread answers([&] {
      pollfd wait{listener.fd(), POLLIN, 0};
      if (poll(&wait, 1, 20000) != 1) return;
      const Socket socket(accept(listener.fd(), nullptr, nullptr));
      const uint32_t welcome[4] = {0, 0, 0, 4};
      std::string all(reinterpret_cast<const char*>(welcome), sizeof welcome);
      all += babble(dice);
      write_all(socket.fd(), all.data(), all.size(), 20);
    });
    Heard heard;
    try {
      const std::shared_ptr<Store> store = meet(heard.options(1, 3, port));
      store->put("key", "value");
      store->get("never", 0, 20);
    } catch (const Error&) {  // one of some kind, soon
    }
    answers.join();
  }));
}
