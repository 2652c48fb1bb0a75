// Ranks that are processes, of which one dies, fails or cannot write at any moment of a save of all.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <ctime>

#include "base/philox.h"
#include "checkpoint/save_lock.h"
#include "checkpoint_ranks_kit.h"
#include "unit/caught.h"

using namespace whale;       // NOLINT
using namespace whale::kit;  // NOLINT
namespace fs = std::filesystem;

namespace {

// How many points the save of a rank has, with those at which a value is read.
struct Points {
  int at = 0, stop = -1;
  std::function<void(std::string_view)> act;  // at point `stop`
  void pass(std::string_view name) {
    if (at++ == stop) act(name);
  }
};

// A save of all ranks, where `act` is done at the stop-th point of one rank.
std::vector<std::string> save(const std::string& at, int64_t value, int ranks, int rank = -1, int stop = -1,
                              const std::function<void(std::string_view)>& act = {}) {
  return in_processes(ranks, [&](Peers& peers) {
    Points points{0, peers.rank() == rank ? stop : -1, act};
    write_share(
        at, value, peers, [&](std::string_view name) { points.pass(name); }, [&] { points.pass("read"); });
  });
}

void save_alone_or_not(const std::string& at, int64_t value, int ranks) {
  if (ranks == 1) return write(at, value);
  for (const std::string& end : save(at, value, ranks)) REQUIRE(end == "");
}

// Of a save that replaces one of `before` ranks.
int points_of(int ranks, int rank, int before) {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  save_alone_or_not(at, 1, before);
  int* const count =
      static_cast<int*>(::mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  in_processes(ranks, [&](Peers& peers) {
    const auto pass = [&] { *count += peers.rank() == rank; };
    write_share(
        at, 2, peers, [&](std::string_view) { pass(); }, pass);
  });
  const int n = *count;
  ::munmap(count, sizeof(int));
  REQUIRE(n > 4);
  return n;
}

}  // namespace

TEST_CASE("checkpoint of ranks: written by processes, replaced by other numbers of them, loaded by any") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  put(folder.path / "mine", "mine");
  int64_t value = 1;
  for (const int ranks : {2, 1, 3, 2, 5, 1}) {
    save_alone_or_not(at, value, ranks);
    CHECK(read(at) == value++);
    CHECK(names_in(at).size() == 2 * static_cast<size_t>(ranks) + 1);
    CHECK(open_checkpoint(at).index.ranks == ranks);
  }
}

TEST_CASE("checkpoint of ranks: one that dies at any point loses nothing, and nobody waits for it") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  int64_t deaths = 0, kept = 0;
  for (const int ranks : {2, 3})
    for (const int rank : {0, ranks - 1})
      for (const int before : {1, ranks}) {  // that wrote what is replaced
        save_alone_or_not(at, 1, before);
        put(at + "/tokenizer.json", "mine");
        const int points = points_of(ranks, rank, before);
        bool placed = false;
        for (int stop = 0; stop < points; ++stop) {
          CAPTURE(ranks);
          CAPTURE(rank);
          CAPTURE(before);
          CAPTURE(stop);
          save_alone_or_not(at, 1, before);
          for (int again = 0; again < 2; ++again) {  // the second one dies on what the first one left
            const std::vector<std::string> ends =
                save(at, 2, ranks, rank, stop, [](std::string_view) { ::raise(SIGKILL); });
            if (again == 1 && ends[rank].empty()) continue;  // it had less to do
            REQUIRE(ends[rank] == "killed");
            const int64_t found = read(at);
            REQUIRE((found == 1 || found == 2));
            placed |= found == 2;
            kept += found == 1;
            if (again == 0) REQUIRE(found == (placed ? 2 : 1));
            for (size_t r = 0; r < ends.size(); ++r) {
              CAPTURE(ends[r]);
              if (static_cast<int>(r) == rank) continue;
              // Who is not rank 0 may die when all is said.
              CHECK(has(ends[r], fmt::format("rank {} is lost", rank == 0 ? 0 : r == 0 ? rank : 0)));
            }
            ++deaths;
          }
          CHECK(content(at + "/tokenizer.json") == "mine");
          save_alone_or_not(at, 3, stop % 3 + 1);
          CHECK(read(at) == 3);
          CHECK(names_in(at).size() == 2 * static_cast<size_t>(stop % 3 + 1) + 2);  // what the dead left is tidied
          save_alone_or_not(at, 1, before);
          placed = false;
        }
      }
  MESSAGE(deaths, " deaths, ", kept, " of them before the moment that decides");
  CHECK(kept > deaths / 4);
  CHECK(kept < deaths);
}

TEST_CASE("checkpoint of ranks: one that fails at any point is named on all, and leaves the previous one") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  for (const int ranks : {2, 3})
    for (const int rank : {0, ranks - 1}) {
      const int points = points_of(ranks, rank, ranks);
      save_alone_or_not(at, 1, ranks);
      for (int stop = 0; stop < points; ++stop) {
        CAPTURE(rank);
        CAPTURE(stop);
        save_alone_or_not(at, 1, ranks);
        const std::vector<std::string> ends = save(at, 2, ranks, rank, stop, [](std::string_view point) {
          throw error(Code::kDataLoss, "injected at {}", point);
        });
        for (const std::string& end : ends) {
          CAPTURE(end);
          CHECK(has(end, fmt::format("rank {}: injected at ", rank)));
          CHECK(end == ends[0]);
        }
        const bool placed =
            has(ends[0], "in place") || has(ends[0], "name") || has(ends[0], "last sync") || has(ends[0], "unlock");
        CHECK(read(at) == (placed ? 2 : 1));
        if (!placed) CHECK(names_in(at).size() == 2 * static_cast<size_t>(ranks) + 1);
      }
    }
  const std::string fresh = folder.path / "first" / "ckpt";  // a first save that fails leaves no directory
  save(fresh, 1, 2, 1, 1, [](std::string_view) { throw error(Code::kDataLoss, "injected"); });
  CHECK_FALSE(fs::exists(folder.path / "first"));
}

