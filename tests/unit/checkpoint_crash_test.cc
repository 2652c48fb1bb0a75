// Checkpoints and files from many threads and processes at once, and processes that die at any moment.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <csignal>
#include <ctime>
#include <thread>

#include "base/file.h"
#include "base/philox.h"
#include "checkpoint_kit.h"

using namespace whale;       // NOLINT
using namespace whale::kit;  // NOLINT
namespace fs = std::filesystem;

namespace {

constexpr int64_t kRounds = 1000;

void nap(int64_t microseconds) {
  const timespec time{microseconds / 1'000'000, microseconds % 1'000'000 * 1000};
  ::nanosleep(&time, nullptr);
}

// Saves, and lets others run in the middle; true: OK, false: ABORTED. Anything else is thrown.
bool saved(const std::string& at, int64_t value) {
  try {
    write(at, value, [&](std::string_view point) {
      if (point == "index") nap(20);
    });
    return true;
  } catch (const Error& e) {
    if (e.code() != Code::kAborted) throw;
    return false;
  }
}

// Memory that children share with their parent.
template <class T>
struct Shared {
  T* at = static_cast<T*>(::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ~Shared() { ::munmap(at, sizeof(T)); }
  T* operator->() const { return at; }
};

template <class F>
pid_t in_child(F&& f) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  try {
    f();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "child: %s\n", e.what());
    ::_exit(1);
  }
  ::_exit(0);
}
int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace

TEST_CASE("checkpoint: two threads save into one directory, a third loads: always the last good one") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  put(at + "/tokenizer.json", "mine");
  std::barrier both(2);
  std::atomic<int64_t> aborted{0}, wrong{0};
  std::atomic<bool> end{false};
  std::atomic<int64_t> loads{0};
  bool ok[2] = {};
  const auto writer = [&](int64_t me) {
    for (int64_t round = 1; round <= kRounds; ++round) {
      both.arrive_and_wait();
      try {
        ok[me] = saved(at, 2 * round + me);
      } catch (...) {
        ++wrong;
        ok[me] = false;
      }
      aborted += !ok[me];
      both.arrive_and_wait();
      if (me != 0) continue;
      const int64_t found = open_checkpoint(at).index.meta.iteration;
      wrong += !((found == 2 * round && ok[0]) || (found == 2 * round + 1 && ok[1]));
    }
  };
  std::thread reader([&] {
    while (!end) {
      try {
        const Checkpoint c = open_checkpoint(at);
        c.verify();
        float first[2];
        c.model->read(*c.model->find("w"), 0, &first[0], 4);
        c.optimizer->read(*c.optimizer->find("w/m"), 0, &first[1], 4);
        wrong += first[0] != first[1] || first[0] != static_cast<float>(c.index.meta.iteration);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "load: %s\n", e.what());
        ++wrong;
      }
      ++loads;
    }
  });
  std::thread other(writer, 1);
  writer(0);
  other.join();
  end = true;
  reader.join();
  CHECK(wrong == 0);
  CHECK(aborted > 0);
  CHECK(loads > 0);
  CHECK(read(at) / 2 == kRounds);
  CHECK(names_in(at).size() == 4);
  MESSAGE(aborted.load(), " of ", 2 * kRounds, " saves were second and aborted; ", loads.load(), " loads beside them");
}

TEST_CASE("checkpoint: the second of two saves is told, and does nothing") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  fs::create_directory_symlink(at, folder.path / "link");
  write(at, 1);
  write(at, 2, [&](std::string_view point) {
    if (point == "directory" || point == "lock") return;
    const std::vector<std::string> before = names_in(at);
    const Error e = error_of([&] { write(folder.path / "link", 3); });
    CHECK(says(e, Code::kAborted, "another save"));
    if (point == "exchange") CHECK(says(e, Code::kAborted, fmt::format("(process {})", ::getpid())));
    CHECK(names_in(at) == before);
  });
  CHECK(read(at) == 2);
}

TEST_CASE("checkpoint: two processes save into one directory: always the last good one") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  struct State {
    std::atomic<int64_t> arrived, aborted;
    std::atomic<bool> ok[2];
  };
  const Shared<State> state;
  const auto meet = [&](int64_t count) {  // both processes
    ++state->arrived;
    while (state->arrived < 2 * count) nap(1);
  };
  int64_t wrong = 0;
  const auto run = [&](int64_t me) {
    for (int64_t round = 1; round <= kRounds; ++round) {
      meet(3 * round - 2);
      const bool ok = saved(at, 2 * round + me);
      state->ok[me] = ok;
      state->aborted += !ok;
      meet(3 * round - 1);
      if (me == 0) {
        const int64_t found = read(at);
        wrong += !((found == 2 * round && state->ok[0]) || (found == 2 * round + 1 && state->ok[1]));
      }
      meet(3 * round);
    }
  };
  const pid_t child = in_child([&] { run(1); });
  run(0);
  CHECK(wait_for(child) == 0);
  CHECK(wrong == 0);
  CHECK(names_in(at).size() == 3);
  CHECK(state->aborted > 0);
  MESSAGE(state->aborted.load(), " of ", 2 * kRounds, " saves were second and aborted");
}

