// What carries letters between the ranks of a world: inside a process, or between processes. It knows nothing of runs;
// post.h makes wires of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace whale {

// In front of every letter, as it lies in memory: ranks are of one build and byte order, which they check when they
// meet.
struct LetterHead {
  enum Kind : uint8_t {
    kMessage,  // of a channel: `tag`, in the order of `sequence`
    kLent,     // the same; its body says where the message lies with its sender
    kTaken,    // its receiver has taken the next message
    kRead,     // its receiver has read a lent one
    kNotice,
  };
  uint64_t session = 0, run = 0;
  uint64_t tag = 0;       // kNotice: its subject
  uint32_t from = 0;      // rank
  uint32_t sequence = 0;  // of a message: from 0 in each run; kNotice: its code
  uint32_t capacity = 0;  // of a message: of the channel; kNotice: its numbers
  uint32_t channel = 0;   // its number among those of its sender to its receiver; kNotice: its `same`
  Kind kind = kMessage;
  uint8_t notice = 0;  // kNotice: Notice::Kind; the body is its text
  uint8_t unused[6] = {};
};
static_assert(sizeof(LetterHead) == 48);

class Courier {
 public:
  // Something of the receiver's, which lives as long as `owner` is held.
  struct Ticket {
    std::shared_ptr<void> owner = {};
    void* thing = nullptr;
  };
  // Who gets the letters of a rank. Called from threads of the courier, or of who sends or polls.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // Where the body is put; null `thing`: the letter is not wanted. Throws bad_alloc.
    virtual Ticket accept(const LetterHead& head, size_t bytes, char*& body) = 0;
    virtual void arrived(const Ticket& letter) noexcept = 0;
    virtual void sent(const Ticket& letter) noexcept = 0;  // its body may be written again
    // That rank sends and takes nothing any more. Once a rank.
    virtual void lost(int rank, const std::string& why) noexcept = 0;
  };

  virtual ~Courier() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // The body must stay as it is until the receiver hears that the letter is sent: at once, or later. Letters without a
  // ticket have a small body or none, which is copied. From any thread. Letters from one rank to another come in order,
  // but for large ones, which may come after smaller ones that were sent later. What cannot be sent is not: the
  // receiver hears that the rank is lost, or the one without which it cannot be reached.
  virtual void send(int to, const LetterHead& head, const void* body, size_t bytes, const Ticket& ticket) = 0;
  // That rank can read the memory of this one, as far as is known.
  virtual bool lends_to(int /*rank*/) const { return false; }
  // Copies the memory of another rank. false: it is not there, or not any more.
  virtual bool read(int /*rank*/, uint64_t /*address*/, char* /*place*/, size_t /*bytes*/) { return false; }
  // That rank is lost, as somebody else noticed: what is on the way to it is not waited for.
  virtual void give_up(int rank) = 0;

  // Threads that wait for letters carry them themselves, rather than wait for a thread that does. Between wait_begins()
  // and wait_ends() they poll, and sleep where nothing has come for long: sleep() may be called only where what is
  // waited for was not there after sleep_begins(). It ends when something may have come, or at wake().
  virtual void wait_begins() {}
  virtual void poll() {}
  virtual bool sleeps() const { return false; }  // false: somebody else notices
  virtual void sleep_begins() {}
  virtual void sleep(int /*milliseconds*/) {}
  virtual void sleep_ends() {}
  virtual void wake() noexcept {}
  virtual void wait_ends() {}
  // A notice may come that somebody waits for who does not carry letters.
  virtual void listen() noexcept {}
};
inline constexpr size_t kSmallBody = 2000;  // bytes

// Of `ranks` parts of one process; each rank makes its own, once.
using MakeCourier = std::function<std::unique_ptr<Courier>(Courier::Receiver& receiver)>;
std::vector<MakeCourier> make_inproc_couriers(int ranks);

}  // namespace whale