TEST_CASE("checkpoint of ranks: one whose disk is full is named on all") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  save_alone_or_not(at, 1, 3);
  for (const int full : {0, 1, 2}) {
    const std::vector<std::string> ends = in_processes(3, [&](Peers& peers) {
      if (peers.rank() == full) {
        std::signal(SIGXFSZ, SIG_IGN);
        const rlimit small{600, RLIM_INFINITY};
        setrlimit(RLIMIT_FSIZE, &small);
      }
      write_share(at, 2, peers);
    });
    for (const std::string& end : ends) {
      CAPTURE(end);
      CHECK(has(end, fmt::format("rank {}: cannot write '{}/model-", full, at)));
      CHECK(has(end, "File too large"));
    }
    CHECK(read(at) == 1);
    CHECK(names_in(at).size() == 7);
  }
}

TEST_CASE("checkpoint of ranks: a rank that sees another directory is told so") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  save_alone_or_not(at, 1, 2);
  fs::create_directory(folder.path / "other");
  for (const char* other : {"other", "none"}) {
    const std::vector<std::string> ends = in_processes(
        2, [&](Peers& peers) { write_share(peers.rank() == 1 ? (folder.path / other).string() : at, 2, peers); });
    for (const std::string& end : ends) CHECK_MESSAGE(has(end, "rank 1: "), end);
    for (const std::string& end : ends)
      CHECK_MESSAGE(has(end, std::string(other) == "none" ? "none" : "is not the directory that rank 0"), end);
    CHECK(read(at) == 1);
    CHECK(names_in(at).size() == 5);
    const std::vector<std::string> loads = in_processes(
        2, [&](Peers& peers) { open_checkpoint(peers.rank() == 1 ? (folder.path / other).string() : at, peers); });
    for (const std::string& end : loads) CHECK_MESSAGE(has(end, "rank 1: "), end);
  }
  CHECK(names_in(folder.path).size() == 2);
}

TEST_CASE("checkpoint of ranks: kill -9 of one of three at 100 random moments") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  save_alone_or_not(at, 1, 3);
  int64_t one = INT64_MAX;  // the fastest save, in microseconds
  for (int i = 0; i < 4; ++i) {
    const auto began = std::chrono::steady_clock::now();
    save_alone_or_not(at, 1, 3);
    const auto took = std::chrono::steady_clock::now() - began;
    one = std::min<int64_t>(one, std::chrono::duration_cast<std::chrono::microseconds>(took).count());
  }
  const RandomStream random(1, hash_name("kill a rank"), 0);
  int64_t inside = 0, value = 1;
  for (uint64_t k = 0; k < 100; ++k) {
    const auto victim = static_cast<size_t>(random.word(2 * k) % 3);
    const auto moment = static_cast<int64_t>(random.word(2 * k + 1) % static_cast<uint64_t>(one + 1));
    const std::vector<std::string> ends = in_processes(
        3, [&](Peers& peers) { write_share(at, value + 1, peers); },
        [&](const std::vector<pid_t>& children) {
          const timespec time{moment / 1'000'000, moment % 1'000'000 * 1000};
          ::nanosleep(&time, nullptr);
          ::kill(children[victim], SIGKILL);
        });
    for (const std::string& end : ends) REQUIRE_FALSE(end.starts_with("signal"));
    inside += ends[victim] == "killed";
    const int64_t found = read(at);
    REQUIRE((found == value || found == value + 1));
    bool all = true;
    for (const std::string& end : ends) all = all && end.empty();
    if (all) REQUIRE(found == value + 1);
    save_alone_or_not(at, ++value, 3);
    REQUIRE(read(at) == value);
    REQUIRE(names_in(at).size() == 7);
  }
  CHECK(inside > 5);
  MESSAGE(inside, " of 100 kills hit a save in the middle");
}

TEST_CASE("checkpoint of ranks: files of somebody else are not replaced, and left files of a dead save are not read") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  fs::create_directory(at);
  put(at + "/model-00002-of-00002.safetensors", "mine");
  for (const std::string& end : save(at, 1, 2)) CHECK_MESSAGE(has(end, "is not part of a checkpoint"), end);
  CHECK(content(at + "/model-00002-of-00002.safetensors") == "mine");
  save_alone_or_not(at, 1, 1);  // which needs other names
  for (const std::string& end : save(at, 2, 2)) CHECK_MESSAGE(has(end, "rank 0: "), end);
  CHECK(read(at) == 1);
  save_alone_or_not(at, 2, 3);
  CHECK(content(at + "/model-00002-of-00002.safetensors") == "mine");
  CHECK(names_in(at).size() == 8);
}