TEST_CASE("checkpoint: a process that dies at any point of a save loses and leaves nothing") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  std::vector<std::string> points;
  write(at, 1, [&](std::string_view point) { points.emplace_back(point); });
  put(at + "/tokenizer.json", "mine");
  fs::create_directory(at + "/.git");
  put(at + "/.git/HEAD", "mine too");
  bool placed = false;
  for (const std::string& fail : points) {
    CAPTURE(fail);
    write(at, 1);
    for (int deaths = 0; deaths < 2; ++deaths) {  // the second one dies on what the first one left
      const pid_t child = in_child([&] {
        write(at, 2, [&](std::string_view point) {
          if (point == fail) ::raise(SIGKILL);
        });
      });
      CHECK(WIFSIGNALED(wait_for(child)));
      placed |= fail == "in place";
      CHECK(read(at) == (placed ? 2 : 1));
      CHECK(content(at + "/tokenizer.json") == "mine");
      CHECK(content(at + "/.git/HEAD") == "mine too");
    }
    write(at, 3);
    CHECK(read(at) == 3);
    CHECK(names_in(at).size() == 5);  // what the dead left is tidied
  }
  const std::string fresh = folder.path / "fresh";  // a first save that dies
  const pid_t child =
      in_child([&] { write(fresh, 1, [](std::string_view p) { p == "sync" ? ::raise(SIGKILL) : 0; }); });
  wait_for(child);
  CHECK(says(error_of([&] { open_checkpoint(fresh); }), Code::kNotFound, "holds no checkpoint"));
  write(fresh, 2);
  CHECK(names_in(fresh).size() == 3);
}

TEST_CASE("checkpoint: kill -9 at 200 random moments") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  put(at + "/tokenizer.json", "mine");
  const Shared<std::atomic<int64_t>> done;  // the last save that returned
  *done.at = 1;
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < 8; ++i) write(at, 1);
  const auto save = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - began) / 8;
  const RandomStream random(1, hash_name("kill"), 0);
  int64_t inside = 0, whole = 0;
  for (uint64_t k = 0; k < 200; ++k) {
    const int64_t from = *done.at;
    const auto saves = static_cast<int64_t>(random.word(2 * k) % 3);  // before the one that is hit
    whole += saves;
    const pid_t child = in_child([&] {
      for (int64_t i = from + 1;; ++i) {
        write(at, i);
        *done.at = i;
      }
    });
    for (int i = 0; *done.at < from + saves && i < 500'000; ++i) nap(20);
    nap(static_cast<int64_t>(random.word(2 * k + 1) % static_cast<uint64_t>(save.count() + 1)));
    ::kill(child, SIGKILL);
    wait_for(child);
    inside += names_in(at).size() > 4;
    const int64_t found = read(at);
    REQUIRE(found >= *done.at);  // a save that was about to return may be in place
    REQUIRE(found <= *done.at + 1);
    REQUIRE(content(at + "/tokenizer.json") == "mine");
    write(at, found);
    REQUIRE(names_in(at).size() == 4);
    *done.at = found;
  }
  CHECK(*done.at > whole);
  CHECK(inside > 20);
  MESSAGE(inside, " of 200 kills hit a save in the middle; ", done.at->load(), " saves");
}

TEST_CASE("checkpoint: a lock does not outlive its process, nor end with another thread's") {
  const TestFolder folder;
  const std::string at = folder.path / "ckpt";
  write(at, 1);
  pid_t child = 0;
  write(at, 2, [&](std::string_view point) {  // a child that has the lock's file open and goes on living
    if (point == "exchange") child = in_child([] { ::pause(); });
  });
  write(at, 3);
  CHECK(read(at) == 3);
  ::kill(child, SIGKILL);
  wait_for(child);
  write(at, 4, [&](std::string_view point) {  // another save of the process that ends does not free this one's lock
    if (point != "index") return;
    write(folder.path / "other", 1);
    CHECK(says(error_of([&] { write(at, 5); }), Code::kAborted, "another save"));
    CHECK(says(error_of([&] { write(at, 5); }), Code::kAborted, "another save"));
  });
  CHECK(read(at) == 4);
}

TEST_CASE("files: written from many threads and processes at once, readers see one or the other whole") {
  const TestFolder folder;
  const std::string at = folder.path / "model.whale";
  const auto text = [](char letter) { return std::string(40000 + 100 * static_cast<size_t>(letter), letter); };
  const auto valid = [&](const std::string& s) { return !s.empty() && s == text(s[0]); };
  put(at, text('a'));
  fs::create_symlink("model.whale", folder.path / "link");
  std::atomic<int64_t> wrong{0};
  const auto write_many = [&](char letter) {
    const std::string mine = text(letter);
    for (int i = 0; i < 500; ++i) {
      try {
        replace_file(i % 2 ? at : (folder.path / "link").string(), mine.data(), mine.size());
        wrong += !valid(InputFile(at).text(1 << 20, "too long"));
      } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
        ++wrong;
      }
    }
  };
  const pid_t child = in_child([&] {
    write_many('b');
    if (wrong != 0) ::_exit(1);
  });
  std::vector<std::thread> threads;
  for (const char letter : {'c', 'd', 'e'}) threads.emplace_back(write_many, letter);
  for (std::thread& thread : threads) thread.join();
  CHECK(wait_for(child) == 0);
  CHECK(wrong == 0);
  CHECK(fs::is_symlink(folder.path / "link"));
  CHECK(names_in(folder.path) == std::vector<std::string>{"link", "model.whale"});
  const auto mode = fs::status(at).permissions();
  put(folder.path / "plain", "");
  CHECK(mode == fs::status(folder.path / "plain").permissions());
}
