#include "comm/post.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <list>
#include <memory>
#include <tuple>
#include <utility>

namespace whale {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(50);
constexpr int kPolls = 200;                 // before a thread that waits sleeps
constexpr size_t kWorthLending = 32 << 10;  // bytes: what is smaller is copied sooner than it is fetched
constexpr uint32_t kPaced = 2;              // messages of a channel whose users pace it
constexpr size_t kLoans = 8;                // of a channel, at once
constexpr uint64_t kEarlySessions = 1024;   // that other ranks may have opened before this one
// Of one rank, that another has not heard yet: of this run and the next, begun, ready or stopped, and lost; closed. Of
// many ranks not all are that late.
constexpr int kNoticesUnderWay = 2 * 3 + 1, kMostUnderWay = 256;

struct Mailbox;

// Where a lent message lies with its sender: the body of its letter.
struct Loan {
  uint64_t address = 0, bytes = 0;
};

// Memory for a message. What is reserved and never used takes none of the machine's.
class Room {
 public:
  void reserve(size_t bytes) {  // what was in it is lost
    if (bytes <= room_) return;
    data_.reset();
    data_ = std::make_unique_for_overwrite<char[]>(bytes);
    room_ = bytes, size_ = used_ = 0;
  }
  void resize(size_t bytes) {
    reserve(bytes);
    size_ = bytes, used_ = std::max(used_, bytes);
  }
  char* data() const { return data_.get(); }
  size_t size() const { return size_; }
  size_t used() const { return used_; }  // at most, so far

 private:
  std::unique_ptr<char[]> data_;
  size_t size_ = 0, used_ = 0, room_ = 0;
};

// A letter on its way in.
struct Parcel {
  LetterHead head;
  Mailbox* box = nullptr;  // that it is put in; null: it is a notice
  bool here = false;       // all of it
  Room bytes = {};
  Loan loan = {};  // of what is lent
  size_t size() const { return is_lent() ? loan.bytes : bytes.size(); }
  bool is_lent() const { return head.kind == LetterHead::kLent; }
};

// Messages that came by a channel. Their memory is used again, so that none is taken once the largest was sent.
struct Mailbox {
  std::mutex mutex;
  std::condition_variable came;
  std::list<Parcel> waiting, spare;  // the one that was read last is taken first
  Room read;                         // of a message that was lent: one is read at once, by whoever reads the channel
  size_t parcels = 0, largest = 0;   // that there are; that one was
  uint64_t run = 0;
  uint32_t taken = 0;  // of that run

  // As many as can be on the way at once, one that is read, and one of a run that was aborted.
  Parcel& room(const LetterHead& head, size_t bytes, uint64_t now) {
    for (auto p = waiting.begin(); p != waiting.end();)  // of runs that nobody takes from any more
      if (const auto at = p++; at->here && at->head.run < now) spare.splice(spare.end(), waiting, at);
    const size_t most = head.capacity + kPaced;
    for (; parcels < most + 2; ++parcels) spare.emplace_back();
    if (spare.empty()) spare.emplace_back(), ++parcels;
    Parcel& parcel = spare.front();
    parcel.head = head, parcel.box = this, parcel.here = false;
    if (!parcel.is_lent()) make_room(bytes), parcel.bytes.resize(bytes);
    waiting.splice(waiting.end(), spare, spare.begin());
    return parcel;
  }
  void make_room(size_t bytes) {
    largest = std::max(largest, bytes);
    for (Parcel& p : spare) p.bytes.reserve(largest);
  }
  void give_back(std::list<Parcel>& read) {
    for (Parcel& p : read) p.bytes.reserve(largest);
    spare.splice(spare.begin(), read);
  }
  size_t held() {
    const std::lock_guard lock(mutex);
    size_t sum = read.used();
    for (const auto* list : {&waiting, &spare})
      for (const Parcel& p : *list) sum += p.bytes.used();
    return sum;
  }
  // Moves the next message of the run to `to`; false: it is not here yet.
  bool take(uint64_t now, std::list<Parcel>& to) {
    if (run != now) run = now, taken = 0;
    for (auto p = waiting.begin(); p != waiting.end();) {
      const auto at = p++;
      if (!at->here || at->head.run > now) continue;
      if (at->head.run < now) {
        spare.splice(spare.end(), waiting, at);
      } else if (at->head.sequence == taken) {
        to.splice(to.end(), waiting, at);
        ++taken;
        return true;
      }
    }
    return false;
  }
};

// What is sent by a channel.
struct Outgoing {
  struct Buffer {
    Room bytes;
    bool under_way = false;
    bool lent = false;      // until it is read
    uint32_t sequence = 0;  // lent: of its letter
    Outgoing* of = nullptr;
  };
  uint32_t number = 0;  // of the channel, among those to its rank
  std::mutex mutex;
  std::condition_variable freed;  // a message was taken or read, or a buffer is free
  std::list<Buffer> buffers;
  size_t largest = 0;
  uint64_t run = 0;
  uint32_t sent = 0;
  uint32_t counted = 0, taken = 0;         // of senders with a capacity, and how many of them were taken
  uint32_t lent = 0;                       // by their owners; not read yet
  std::atomic<int64_t>* unread = nullptr;  // buffers of the session that are lent

