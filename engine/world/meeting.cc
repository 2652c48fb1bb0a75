#include "world/meeting.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/no_signals.h"
#include "base/watch.h"
#include "world/socket.h"

namespace whale {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr char kMagic[8] = {'w', 'h', 'a', 'l', 'e', ' ', 'm', '1'};
constexpr size_t kTokenBytes = 64;
constexpr uint32_t kMostBytes = 16u << 20;               // of a frame
constexpr size_t kMostAtOnce = kMostBytes + (1u << 20);  // that is read before it is looked at
constexpr size_t kMostStrangers = 64;  // connections that have not said the token yet; or twice the ranks
constexpr double kStrangerSeconds = 5;
constexpr size_t kMostFarewellBytes = 2000, kMostPlaceBytes = 1000;
constexpr double kFarewellSeconds = 2;  // that rank 0 stays for those who have not left

// What a connection begins with.
struct Hello {
  char magic[8] = {};
  char token[kTokenBytes] = {};
  uint32_t rank = 0, size = 0;
};

enum class Say : uint8_t { kHere, kPut, kGet, kBye, kWelcome, kRefused, kLater, kValue, kAbsent, kLost, kLeft };

// A frame is a length, a Say, two numbers, and a text; of kPut the text is the key and, `b` bytes behind it, the value.
// kHere has the text of what a rank is at; from the host, rank 0. kBye and kAbsent have the text of why a rank has
// left, if it said it, and `b` the rank at fault, from 1. kRefused has the text of why, or none: it is the token.
struct FrameHead {
  uint32_t bytes = 0;  // of the text
  uint32_t a = 0, b = 0;
  Say say = Say::kHere;
  uint8_t unused[3] = {};
};

// Why a rank has left.
struct Farewell {
  uint32_t at_fault = 0;  // a rank, from 1; 0: none
  std::string why = {};   // empty: it was through
};

// What a rank has said that it is at.
struct SaidPlace {
  std::string text;
  Clock::time_point when;

  void say(const std::string& now) { text = now.substr(0, kMostPlaceBytes), when = Clock::now(); }
  // What follows on why it is lost.
  std::string last() const {
    if (text.empty()) return {};
    return fmt::format("; {:.1f} seconds before, it was {}", Seconds(Clock::now() - when).count(), text);
  }
};

std::string frame(Say say, uint32_t a = 0, uint32_t b = 0, std::string_view text = {}) {
  const FrameHead head{static_cast<uint32_t>(text.size()), a, b, say};
  std::string out(sizeof head + text.size(), '\0');
  std::memcpy(out.data(), &head, sizeof head);
  std::memcpy(out.data() + sizeof head, text.data(), text.size());
  return out;
}

// Bytes that came, cut into frames.
struct Incoming {
  std::string bytes;
  // What is there, of at most so many bytes in all. False: the connection has ended.
  bool read(int fd, size_t most) {
    char some[16384];
    for (;;) {
      if (bytes.size() >= most) return true;
      const ssize_t n = recv(fd, some, std::min(sizeof some, most - bytes.size()), MSG_DONTWAIT);
      if (n > 0) {
        bytes.append(some, static_cast<size_t>(n));
        continue;
      }
      if (n < 0 && errno == EINTR) continue;
      return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
  }
  // True: a whole frame. Throws where it is none.
  bool next(FrameHead& head, std::string& text) {
    if (bytes.size() < sizeof head) return false;
    std::memcpy(&head, bytes.data(), sizeof head);
    if (head.bytes > kMostBytes || head.say > Say::kLeft || (head.say == Say::kPut && head.b > head.bytes))
      throw invalid("no frame of a meeting");
    if (bytes.size() < sizeof head + head.bytes) return false;
    text = bytes.substr(sizeof head, head.bytes);
    bytes.erase(0, sizeof head + head.bytes);
    return true;
  }
};

// However they differ, it takes the same time.
bool same(const char* a, const char* b, size_t bytes) {
  unsigned char differs = 0;
  for (size_t i = 0; i < bytes; ++i) differs |= static_cast<unsigned char>(a[i] ^ b[i]);
  return differs == 0;
}

class Bell {  // wakes a poll()
 public:
  Bell() : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) throw error(Code::kResourceExhausted, "no event descriptor: too many files are open");
  }
  int fd() const { return fd_.fd(); }
  void ring() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(fd(), &one, sizeof one);
  }

 private:
  Socket fd_;
};

