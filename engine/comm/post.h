// Wires over a courier: a mailbox for each channel that comes in, a desk for each session.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "comm/courier.h"
#include "comm/wire.h"

namespace whale {

// Of one rank. Thread-safe.
class Post final : public Courier::Receiver, public std::enable_shared_from_this<Post> {
 public:
  static std::shared_ptr<Post> open(int size, const MakeCourier& make);
  Post(const Post&) = delete;
  Post& operator=(const Post&) = delete;
  ~Post() override;

  int rank() const { return courier_->rank(); }
  int size() const { return size_; }
  // This rank's wire of its n-th session, from 0: in order, each once. What came for it before is there. Its end closes
  // the session, and what comes after is dropped.
  std::shared_ptr<Wire> next_wire();
  // A rank is lost, as somebody else than the courier noticed.
  void give_up(int rank, const std::string& why) noexcept;

 private:
  struct Desk;
  class Line;
  class Outbox;
  class Inbox;
  using Ticket = Courier::Ticket;

  explicit Post(int size) : size_(size) {}
  std::shared_ptr<Desk> desk_of(uint64_t session);  // null: it is closed
  void send(const Desk& desk, int to, LetterHead head, const void* body, size_t bytes, const Ticket& ticket);
  void wake() noexcept;  // who sleeps in the courier looks again
  Ticket accept(const LetterHead& head, size_t bytes, char*& body) override;
  void arrived(const Ticket& letter) noexcept override;
  void sent(const Ticket& letter) noexcept override;
  void lost(int rank, const std::string& why) noexcept override;

  const int size_;  // ranks; the first letters may come before the courier is at hand
  std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Desk>> desks_;  // by session: open, or not yet
  uint64_t opened_ = 0;                              // sessions so far
  std::map<int, std::string> lost_;                  // ranks, and why
  std::unique_ptr<Courier> courier_;                 // ends first
  std::atomic<Courier*> at_hand_{nullptr};
};

}  // namespace whale