  void enter(uint64_t now) {
    if (run == now) return;
    run = now, sent = counted = taken = lent = 0;
    for (Buffer& b : buffers)  // what an aborted run left unread nobody reads, or for nothing
      if (b.lent) give_back(b);
  }
  void give_back(Buffer& b) {
    if (std::exchange(b.lent, false)) --*unread;
    b.under_way = false;
    b.bytes.reserve(largest);
  }
  void was_read(uint32_t sequence) {
    for (Buffer& b : buffers)
      if (b.lent && b.sequence == sequence) return give_back(b);
    lent -= lent > 0;
  }
  bool is_full(uint32_t capacity) const { return capacity > 0 && counted - taken >= capacity; }
  // Where the next message is written; null: not yet.
  Buffer* free_buffer(uint32_t capacity) {
    if (is_full(capacity)) return nullptr;
    const auto at = std::find_if(buffers.begin(), buffers.end(), [](const Buffer& b) { return !b.under_way; });
    return at == buffers.end() ? nullptr : &*at;
  }
  size_t held() {
    const std::lock_guard lock(mutex);
    size_t sum = 0;
    for (const Buffer& b : buffers) sum += b.bytes.used();
    return sum;
  }
};

Notice notice_in(const LetterHead& head, std::string_view text) {
  return {.kind = static_cast<Notice::Kind>(std::min<uint8_t>(head.notice, Notice::kClosed)),
          .subject = head.tag,
          .numbers = head.capacity,
          .same = head.channel,
          .rank = static_cast<int>(head.from),
          .run = head.run,
          .code = static_cast<Code>(head.sequence),
          .message = std::string(text)};
}

template <auto kBegin, auto kEnd>
class Bracket {
 public:
  explicit Bracket(Courier& courier) : courier_(courier) { (courier_.*kBegin)(); }
  ~Bracket() { (courier_.*kEnd)(); }
  Bracket(const Bracket&) = delete;
  Bracket& operator=(const Bracket&) = delete;

 private:
  Courier& courier_;
};

// Channels to or from one rank, by tag when they are opened, and by number when letters come.
template <class End>
struct Channels {
  std::map<uint64_t, End> by_tag;
  std::vector<End*> numbered;
};
constexpr uint32_t kMostChannels = 1 << 22;  // of two ranks

}  // namespace

// What a session is in: its threads look at it while they wait.
struct Post::Desk {
  Desk(uint64_t number, int ranks)
      : session(number),
        gone(static_cast<size_t>(ranks)),
        answered(static_cast<size_t>(ranks)),
        mailboxes(static_cast<size_t>(ranks)),
        outgoing(static_cast<size_t>(ranks)) {
    spare.resize(static_cast<size_t>(std::min(ranks * kNoticesUnderWay, kMostUnderWay)));
  }
  const uint64_t session;
  std::atomic<uint64_t> run{0};
  std::atomic<bool> aborted{false};
  std::mutex mutex;  // of the notices
  std::condition_variable rang;
  std::list<Notice> notices, spare;
  uint64_t rings = 0, heard = 0;
  std::vector<bool> gone;                      // ranks of which that was told
  std::atomic<bool> asked{false};              // whether this rank is here
  std::vector<std::atomic<int64_t>> answered;  // by rank: when it last did

