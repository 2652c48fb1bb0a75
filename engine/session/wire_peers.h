// The ranks that save or load together, over the session's wire: a run without devices, which all ranks begin alike.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include "checkpoint/peers.h"
#include "run/beginners.h"
#include "run/machine.h"

namespace whale {

class WirePeers final : public Peers, private Ear::Listener, private Lookout {
 public:
  // Waits until all ranks do the same. `what`: "save", "load".
  WirePeers(Machine& machine, std::string_view what);
  ~WirePeers() override;
  WirePeers(const WirePeers&) = delete;
  WirePeers& operator=(const WirePeers&) = delete;

  int rank() const override { return wire_.rank(); }
  int size() const override { return wire_.size(); }
  std::vector<std::string> collect(const std::string& mine) override;
  std::string spread(const std::string& rank_0s) override;
  double patience() const override;
  void finish() { cancellable_ = false; }  // from here on a cancel is too late; so it is in spread()

 private:
  struct Way {  // to and from a rank; null: itself, or between two that are not rank 0
    std::unique_ptr<Wire::Sender> to;
    std::unique_ptr<Wire::Receiver> from;
  };
  template <class Body>
  std::invoke_result_t<Body> within(double seconds, bool cancellable, Body body);  // throws what ended it
  void send(int rank, const std::string& text);
  std::string receive(int rank);
  void hear(const Notice& notice) noexcept override;
  void look() override;
  void end(Error why, bool own) noexcept;

  Machine& machine_;
  Wire& wire_;
  const std::string_view what_;
  const uint64_t subject_;
  std::vector<Way> ways_;
  Beginners begun_;
  bool cancellable_ = true;
  std::chrono::steady_clock::time_point since_ = {}, until_ = {};  // of this call, as the next
  bool cancellable_now_ = true;
  std::mutex mutex_;
  std::optional<Error> error_;  // the first, and whether it is this rank's
  bool own_ = false;
};

}  // namespace whale