// A thread that the caller's signals do not go to.
template <class Body>
std::thread quiet_thread(Body body) {
  const NoSignals quiet;
  try {
    return std::thread(std::move(body));
  } catch (...) {
    throw error(Code::kResourceExhausted, "no thread could be made for the meeting of the ranks");
  }
}

// How often one says that it is here.
double pulse(const MeetingOptions& o) { return std::min(1.0, o.timeout_seconds / 4); }

// A wait of half a pulse took half of the time that others are given: this process, or its host, stood still.
bool was_stopped(Clock::time_point before, const MeetingOptions& o) {
  return Seconds(Clock::now() - before).count() > o.timeout_seconds / 2;
}

// The listener, on rank 0: one thread.
class Host {
 public:
  explicit Host(const MeetingOptions& options)
      : options_(options),
        listener_(listen_on(options.address, options.port)),
        there_(static_cast<size_t>(options.size)),
        left_(there_),
        farewells_(there_.size()) {
    thread_ = quiet_thread([this] { loop(); });
  }
  ~Host() {
    quit_ = true;
    bell_.ring();
    thread_.join();
  }
  size_t turned_away() const { return turned_away_; }

 private:
  struct Question {
    uint32_t id;
    int from;  // the rank that puts it
  };
  struct Connection {
    Socket socket;
    Incoming in;
    std::string out;
    int rank = -1;  // not known yet
    bool left = false, cut = false;
    Clock::time_point last = Clock::now();
    std::string self = {};
    SaidPlace at = {};
    std::map<std::string, std::vector<Question>> asked = {};  // keys that are not there yet
  };

  void loop() {
    for (;;) {
      std::vector<pollfd> wait{{quit_ ? -1 : bell_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
      for (const auto& c : connections_)
        wait.push_back({c->socket.fd(), static_cast<short>(POLLIN | (c->out.empty() ? 0 : POLLOUT)), 0});
      const auto before = Clock::now();
      poll(wait.data(), wait.size(), static_cast<int>(quit_ ? 10 : pulse(options_) * 500));
      if (was_stopped(before, options_))
        for (const auto& c : connections_) c->last = Clock::now();
      if (quit_ && may_leave()) break;
      const size_t known = connections_.size();
      if ((wait[1].revents & POLLIN) != 0) accept_all();
      for (size_t c = 0; c < known; ++c)
        if (wait[c + 2].revents != 0) serve(*connections_[c]);
      look();
      for (const auto& c : connections_) flush(*c);
      std::erase_if(connections_, [](const auto& c) { return c->cut; });
    }
    for (const auto& c : connections_)
      if (c->rank > 0) c->out += frame(Say::kBye, 0, farewells_[0].at_fault, farewells_[0].why), flush(*c);
  }

  // What others ask for last, such as why a session was not opened, is still answered.
  bool may_leave() {
    const auto now = Clock::now();
    if (!leaving_) leaving_ = now;
    const bool alone =
        std::none_of(connections_.begin(), connections_.end(), [](const auto& c) { return c->rank > 0; });
    return alone || Seconds(now - *leaving_).count() > kFarewellSeconds;
  }

  void accept_all() {
    const size_t most_strangers = std::max(kMostStrangers, 2 * there_.size());
    for (;;) {
      Socket socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM))
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // others go on
      if (!socket) return;
      const auto is_stranger = [](const auto& c) { return c->rank < 0 && !c->cut; };
      if (static_cast<size_t>(std::count_if(connections_.begin(), connections_.end(), is_stranger)) >= most_strangers)
        (*std::find_if(connections_.begin(), connections_.end(), is_stranger))->cut = true;  // the oldest
      connections_.push_back(std::make_unique<Connection>());
      connections_.back()->socket = std::move(socket);
    }
  }