  std::mutex channels_mutex;                 // of the lists
  std::vector<Channels<Mailbox>> mailboxes;  // by rank; numbered by it
  std::vector<Channels<Outgoing>> outgoing;  // by rank; numbered here
  std::list<Parcel> texts;                   // of notices on their way in; under channels_mutex
  std::atomic<int64_t> unread{0};            // buffers that are lent
  std::mutex settle_mutex;
  std::condition_variable settled;

  Mailbox& mailbox(int from, uint64_t tag) {
    const std::lock_guard lock(channels_mutex);
    return mailboxes[from].by_tag[tag];
  }
  // Where a letter belongs; it is looked for once a channel. Null: nowhere.
  Mailbox* mailbox(const LetterHead& head) {
    if (head.channel >= kMostChannels) return nullptr;
    const std::lock_guard lock(channels_mutex);
    Channels<Mailbox>& of = mailboxes[head.from];
    if (head.channel >= of.numbered.size()) of.numbered.resize(head.channel + 1);
    Mailbox*& box = of.numbered[head.channel];
    if (box == nullptr) box = &of.by_tag[head.tag];
    return box;
  }
  Outgoing& out(int to, uint64_t tag) {
    const std::lock_guard lock(channels_mutex);
    Channels<Outgoing>& of = outgoing[to];
    const auto [at, is_new] = of.by_tag.try_emplace(tag);
    Outgoing& out = at->second;
    if (is_new) {
      out.number = static_cast<uint32_t>(of.numbered.size());
      out.unread = &unread;
      of.numbered.push_back(&out);
    }
    return out;
  }
  // What is answered; null: nothing.
  Outgoing* answered_by(const LetterHead& head) {
    const std::lock_guard lock(channels_mutex);
    const Channels<Outgoing>& of = outgoing[head.from];
    return head.channel < of.numbered.size() ? of.numbered[head.channel] : nullptr;
  }
  // What an aborted run has lent by channels that this one does not use is not waited for either.
  void enter(uint64_t now) {
    if (unread == 0) return;
    const std::lock_guard lock(channels_mutex);
    for (const Channels<Outgoing>& of : outgoing)
      for (Outgoing* out : of.numbered) {
        const std::lock_guard seen(out->mutex);
        out->enter(now);
      }
  }
  size_t held() {
    const std::lock_guard lock(channels_mutex);
    size_t sum = 0;
    for (Channels<Mailbox>& of : mailboxes)
      for (auto& [tag, box] : of.by_tag) sum += box.held();
    for (const Channels<Outgoing>& of : outgoing)
      for (Outgoing* out : of.numbered) sum += out->held();
    return sum;
  }
  void ring() {
    ++rings;
    rang.notify_all();
  }
  void add(const Notice& notice) {
    const std::lock_guard lock(mutex);
    if (spare.empty()) spare.emplace_back();
    spare.front() = notice;
    notices.splice(notices.end(), spare, spare.begin());
    ring();
  }
  void rank_is_gone(int rank, const std::string& why) {
    {
      const std::lock_guard lock(mutex);
      if (gone[rank]) return;
      gone[rank] = true;
    }
    add({.kind = Notice::kGone, .rank = rank, .code = Code::kUnavailable, .message = why});
  }
  bool hear(Notice& notice) {
    const std::lock_guard lock(mutex);
    const uint64_t now = run.load();
    const auto is_over = [&](const Notice& n) { return n.run < now && n.kind < Notice::kLost; };
    for (auto n = notices.begin(); n != notices.end();)
      if (const auto here = n++; is_over(*here)) spare.splice(spare.end(), notices, here);
    const auto stays = [](const Notice& n) { return n.kind == Notice::kClosed || n.kind == Notice::kGone; };
    const auto is_of_now = [&](const Notice& n) {
      return stays(n) ? n.run < now : n.run == now || n.kind == Notice::kLost;
    };
    const auto at = std::find_if(notices.begin(), notices.end(), is_of_now);
    if (at == notices.end()) return false;
    notice = *at;
    if (stays(*at))
      at->run = now;  // and of every later run
    else
      spare.splice(spare.end(), notices, at);
    return true;
  }
  void abort() {
    aborted.store(true, std::memory_order_release);
    const std::lock_guard lock(channels_mutex);
    for (Channels<Mailbox>& of : mailboxes)
      for (auto& [tag, box] : of.by_tag) {
        { const std::lock_guard seen(box.mutex); }  // who waits has looked before this, or sees it
        box.came.notify_all();
      }
    for (Channels<Outgoing>& of : outgoing)
      for (Outgoing* out : of.numbered) {
        { const std::lock_guard seen(out->mutex); }
        out->freed.notify_all();
      }
    { const std::lock_guard seen(settle_mutex); }
    settled.notify_all();
  }
  // Until `found`, which is asked under the lock; false: aborted.
  template <class Found>
  bool wait(Courier& courier, std::mutex& of, std::condition_variable& signal, Lookout* lookout, Found found) {
    enum { kNotYet, kFound, kAborted } now = kNotYet;  // what is found is found once
    const auto look_locked = [&] {
      if (now == kNotYet) now = aborted.load(std::memory_order_acquire) ? kAborted : found() ? kFound : kNotYet;
      return now != kNotYet;
    };
    const auto look = [&] {
      const std::lock_guard lock(of);
      return look_locked();
    };
    if (look()) return now == kFound;
    const Bracket<&Courier::wait_begins, &Courier::wait_ends> waits(courier);
    for (int turn = 0; !look(); ++turn) {
      if (turn < kPolls) {
        courier.poll();
        continue;
      }
      if (lookout != nullptr) lookout->look();
      if (courier.sleeps()) {
        const Bracket<&Courier::sleep_begins, &Courier::sleep_ends> sleeps(courier);
        if (!look()) courier.sleep(kLookEvery.count());
      } else {
        std::unique_lock lock(of);
        if (!look_locked()) signal.wait_for(lock, kLookEvery);
      }
    }
    return now == kFound;
  }
};

