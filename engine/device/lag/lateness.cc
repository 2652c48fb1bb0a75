#include "device/lag/lateness.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace whale::lag {
namespace {

constexpr uint64_t kMostDevices = 1 << 20;

// A collective is late before the first of its copies, and seldom between them. kOneLast: one queue of the device does
// nothing before nobody else can go on, on any device: whoever should wait for it and does not has overtaken it.
enum class Mood : uint8_t { kFast, kSlow, kNowAndThen, kOneLast };

// Of the thread, which is a queue's; the host's are fast.
struct Lateness {
  uint64_t dice = 0;
  Mood mood = Mood::kFast;
  const Turn* turn = nullptr;
  Queue queue{};
  std::chrono::steady_clock::time_point busy_until{};
  bool slow = false;
  uint32_t left = 0;  // instructions until that may change

  uint32_t roll() {  // splitmix64
    uint64_t x = dice += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return static_cast<uint32_t>((x ^ (x >> 31)) >> 32);
  }
};
thread_local Lateness mine;

// Of all devices: instructions that are under way; that were begun; the places of those that wait for all others.
std::atomic<int64_t> running{0}, begun{0};
std::mutex mutex;
std::multiset<uint64_t> last;

// What the kernel says of each thread of the process. Opening its files takes longer than reading them, so they stay
// open until threads have come or gone.
class Threads {
 public:
  // Whether all but the calling one sleep: on a busy machine one that may go on is often not yet on a core.
  bool others_sleep() {
    const auto self = static_cast<pid_t>(syscall(SYS_gettid));
    const std::lock_guard lock(mutex_);
    struct stat folder {};  // has a link for each thread
    if (fstatat(AT_FDCWD, kFolder, &folder, 0) == 0 && folder.st_nlink != links_) open_all(folder.st_nlink);
    for (const auto& [thread, file] : files_) {
      if (thread == self) continue;
      char text[128] = {};
      if (pread(file, text, sizeof text - 1, 0) <= 0) {
        links_ = 0;  // it has ended, and another may have begun
        return false;
      }
      if (const char* end = std::strrchr(text, ')'); end && end[1] == ' ' && end[2] == 'R')  // "number (name) S ..."
        return false;
    }
    return true;
  }

 private:
  static constexpr const char* kFolder = "/proc/self/task";
  void open_all(nlink_t links) {
    for (const auto& [thread, file] : files_) close(file);
    files_.clear();
    links_ = links;
    DIR* tasks = opendir(kFolder);
    if (tasks == nullptr) return;
    for (const dirent* entry = readdir(tasks); entry != nullptr; entry = readdir(tasks)) {
      if (entry->d_name[0] == '.') continue;
      const int file = openat(dirfd(tasks), fmt::format("{}/stat", entry->d_name).c_str(), O_RDONLY | O_CLOEXEC);
      if (file >= 0) files_.emplace_back(std::atoi(entry->d_name), file);
    }
    closedir(tasks);
    if (files_.size() + 2 != links) links_ = 0;  // some have come or gone meanwhile, or this kernel counts otherwise
  }

  std::mutex mutex_;
  nlink_t links_ = 0;  // of the folder, when the files were opened; 0: they must be again
  std::vector<std::pair<pid_t, int>> files_;
};
Threads& threads = *new Threads;  // never destroyed: sessions may outlive what is static

void wait_for_all_others(uint64_t place) {
  constexpr auto kLook = std::chrono::microseconds(60), kBehindOthers = std::chrono::microseconds(1000);
  constexpr int kQuiet = 2, kMost = 200;  // looks
  const auto is_first_of_last = [&] {
    const std::lock_guard lock(mutex);
    return *last.begin() == place;
  };
  {
    const std::lock_guard lock(mutex);
    last.insert(place);
  }
  int64_t seen = -1;
  for (int quiet = 0, looks = 0; quiet < kQuiet && looks < kMost;) {
    const bool first = is_first_of_last();
    std::this_thread::sleep_for(first ? kLook : kBehindOthers);
    if (!first) continue;
    const int64_t now = begun.load();
    quiet = now == seen && running.load() == 0 && threads.others_sleep() ? quiet + 1 : 0;
    seen = now, ++looks;
  }
  const std::lock_guard lock(mutex);
  last.erase(last.find(place));
}

// `copies`: of many that an instruction may consist of.
void be_late(bool copies) {
  constexpr auto kSame = std::chrono::microseconds(20);  // instruction, when no longer ago
  constexpr uint32_t kWhile = 32, kOneSlow = 3, kOneIn = 2, kOneOfCopies = 64, kOneOfSome = 8, kNanoseconds = 2'000'000;
  const bool same = copies && std::chrono::steady_clock::now() - mine.busy_until < kSame;
  if (mine.mood == Mood::kOneLast) {
    if (mine.turn->last() == mine.queue && (!same || mine.roll() % kOneOfSome == 0))
      wait_for_all_others(mine.turn->place());
    return;
  }
  if (mine.left == 0) {
    mine.slow = mine.mood == Mood::kSlow || (mine.mood == Mood::kNowAndThen && mine.roll() % kOneSlow == 0);
    mine.left = 1 + mine.roll() % kWhile;
  }
  mine.left -= !same;
  if (mine.slow && mine.roll() % (same ? kOneOfCopies : kOneIn) == 0)
    std::this_thread::sleep_for(std::chrono::nanoseconds(mine.roll() % kNanoseconds));
}

}  // namespace

void become_queue(Queue queue, const Turn& turn, uint64_t seed) {
  mine = {};
  mine.turn = &turn, mine.queue = queue;
  mine.dice = (seed * kMostDevices + turn.number() % kMostDevices) * kQueues + static_cast<uint64_t>(queue);
  // Of fifteen seeds: every queue is slow for a while and fast for a while; compute is slow on about every other
  // device, and others catch up with it; the others are slow, and compute is far ahead. In twelve, one comes last.
  const bool compute = queue == Queue::kCompute;
  const Mood moods[] = {Mood::kNowAndThen, compute && mine.roll() % 2 == 0 ? Mood::kSlow : Mood::kFast,
                        compute ? Mood::kFast : Mood::kSlow};
  mine.mood = seed % Turn::kOneOf != 0 ? Mood::kOneLast : moods[seed / Turn::kOneOf % 3];
}

UnderWay::UnderWay(bool copies) {
  be_late(copies && carrier_of(mine.queue) != Carrier::kHostLink);
  begun.fetch_add(1), running.fetch_add(1);
}

UnderWay::~UnderWay() {
  running.fetch_sub(1);
  mine.busy_until = std::chrono::steady_clock::now();
}

}  // namespace whale::lag
