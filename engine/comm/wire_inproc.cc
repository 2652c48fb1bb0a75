// Wires inside a process: a mailbox for each channel. Messages are copied in and out; their memory is used again, so
// that none is taken once the largest was sent and read.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <tuple>

#include "comm/wire.h"

namespace whale {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(50);
// Of one rank, that another has not heard yet: of this run and the next, begun, ready or stopped, and lost; closed. Of
// many ranks not all are that late.
constexpr int kNoticesUnderWay = 2 * 3 + 1, kMostUnderWay = 256;

struct Message {
  uint64_t run = 0;
  std::vector<char> bytes;
};

struct Mailbox {
  std::mutex mutex;
  std::condition_variable came, taken;
  std::list<Message> waiting, spare;
  size_t messages = 0, largest = 0;  // that there are; that one was
  uint32_t count(uint64_t run) const {
    uint32_t n = 0;
    for (const Message& m : waiting) n += m.run == run;
    return n;
  }
  // Whichever is taken next, it has room for the largest.
  void give_back(std::list<Message>& read) {
    for (Message& m : read) m.bytes.reserve(largest);
    spare.splice(spare.end(), read);
  }
  void grow(size_t bytes) {
    if (bytes <= largest) return;
    largest = bytes;
    for (Message& m : spare) m.bytes.reserve(largest);
  }
};

// What a rank is in: its threads look at it while they wait.
struct Desk {
  std::atomic<uint64_t> run{0};
  std::atomic<bool> aborted{false};
  std::mutex mutex;  // of the notices
  std::condition_variable rang;
  std::list<Notice> notices, spare;
  uint64_t rings = 0, answered = 0;

  void ring() {
    ++rings;
    rang.notify_all();
  }
};

struct Office {
  explicit Office(int ranks) : desks(static_cast<size_t>(ranks)) {
    for (Desk& desk : desks) desk.spare.resize(std::min<size_t>(desks.size() * kNoticesUnderWay, kMostUnderWay));
  }
  Mailbox& mailbox(int from, int to, uint64_t tag) {
    const std::lock_guard lock(mutex);
    auto& box = boxes[{from, to, tag}];
    if (!box) box = std::make_unique<Mailbox>();
    return *box;
  }
  template <class F>
  void each_of(int rank, F f) {
    const std::lock_guard lock(mutex);
    for (auto& [key, box] : boxes)
      if (std::get<0>(key) == rank || std::get<1>(key) == rank) f(*box);
  }
  std::mutex mutex;  // of the map
  std::map<std::tuple<int, int, uint64_t>, std::unique_ptr<Mailbox>> boxes;
  std::vector<Desk> desks;  // by rank
};

// Now and then the lookout looks.
void wait(std::condition_variable& for_what, std::unique_lock<std::mutex>& lock, Lookout* lookout) {
  for_what.wait_for(lock, kLookEvery);
  if (lookout == nullptr) return;
  lock.unlock();
  lookout->look();
  lock.lock();
}

class Outbox final : public Wire::Sender {
 public:
  Outbox(std::shared_ptr<Office> office, Desk& desk, Mailbox& box, uint32_t capacity)
      : office_(std::move(office)), desk_(desk), box_(box), capacity_(capacity) {
    const std::lock_guard lock(box_.mutex);
    for (; box_.messages < size_t{capacity} + 2; ++box_.messages) box_.spare.emplace_back();  // one written, one read
  }
  char* begin(size_t bytes, Lookout* lookout) override {
    const uint64_t run = desk_.run.load(std::memory_order_relaxed);
    {
      std::unique_lock lock(box_.mutex);
      for (;;) {
        if (desk_.aborted.load(std::memory_order_acquire)) return nullptr;
        if (box_.count(run) < capacity_) break;
        wait(box_.taken, lock, lookout);
      }
      if (mine_.empty() && !box_.spare.empty()) mine_.splice(mine_.end(), box_.spare, box_.spare.begin());
      box_.grow(bytes);
      if (mine_.empty()) mine_.emplace_back();
      mine_.front().bytes.reserve(box_.largest);
    }
    mine_.front().run = run;
    mine_.front().bytes.resize(bytes);
    return mine_.front().bytes.data() == nullptr ? &nothing_ : mine_.front().bytes.data();
  }
  void end() override {
    {
      const std::lock_guard lock(box_.mutex);
      box_.waiting.splice(box_.waiting.end(), mine_);
    }
    box_.came.notify_one();
  }