class Post::Outbox final : public Wire::Sender {
 public:
  Outbox(std::shared_ptr<Post> post, std::shared_ptr<Desk> desk, int to, uint64_t tag, uint32_t capacity, bool settled)
      : post_(std::move(post)),
        desk_(std::move(desk)),
        to_(to),
        tag_(tag),
        capacity_(capacity),
        settled_(settled),
        out_(desk_->out(to, tag)) {
    const std::lock_guard lock(out_.mutex);
    while (out_.buffers.size() < capacity + kPaced + 1) out_.buffers.emplace_back().of = &out_;
  }
  char* begin(size_t bytes, Lookout* lookout) override {
    const uint64_t run = desk_->run.load(std::memory_order_relaxed);
    const auto found = [&] {
      out_.enter(run);
      buffer_ = out_.free_buffer(capacity_);
      if (buffer_ == nullptr) return false;
      if (bytes > out_.largest) {
        out_.largest = bytes;
        for (Outgoing::Buffer& b : out_.buffers)
          if (!b.under_way) b.bytes.reserve(bytes);
      }
      buffer_->bytes.reserve(out_.largest);
      buffer_->bytes.resize(bytes);
      return true;
    };
    if (!wait(lookout, found)) return nullptr;
    return bytes == 0 ? &nothing_ : buffer_->bytes.data();
  }
  void end() override {
    const bool lends = settled_ && worth_lending(buffer_->bytes.size());
    LetterHead head = next_head(lends ? LetterHead::kLent : LetterHead::kMessage, [&](uint32_t sequence) {
      buffer_->under_way = true, buffer_->lent = lends, buffer_->sequence = sequence;
      desk_->unread += lends;
    });
    if (lends)
      send_loan(head, buffer_->bytes.data(), buffer_->bytes.size());
    else
      post_->send(*desk_, to_, head, buffer_->bytes.data(), buffer_->bytes.size(), {desk_, buffer_});
  }
  bool lend(const char* data, size_t bytes, Lookout* lookout) override {
    if (!worth_lending(bytes)) {
      char* to = begin(bytes, lookout);
      if (to == nullptr) return false;
      if (bytes > 0) std::memcpy(to, data, bytes);
      end();
      return true;
    }
    const uint64_t run = desk_->run.load(std::memory_order_relaxed);
    if (!wait(lookout, [&] {
          out_.enter(run);
          return !out_.is_full(capacity_) && out_.lent < kLoans;
        }))
      return false;
    send_loan(next_head(LetterHead::kLent, [&](uint32_t) { ++out_.lent; }), data, bytes);
    return true;
  }
  bool settle(Lookout* lookout) override {
    return wait(lookout, [&] { return out_.lent == 0; });
  }