  void serve(Connection& c) {
    if (c.cut) return;  // at the door, in this round
    const bool open = c.in.read(c.socket.fd(), c.rank < 0 ? sizeof(Hello) : kMostAtOnce);
    try {
      if (c.rank < 0) greet(c);
      FrameHead head;
      for (std::string text; c.rank >= 0 && !c.cut && c.in.next(head, text);) hear(c, head, text);
    } catch (const Error&) {
      c.cut = true;
    }
    if (!open) c.cut = true;
    if (c.cut && c.rank >= 0 && !c.left) tell_lost(c, "its process has ended");
  }

  void greet(Connection& c) {
    if (c.in.bytes.size() < sizeof(Hello)) return;
    Hello hello;
    std::memcpy(&hello, c.in.bytes.data(), sizeof hello);
    char token[kTokenBytes] = {};
    options_.token.copy(token, kTokenBytes);
    if (!same(hello.token, token, kTokenBytes) || !same(hello.magic, kMagic, sizeof kMagic)) {
      // A rank of another job, or one that was started with another token: it need not try again.
      if (same(hello.magic, kMagic, sizeof kMagic)) ++turned_away_, c.out += frame(Say::kRefused), flush(c);
      c.cut = true;
      return;
    }
    c.in.bytes.erase(0, sizeof hello);
    std::string why;
    if (hello.size != static_cast<uint32_t>(options_.size))
      why = fmt::format("rank {} says that there are {} ranks, rank 0 that there are {}", hello.rank, hello.size,
                        options_.size);
    else if (hello.rank >= hello.size)
      why = fmt::format("there is no rank {} of {}", hello.rank, hello.size);
    else if (there_[hello.rank] && (quit_ || left_[hello.rank]))
      return later(c);  // one of the next meeting, at this address
    else if (there_[hello.rank])
      why = fmt::format("another process is rank {} already", hello.rank);
    if (!why.empty()) {
      c.out += frame(Say::kRefused, 0, 0, why);
      flush(c);
      c.cut = true;
      return;
    }
    there_[hello.rank] = true;
    c.rank = static_cast<int>(hello.rank);
    c.last = Clock::now();
    c.out += frame(Say::kWelcome, 0, 0, options_.self);
    for (const auto& [rank, text] : lost_) c.out += frame(Say::kLost, static_cast<uint32_t>(rank), 0, text);
    for (size_t r = 0; r < left_.size(); ++r)
      if (left_[r]) c.out += frame(Say::kLeft, static_cast<uint32_t>(r));
  }

  // It puts nothing any more.
  void leaves(int rank) {
    left_[rank] = true;
    for (const auto& c : connections_)
      for (auto& [key, questions] : c->asked)
        std::erase_if(questions, [&](const Question& q) {
          if (q.from == rank) c->out += absent(q.id, rank);
          return q.from == rank;
        });
  }

  std::string absent(uint32_t question, int rank) const {
    const Farewell& farewell = farewells_[rank];
    return frame(Say::kAbsent, question, farewell.at_fault, farewell.why);
  }

  static void later(Connection& c) {
    c.out += frame(Say::kLater);
    flush(c);
    c.cut = true;
  }

