// Among parts of a process: who sends puts the letter down with who receives.
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "base/read_memory.h"
#include "comm/courier.h"

namespace whale {
namespace {

struct Receivers {
  explicit Receivers(int ranks) : of(static_cast<size_t>(ranks)) {}
  std::shared_mutex mutex;             // held exclusively while one comes or goes
  std::vector<Courier::Receiver*> of;  // by rank; null: not there yet, or gone
};

class InprocCourier final : public Courier {
 public:
  InprocCourier(std::shared_ptr<Receivers> receivers, int rank, Receiver& receiver)
      : receivers_(std::move(receivers)), rank_(rank), receiver_(receiver) {
    const std::lock_guard lock(receivers_->mutex);
    receivers_->of[rank] = &receiver;
  }
  ~InprocCourier() override {
    const std::lock_guard lock(receivers_->mutex);
    receivers_->of[rank_] = nullptr;
  }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(receivers_->of.size()); }
  void send(int to, const LetterHead& head, const void* body, size_t bytes, const Ticket& ticket) override {
    {
      const std::shared_lock lock(receivers_->mutex);
      if (Receiver* receiver = receivers_->of[to]) {
        char* place = nullptr;
        if (const Ticket letter = receiver->accept(head, bytes, place); letter.thing != nullptr) {
          if (bytes > 0) std::memcpy(place, body, bytes);
          receiver->arrived(letter);
        }
      }
    }
    if (ticket.thing != nullptr) receiver_.sent(ticket);
  }
  bool lends_to(int) const override { return is_readable(); }
  // By the kernel, as between processes: an address that is not there any more is no fault.
  bool read(int, uint64_t address, char* place, size_t bytes) override {
    return read_memory(getpid(), address, place, bytes);
  }
  void give_up(int) override {}

 private:
  static bool is_readable() {
    static const bool known = [] {
      const char from = 1;
      char to = 0;
      return read_memory(getpid(), reinterpret_cast<uintptr_t>(&from), &to, 1) && to == 1;
    }();
    return known;
  }
  const std::shared_ptr<Receivers> receivers_;
  const int rank_;
  Receiver& receiver_;
};

}  // namespace

std::vector<MakeCourier> make_inproc_couriers(int ranks) {
  const auto receivers = std::make_shared<Receivers>(ranks);
  std::vector<MakeCourier> all;
  for (int r = 0; r < ranks; ++r)
    all.push_back([receivers, r](Courier::Receiver& receiver) {
      return std::make_unique<InprocCourier>(receivers, r, receiver);
    });
  return all;
}

}  // namespace whale