 private:
  bool worth_lending(size_t bytes) const { return bytes >= kWorthLending && post_->courier_->lends_to(to_); }
  template <class Note>
  LetterHead next_head(LetterHead::Kind kind, Note note) {
    const std::lock_guard lock(out_.mutex);
    note(out_.sent);
    out_.counted += capacity_ > 0;
    return {.run = out_.run,
            .tag = tag_,
            .sequence = out_.sent++,
            .capacity = capacity_,
            .channel = out_.number,
            .kind = kind};
  }
  void send_loan(const LetterHead& head, const char* data, size_t bytes) {
    const Loan loan{reinterpret_cast<uintptr_t>(data), bytes};
    post_->send(*desk_, to_, head, &loan, sizeof loan, {});
  }
  template <class Found>
  bool wait(Lookout* lookout, Found found) {
    return desk_->wait(*post_->courier_, out_.mutex, out_.freed, lookout, found);
  }

  const std::shared_ptr<Post> post_;
  const std::shared_ptr<Desk> desk_;
  const int to_;
  const uint64_t tag_;
  const uint32_t capacity_;
  const bool settled_;
  Outgoing& out_;
  Outgoing::Buffer* buffer_ = nullptr;  // that is being written
  char nothing_ = 0;
};

class Post::Inbox final : public Wire::Receiver {
 public:
  Inbox(std::shared_ptr<Post> post, std::shared_ptr<Desk> desk, int from, uint64_t tag)
      : post_(std::move(post)), desk_(std::move(desk)), from_(from), box_(desk_->mailbox(from, tag)) {}
  const char* begin(size_t bytes, Lookout* lookout) override {
    if (!next(bytes, lookout)) return nullptr;
    Parcel& parcel = mine_.front();
    if (bytes == 0) return &nothing_;
    {
      const std::lock_guard lock(box_.mutex);
      if (bytes >= kWorthLending) box_.read.reserve(bytes);  // also if this one was copied: the first is
      if (!parcel.is_lent()) return parcel.bytes.data();
      box_.read.resize(bytes);
    }
    return read(parcel, box_.read.data(), lookout) ? box_.read.data() : nullptr;
  }
  void end() override {
    const std::lock_guard lock(box_.mutex);
    box_.give_back(mine_);
  }
  bool take(char* to, size_t bytes, Lookout* lookout) override {
    if (!next(bytes, lookout)) return false;
    Parcel& parcel = mine_.front();
    if (parcel.is_lent()) {
      if (!read(parcel, to, lookout)) return false;
    } else if (bytes > 0) {
      std::memcpy(to, parcel.bytes.data(), bytes);
    }
    end();
    return true;
  }

 private:
  bool next(size_t bytes, Lookout* lookout) {
    const uint64_t run = desk_->run.load(std::memory_order_relaxed);
    if (!wait(lookout, [&] {
          if (!mine_.empty()) box_.give_back(mine_);  // of a run that was aborted
          return box_.take(run, mine_);
        }))
      return false;
    const Parcel& parcel = mine_.front();
    if (parcel.head.capacity > 0 && !parcel.is_lent()) answer(LetterHead::kTaken);
    if (parcel.size() != bytes) throw runs_something_else(from_, post_->rank());
    return true;
  }
  bool read(const Parcel& parcel, char* to, Lookout* lookout) {
    // Where it is not there any more, its sender has given up, and says so, or is lost.
    if (!post_->courier_->read(from_, parcel.loan.address, to, parcel.loan.bytes)) {
      if (errno == EPERM || errno == ENOSYS)
        throw error(
            Code::kUnavailable,
            "the memory of rank {} cannot be read any more, as it could when the ranks met: has its user or its "
            "right to be traced changed?",
            from_);
      return wait(lookout, [] { return false; });
    }
    answer(LetterHead::kRead);
    return true;
  }
  void answer(LetterHead::Kind kind) {
    LetterHead head = mine_.front().head;
    head.kind = kind;
    post_->send(*desk_, from_, head, nullptr, 0, {});
  }
  template <class Found>
  bool wait(Lookout* lookout, Found found) {
    return desk_->wait(*post_->courier_, box_.mutex, box_.came, lookout, found);
  }