  void hear(Connection& c, const FrameHead& head, const std::string& text) {
    c.last = Clock::now();
    switch (head.say) {
      case Say::kPut: {
        const std::string key = text.substr(0, head.bytes - head.b);
        if (key.empty()) {
          c.self = text;
          break;
        }
        std::string& value = values_[key] = text.substr(key.size());
        for (const auto& other : connections_)
          if (const auto asked = other->asked.find(key); asked != other->asked.end()) {
            for (const Question& q : asked->second) other->out += frame(Say::kValue, q.id, 0, value);
            other->asked.erase(asked);
          }
        break;
      }
      case Say::kGet:
        if (const auto at = values_.find(text); at != values_.end())
          c.out += frame(Say::kValue, head.a, 0, at->second);
        else if (head.b < left_.size() && left_[head.b])
          c.out += absent(head.a, static_cast<int>(head.b));
        else
          c.asked[text].push_back({head.a, static_cast<int>(head.b)});
        break;
      case Say::kBye:
        c.left = c.cut = true;
        farewells_[c.rank] = {head.b, text};
        leaves(c.rank);
        for (const auto& other : connections_)
          if (other->rank >= 0) other->out += frame(Say::kLeft, static_cast<uint32_t>(c.rank));
        break;
      case Say::kHere: c.at.say(text); break;
      case Say::kLost: {  // it does not reach that one, and nobody else is known to be lost
        const auto is_that = [&](const auto& other) { return other->rank == static_cast<int>(head.a) && !other->cut; };
        const auto other = std::find_if(connections_.begin(), connections_.end(), is_that);
        if (lost_.empty() && other != connections_.end() && c.rank != (*other)->rank) tell_lost(**other, text);
        break;
      }
      default: c.cut = true;
    }
  }

  void look() {
    const auto now = Clock::now();
    const bool beat = Seconds(now - beat_).count() >= pulse(options_);
    if (beat) beat_ = now;
    std::string_view rank_0s;
    for (const auto& c : connections_)
      if (c->rank == 0) rank_0s = c->at.text;
    for (const auto& c : connections_) {
      const double silent = Seconds(now - c->last).count();
      if (c->rank < 0 && silent > kStrangerSeconds) c->cut = true;
      if (c->rank >= 0 && !c->cut && silent > options_.timeout_seconds) {
        c->cut = true;
        tell_lost(*c, fmt::format("it has not been heard for {:.3g} seconds", options_.timeout_seconds));
      }
      if (beat && c->rank >= 0) c->out += frame(Say::kHere, 0, 0, rank_0s);
    }
  }

  void tell_lost(Connection& lost, const std::string& what) {
    const std::string who = lost.self.empty() ? std::string() : " (" + lost.self + ")";
    const std::string why = fmt::format("rank {}{} is lost: {}{}", lost.rank, who, what, lost.at.last());
    if (!lost_.emplace(lost.rank, why).second) return;
    for (const auto& c : connections_)  // itself too: it may only have been stopped
      if (c->rank >= 0) c->out += frame(Say::kLost, static_cast<uint32_t>(lost.rank), 0, why);
    leaves(lost.rank);
  }

  static void flush(Connection& c) {
    while (!c.out.empty()) {
      const ssize_t n = send(c.socket.fd(), c.out.data(), c.out.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n <= 0) return;  // later, or its end is seen when it is read
      c.out.erase(0, static_cast<size_t>(n));
    }
  }

  const MeetingOptions options_;
  Bell bell_;
  Socket listener_;
  std::vector<bool> there_, left_;  // ranks
  std::vector<Farewell> farewells_;
  std::atomic<size_t> turned_away_{0};  // for their token
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::string, std::string> values_;
  std::map<int, std::string> lost_;
  Clock::time_point beat_ = Clock::now();
  std::optional<Clock::time_point> leaving_;
  std::atomic<bool> quit_{false};
  std::thread thread_;
};