 private:
  std::shared_ptr<Office> office_;
  Desk& desk_;
  Mailbox& box_;
  uint32_t capacity_;
  std::list<Message> mine_;  // the one that is being written
  char nothing_ = 0;
};

class Inbox final : public Wire::Receiver {
 public:
  Inbox(std::shared_ptr<Office> office, Desk& desk, Mailbox& box, int from, int rank)
      : office_(std::move(office)), desk_(desk), box_(box), from_(from), rank_(rank) {}
  const char* begin(size_t bytes, Lookout* lookout) override {
    std::unique_lock lock(box_.mutex);
    for (;;) {
      if (desk_.aborted.load(std::memory_order_acquire)) return nullptr;
      const uint64_t run = desk_.run.load(std::memory_order_relaxed);
      while (!box_.waiting.empty() && box_.waiting.front().run < run)
        box_.spare.splice(box_.spare.end(), box_.waiting, box_.waiting.begin());
      if (!box_.waiting.empty() && box_.waiting.front().run == run) break;
      wait(box_.came, lock, lookout);
    }
    if (!mine_.empty()) box_.give_back(mine_);  // of a run that was aborted
    mine_.splice(mine_.end(), box_.waiting, box_.waiting.begin());
    if (mine_.front().bytes.size() != bytes) throw runs_something_else(from_, rank_);
    return bytes == 0 ? &nothing_ : mine_.front().bytes.data();
  }
  void end() override {
    {
      const std::lock_guard lock(box_.mutex);
      box_.give_back(mine_);
    }
    box_.taken.notify_one();
  }

 private:
  std::shared_ptr<Office> office_;
  Desk& desk_;
  Mailbox& box_;
  int from_, rank_;
  std::list<Message> mine_;  // the one that is being read
  char nothing_ = 0;
};

class InprocWire final : public Wire {
 public:
  InprocWire(std::shared_ptr<Office> office, int rank) : office_(std::move(office)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(office_->desks.size()); }
  std::unique_ptr<Sender> open_sender(int to, uint64_t tag, uint32_t capacity) override {
    return std::make_unique<Outbox>(office_, desk(), office_->mailbox(rank_, to, tag), capacity);
  }
  std::unique_ptr<Receiver> open_receiver(int from, uint64_t tag) override {
    return std::make_unique<Inbox>(office_, desk(), office_->mailbox(from, rank_, tag), from, rank_);
  }
  void begin_run() override {
    desk().run.fetch_add(1);
    desk().aborted.store(false, std::memory_order_release);
    ring();  // what came before may be of this run
  }
  void abort() noexcept override {
    desk().aborted.store(true, std::memory_order_release);
    office_->each_of(rank_, [](Mailbox& box) {
      { const std::lock_guard lock(box.mutex); }  // who waits has looked before this, or sees it
      box.came.notify_all();
      box.taken.notify_all();
    });
  }
  void tell(Notice notice) override {
    notice.rank = rank_, notice.run = desk().run.load();
    for (int r = 0; r < size(); ++r) {
      if (r == rank_) continue;
      Desk& theirs = office_->desks[static_cast<size_t>(r)];
      const std::lock_guard lock(theirs.mutex);
      if (theirs.spare.empty()) theirs.spare.emplace_back();
      theirs.spare.front() = notice;
      theirs.notices.splice(theirs.notices.end(), theirs.spare, theirs.spare.begin());
      theirs.ring();
    }
  }
  bool hear(Notice& notice) override {
    Desk& mine = desk();
    const std::lock_guard lock(mine.mutex);
    const uint64_t run = mine.run.load();
    const auto is_over = [&](const Notice& n) { return n.run < run && n.kind < Notice::kLost; };
    for (auto n = mine.notices.begin(); n != mine.notices.end();)
      if (const auto here = n++; is_over(*here)) mine.spare.splice(mine.spare.end(), mine.notices, here);
    auto at = mine.notices.begin();
    const auto is_of_now = [&](const Notice& n) {
      return n.kind == Notice::kClosed ? n.run < run : n.run == run || n.kind == Notice::kLost;
    };
    while (at != mine.notices.end() && !is_of_now(*at)) ++at;
    if (at == mine.notices.end()) return false;
    notice = *at;
    if (at->kind == Notice::kClosed)
      at->run = run;  // and of every later run
    else
      mine.spare.splice(mine.spare.end(), mine.notices, at);
    return true;
  }
  void wait_for_notices() override {
    Desk& mine = desk();
    std::unique_lock lock(mine.mutex);
    mine.rang.wait(lock, [&] { return mine.rings != mine.answered; });
    mine.answered = mine.rings;
  }
  void ring() override {
    const std::lock_guard lock(desk().mutex);
    desk().ring();
  }

 private:
  Desk& desk() { return office_->desks[static_cast<size_t>(rank_)]; }
  std::shared_ptr<Office> office_;
  int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Wire>> make_inproc_wires(int ranks) {
  const auto office = std::make_shared<Office>(ranks);
  std::vector<std::shared_ptr<Wire>> wires;
  for (int r = 0; r < ranks; ++r) wires.push_back(std::make_shared<InprocWire>(office, r));
  return wires;
}

}  // namespace whale