  const std::shared_ptr<Post> post_;
  const std::shared_ptr<Desk> desk_;
  const int from_;
  Mailbox& box_;
  std::list<Parcel> mine_;  // the one that is being read
  char nothing_ = 0;
};

class Post::Line final : public Wire {
 public:
  Line(std::shared_ptr<Post> post, std::shared_ptr<Desk> desk) : post_(std::move(post)), desk_(std::move(desk)) {}
  ~Line() override {
    const std::lock_guard lock(post_->mutex_);
    post_->desks_.erase(desk_->session);
  }
  int rank() const override { return post_->rank(); }
  int size() const override { return post_->size(); }
  std::unique_ptr<Sender> open_sender(int to, uint64_t tag, uint32_t capacity, bool settled) override {
    return std::make_unique<Outbox>(post_, desk_, to, tag, capacity, settled);
  }
  bool settle(Lookout* lookout) override {
    return desk_->wait(*post_->courier_, desk_->settle_mutex, desk_->settled, lookout,
                       [&] { return desk_->unread == 0; });
  }
  std::unique_ptr<Receiver> open_receiver(int from, uint64_t tag) override {
    return std::make_unique<Inbox>(post_, desk_, from, tag);
  }
  void begin_run() override {
    desk_->enter(desk_->run.fetch_add(1) + 1);
    desk_->aborted.store(false, std::memory_order_release);
    ring();  // what came before may be of this run
  }
  void abort() noexcept override {
    desk_->abort();
    post_->wake();
  }
  void tell(Notice notice) override {
    const LetterHead head{.run = desk_->run.load(),
                          .tag = notice.subject,
                          .sequence = static_cast<uint32_t>(notice.code),
                          .capacity = notice.numbers,
                          .channel = notice.same,
                          .kind = LetterHead::kNotice,
                          .notice = notice.kind};
    const size_t bytes = std::min(notice.message.size(), kSmallBody);
    for (int r = 0; r < size(); ++r)
      if (r != rank()) post_->send(*desk_, r, head, notice.message.data(), bytes, {});
    post_->courier_->listen();  // theirs are waited for
  }
  bool hear(Notice& notice) override { return desk_->hear(notice); }
  int64_t answered(int rank) const override { return desk_->answered[rank]; }
  size_t held() const override { return desk_->held(); }
  void wait_for_notices() override {
    {
      std::unique_lock lock(desk_->mutex);
      desk_->rang.wait(lock, [&] { return desk_->rings != desk_->heard; });
      desk_->heard = desk_->rings;
    }
    if (desk_->asked.exchange(false)) tell({.kind = Notice::kHere});
  }
  void ring() override {
    const std::lock_guard lock(desk_->mutex);
    desk_->ring();
  }

 private:
  const std::shared_ptr<Post> post_;
  const std::shared_ptr<Desk> desk_;
};

std::shared_ptr<Post> Post::open(int size, const MakeCourier& make) {
  std::shared_ptr<Post> post(new Post(size));
  post->courier_ = make(*post);
  post->at_hand_ = post->courier_.get();
  return post;
}

Post::~Post() {
  at_hand_ = nullptr;
  courier_.reset();
}

void Post::wake() noexcept {
  if (Courier* courier = at_hand_) courier->wake();
}

std::shared_ptr<Wire> Post::next_wire() {
  std::shared_ptr<Desk> desk;
  {
    const std::lock_guard lock(mutex_);
    desk = desk_of(opened_);
    ++opened_;
  }
  return std::make_shared<Line>(shared_from_this(), std::move(desk));
}

// Under the lock.
std::shared_ptr<Post::Desk> Post::desk_of(uint64_t session) {
  const auto at = desks_.find(session);
  if (at != desks_.end()) return at->second;
  if (session < opened_ || session >= opened_ + kEarlySessions) return nullptr;
  auto desk = std::make_shared<Desk>(session, size());
  for (const auto& [rank, why] : lost_) desk->rank_is_gone(rank, why);
  return desks_.emplace(session, std::move(desk)).first->second;
}