class Meeting final : public MeetingStore {
 public:
  explicit Meeting(const MeetingOptions& options) : options_(options) {
    if (options.rank == 0) host_ = std::make_unique<Host>(options);
    Hello hello;
    std::memcpy(hello.magic, kMagic, sizeof kMagic);
    options.token.copy(hello.token, kTokenBytes);
    hello.rank = static_cast<uint32_t>(options.rank), hello.size = static_cast<uint32_t>(options.size);
    const auto begin = Clock::now();
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(50))) {
      Watch::look();
      const double spent = Seconds(Clock::now() - begin).count();
      socket_ = connect_to(options.address, options.port, options.timeout_seconds, spent);
      in_ = {};
      write_all(socket_.fd(), &hello, sizeof hello, options.timeout_seconds);
      if (greet(begin)) break;  // else those who met there before have not all left
    }
    say(Say::kPut, 0, static_cast<uint32_t>(options.self.size()), options.self);  // without a key
    thread_ = quiet_thread([this] { loop(); });
  }
  ~Meeting() override {
    quit_ = true;
    bell_.ring();
    thread_.join();
    const std::string bye = frame(Say::kBye, 0, farewell_.at_fault, farewell_.why);
    write_all(socket_.fd(), bye.data(), bye.size(), 1);
  }

  void put(const std::string& key, std::string value) override {
    if (key.empty() || key.size() + value.size() > kMostBytes)
      throw internal("'{}' is put with {} bytes", key, value.size());
    if (!say(Say::kPut, 0, static_cast<uint32_t>(value.size()), key + value)) throw is_over();
  }
  std::string get(const std::string& key, int from, double timeout_seconds) override {
    std::unique_lock lock(mutex_);
    const uint32_t id = asked_++;
    lock.unlock();
    if (!say(Say::kGet, id, static_cast<uint32_t>(from), key)) throw is_over();
    lock.lock();
    const auto known = [&] { return answers_.contains(id) || over_ || deaf_ || lost_.contains(0); };
    watched_wait(changed_, lock, timeout_seconds, known);
    // Where rank 0 says nothing, the other one may have come; whether it is lost is known soon.
    const auto silent = [&] { return Seconds(Clock::now() - heard_.load()).count() > options_.timeout_seconds / 2; };
    if (!known() && silent())
      watched_wait(changed_, lock, options_.timeout_seconds, [&] { return known() || !silent(); });
    if (auto node = answers_.extract(id)) {
      Answer& answer = node.mapped();
      if (answer.value) return std::move(*answer.value);
      if (const auto lost = lost_.find(from); lost != lost_.end())
        throw error(Code::kUnavailable, "{}", lost->second).at_rank(from);
      throw has_left_us(from, answer.farewell);
    }
    if (!lost_.empty()) throw error(Code::kUnavailable, "{}", lost_.begin()->second).at_rank(lost_.begin()->first);
    const bool over = over_ || deaf_;
    lock.unlock();
    if (over) throw is_over();
    throw error(Code::kDeadlineExceeded, "no rank has put '{}' in {} seconds", key, timeout_seconds);
  }
  bool doubt(int rank, const std::string& why, double seconds, std::function<bool()> stands) override {
    const std::lock_guard lock(mutex_);
    if (deaf_) return false;
    const auto since = Clock::now() - std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
    const auto at = doubts_.find(rank);
    if (at == doubts_.end() || !at->second.is_so())
      doubts_.insert_or_assign(rank, Doubt{why, since, std::move(stands)});
    return true;
  }
  void leaves_for(const Error& why) override {
    farewell_ = {static_cast<uint32_t>(why.where().rank + 1), why.message().substr(0, kMostFarewellBytes)};
  }
  bool has_left(int rank) override {
    const std::lock_guard lock(mutex_);
    return left_.contains(rank) || (rank == 0 && over_);
  }
  size_t turned_away() const override { return host_ ? host_->turned_away() : 0; }

 private:
  Error is_over() {
    const std::lock_guard lock(mutex_);
    const auto lost = lost_.find(0);
    return lost == lost_.end() ? has_left_us(0, rank_0s_) : error(Code::kUnavailable, "{}", lost->second).at_rank(0);
  }
  Error has_left_us(int rank, const Farewell& farewell) const {
    const std::string why = farewell.why.empty() ? "" : ": " + farewell.why;
    const bool other = farewell.at_fault > 0 && farewell.at_fault <= static_cast<uint32_t>(options_.size);
    return error(Code::kUnavailable, "rank {} has left the meeting of the ranks{}", rank, why)
        .at_rank(other ? static_cast<int>(farewell.at_fault) - 1 : rank);
  }
  [[noreturn]] void refused() const {
    throw error(
        Code::kUnauthenticated,
        "rank 0 at {}:{} did not let rank {} in: the token of the job (WHALE_JOB_TOKEN) is another one there, or "
        "something else than libwhale listens",
        options_.address, options_.port, options_.rank)
        .at_rank(0);
  }
  Error late() const {
    return error(Code::kDeadlineExceeded, "rank 0 at {}:{} {} in {} seconds", options_.address, options_.port,
                 later_ ? "has not left the meeting before this one" : "says nothing", options_.timeout_seconds)
        .at_rank(0);
  }
  // False: it may let this rank in later.
  bool greet(Clock::time_point begin) {
    const auto seconds_left = [&] { return options_.timeout_seconds - Seconds(Clock::now() - begin).count(); };
    FrameHead head;
    std::string text;
    while (!is_frame(head, text)) {
      if (!is_ready(socket_.fd(), POLLIN, seconds_left())) throw late();
      const size_t before = in_.bytes.size();
      if (in_.read(socket_.fd(), kMostAtOnce) || in_.bytes.size() != before) continue;
      // Cut off without a word, as one at the door is when rank 0 leaves, and as what is no meeting may do.
      const double since = Seconds(Clock::now() - later_.value_or(begin)).count();
      if (before == 0 && since < 2 * kFarewellSeconds && seconds_left() > 0) return false;
      refused();
    }
    if (head.say == Say::kLater) {
      later_ = Clock::now();
      if (seconds_left() > 0) return false;
      throw late();
    }
    if (head.say == Say::kRefused && text.empty()) refused();
    if (head.say == Say::kRefused) throw error(Code::kFailedPrecondition, "{}", text).at_rank(options_.rank);
    if (head.say != Say::kWelcome) refused();
    who_is_0_ = text.empty() ? "rank 0" : fmt::format("rank 0 ({})", text);
    return true;
  }
  bool is_frame(FrameHead& head, std::string& text) {
    try {
      return in_.next(head, text);
    } catch (const Error&) {  // something else listens there
      refused();
    }
  }
  bool say(Say what, uint32_t a = 0, uint32_t b = 0, std::string_view text = {}) {
    const std::string bytes = frame(what, a, b, text);
    const std::lock_guard lock(writing_);
    return write_all(socket_.fd(), bytes.data(), bytes.size(), options_.timeout_seconds);
  }

  void loop() {
    listen();
    {
      const std::lock_guard lock(mutex_);
      deaf_ = true;
      changed_.notify_all();
    }
    tell_doubts(0);
  }
  void listen() {
    auto said = Clock::now(), heard = said, before = said;
    while (!quit_) {
      heard_ = heard;
      pollfd wait[] = {{bell_.fd(), POLLIN, 0}, {socket_.fd(), POLLIN, 0}};
      poll(wait, 2, static_cast<int>(pulse(options_) * 500));
      if (quit_) return;
      // Who was stopped itself has not listened either.
      if (was_stopped(std::exchange(before, Clock::now()), options_)) heard = before;
      bool open = true;
      if (wait[1].revents != 0) heard = before, open = in_.read(socket_.fd(), kMostAtOnce);
      try {
        FrameHead head;
        for (std::string text; in_.next(head, text);) hear(head, text);
      } catch (const Error&) {
        open = false;
      }
      if (over()) return;
      if (!open) return lose(0, fmt::format("{} is lost: its process has ended{}", who_is_0_, rank_0_at_.last()));
      const auto now = Clock::now();
      if (Seconds(now - heard).count() > options_.timeout_seconds)
        return lose(0, fmt::format("{} is lost: it has not been heard for {:.3g} seconds{}", who_is_0_,
                                   options_.timeout_seconds, rank_0_at_.last()));
      tell_doubts(options_.timeout_seconds);
      if (Seconds(now - said).count() >= pulse(options_)) said = now, say(Say::kHere, 0, 0, place());
    }
  }
  std::string place() const {
    try {
      return options_.at ? options_.at().substr(0, kMostPlaceBytes) : std::string();
    } catch (const std::exception&) {  // no memory for it
      return {};
    }
  }
  // That are so old.
  void tell_doubts(double seconds) {
    std::map<int, Doubt> old;
    {
      const std::lock_guard lock(mutex_);
      if (!lost_.empty()) return;  // one is lost: whoever asks is told of it
      std::erase_if(doubts_, [](const auto& each) { return !each.second.is_so(); });
      for (auto at = doubts_.begin(); at != doubts_.end();)
        if (const auto next = std::next(at); Seconds(Clock::now() - at->second.since).count() >= seconds)
          old.insert(doubts_.extract(std::exchange(at, next)));
        else
          at = next;
    }
    for (const auto& [rank, doubt] : old) {
      const std::string why = fmt::format("rank {} does not reach it: {}", options_.rank, doubt.why);
      // Rank 0 tells all, or knows better: that it has left, or whose loss it is.
      if (seconds == 0 || !say(Say::kLost, static_cast<uint32_t>(rank), 0, why))
        lose(rank, fmt::format("rank {} is lost: {}", rank, why));
    }
  }
  bool over() {
    const std::lock_guard lock(mutex_);
    return over_;
  }
  void hear(const FrameHead& head, const std::string& text) {
    const bool cut_off = head.say == Say::kLost && head.a == static_cast<uint32_t>(options_.rank);
    if (head.say == Say::kLost) lose(static_cast<int>(head.a), text);
    if (head.say == Say::kHere) rank_0_at_.say(text);
    const std::lock_guard lock(mutex_);
    if (head.say == Say::kValue) answers_[head.a] = {text, {}};
    if (head.say == Say::kAbsent) answers_[head.a] = {std::nullopt, {head.b, text}};
    if (head.say == Say::kBye) rank_0s_ = {head.b, text};
    if (head.say == Say::kLeft && head.a < static_cast<uint32_t>(options_.size)) left_.insert(static_cast<int>(head.a));
    if (head.say == Say::kBye || cut_off) over_ = true;
    changed_.notify_all();
  }
  void lose(int rank, const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (rank < 0 || rank >= options_.size || !lost_.emplace(rank, why).second) return;
      changed_.notify_all();
    }
    if (options_.lost) options_.lost(rank, why);
  }

  const MeetingOptions options_;
  std::unique_ptr<Host> host_;  // ends last: this rank's connection is to it
  Bell bell_;
  Socket socket_;
  Incoming in_;
  std::string who_is_0_;
  SaidPlace rank_0_at_;
  std::optional<Clock::time_point> later_;  // that it last asked to come later
  std::mutex writing_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t asked_ = 0;
  struct Answer {
    std::optional<std::string> value;  // none: it will not come, and why
    Farewell farewell;
  };
  std::map<uint32_t, Answer> answers_;  // by question
  Farewell rank_0s_, farewell_;         // and this one's
  std::map<int, std::string> lost_;
  std::set<int> left_;  // ranks that have said farewell
  struct Doubt {
    std::string why;
    Clock::time_point since;
    std::function<bool()> stands;
    bool is_so() const { return !stands || stands(); }
  };
  std::map<int, Doubt> doubts_;
  bool over_ = false, deaf_ = false;                     // deaf: the thread has ended
  std::atomic<Clock::time_point> heard_ = Clock::now();  // rank 0, last
  std::atomic<bool> quit_{false};
  std::thread thread_;
};

}  // namespace

std::shared_ptr<MeetingStore> meet(const MeetingOptions& options) { return std::make_shared<Meeting>(options); }

}  // namespace whale