void Post::send(const Desk& desk, int to, LetterHead head, const void* body, size_t bytes, const Ticket& ticket) {
  head.session = desk.session;
  head.from = static_cast<uint32_t>(rank());
  courier_->send(to, head, body, bytes, ticket);
}

Courier::Ticket Post::accept(const LetterHead& head, size_t bytes, char*& body) {
  std::shared_ptr<Desk> desk;
  {
    const std::lock_guard lock(mutex_);
    desk = desk_of(head.session);
  }
  if (!desk || head.from >= static_cast<uint32_t>(size_)) return {};
  Parcel* parcel = nullptr;
  if (head.kind == LetterHead::kTaken || head.kind == LetterHead::kRead) {
    Outgoing* const out = desk->answered_by(head);
    if (out == nullptr) return {};
    {
      const std::lock_guard lock(out->mutex);
      if (head.run != out->run) return {};
      out->taken += head.capacity > 0;
      if (head.kind == LetterHead::kRead) out->was_read(head.sequence);
    }
    out->freed.notify_all();
    if (head.kind == LetterHead::kRead && desk->unread == 0) {
      { const std::lock_guard seen(desk->settle_mutex); }
      desk->settled.notify_all();
    }
    wake();
  } else if (head.kind == LetterHead::kMessage || head.kind == LetterHead::kLent) {
    if (head.kind == LetterHead::kLent && bytes != sizeof(Loan)) return {};
    Mailbox* const box = desk->mailbox(head);
    if (box == nullptr) return {};
    const std::lock_guard lock(box->mutex);
    parcel = &box->room(head, bytes, desk->run);
    if (parcel->is_lent()) {
      body = reinterpret_cast<char*>(&parcel->loan);
      return {std::move(desk), parcel};
    }
  } else if (head.notice == Notice::kHere) {
    desk->answered[head.from] = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  } else if (bytes == 0) {
    if (head.notice == Notice::kAsks) desk->asked = true;
    desk->add(notice_in(head, {}));
  } else {
    const std::lock_guard lock(desk->channels_mutex);
    Parcel text{.head = head};
    text.bytes.resize(bytes);
    parcel = &desk->texts.emplace_back(std::move(text));
  }
  if (parcel == nullptr) return {};
  body = parcel->bytes.data();
  return {std::move(desk), parcel};
}

void Post::arrived(const Ticket& letter) noexcept {
  auto* parcel = static_cast<Parcel*>(letter.thing);
  if (Mailbox* box = parcel->box; box != nullptr) {
    {
      const std::lock_guard lock(box->mutex);
      parcel->here = true;
    }
    box->came.notify_one();
    wake();
    return;
  }
  auto& desk = *static_cast<Desk*>(letter.owner.get());
  try {
    desk.add(notice_in(parcel->head, {parcel->bytes.data(), parcel->bytes.size()}));
  } catch (const std::bad_alloc&) {  // that the run ends is what counts, not why
    desk.add(notice_in(parcel->head, {}));
  }
  const std::lock_guard lock(desk.channels_mutex);
  desk.texts.remove_if([&](const Parcel& p) { return &p == parcel; });
}

void Post::sent(const Ticket& letter) noexcept {
  auto* buffer = static_cast<Outgoing::Buffer*>(letter.thing);
  {
    const std::lock_guard lock(buffer->of->mutex);
    buffer->of->give_back(*buffer);
  }
  buffer->of->freed.notify_all();
  wake();
}

void Post::lost(int rank, const std::string& why) noexcept {
  try {
    std::vector<std::shared_ptr<Desk>> desks;
    {
      const std::lock_guard lock(mutex_);
      if (!lost_.emplace(rank, why).second) return;
      for (const auto& [session, desk] : desks_) desks.push_back(desk);
    }
    for (const auto& desk : desks) desk->rank_is_gone(rank, why);
  } catch (const std::bad_alloc&) {  // what waits for that rank then waits until it is cancelled
  }
}

void Post::give_up(int rank, const std::string& why) noexcept {
  lost(rank, why);
  courier_->give_up(rank);
}

std::vector<std::shared_ptr<Wire>> make_inproc_wires(int ranks) {
  std::vector<std::shared_ptr<Wire>> wires;
  for (const MakeCourier& make : make_inproc_couriers(ranks)) wires.push_back(Post::open(ranks, make)->next_wire());
  return wires;
}

}  // namespace whale
