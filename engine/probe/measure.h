// What one device, and one member of a group of all devices, measures. On the device's own thread.
#pragma once

#include <functional>
#include <vector>

#include "comm/transport.h"
#include "probe/probe.h"

namespace whale {

// Memory of a device, every byte of it written.
class ProbedMemory {
 public:
  ProbedMemory(Device& device, size_t bytes);
  ~ProbedMemory();
  ProbedMemory(const ProbedMemory&) = delete;
  ProbedMemory& operator=(const ProbedMemory&) = delete;
  void* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  Device& device_;
  const size_t bytes_;
  void* const data_;
};

// Products, long sums, short ones, copies. `on_this_thread`: it computes there and nowhere else. `all_begin`: before
// each measurement; all devices take as many.
void measure_device(Device& device, bool on_this_thread, double budget, const std::function<void()>& all_begin,
                    ProbedDevice& out);

// All devices together, then rounds of pairs, in which each meets every other one once.
std::vector<Group> groups_of_pairs(int devices);

// Seconds of gathers and messages, by one member.
struct Meetings {
  static constexpr int64_t kSmall = 4 << 10, kLarge = 8 << 20;  // bytes
  double small_gather = 0, large_gather = 0;
  std::vector<double> small, large;  // by the other device, of a message each way
};

// Its calls throw ProbeAborted where `lookout` has ended the transport. The others read its memory and what it has
// bound until they are all through, or have noticed that: it lives as long.
struct ProbeAborted {};
class Prober {
 public:
  Prober(int number, const std::vector<Group>& groups, Transport& transport, Device& device, Lookout* lookout);
  double most(double mine);  // the largest of all members', which call it alike
  Meetings measure(double budget);

 private:
  double seconds_of(OpCode op, int group, int64_t bytes, double budget);
  void run(Collective& collective);

  const size_t number_;
  const std::vector<Group>& groups_;
  Transport& transport_;
  Device& device_;
  Lookout* lookout_;
  std::vector<float> all_;
  ProbedMemory on_device_;  // `all_`
  std::unique_ptr<Collective> sum_;
  ProbedMemory in_, out_;  // of what is measured
  std::vector<std::unique_ptr<Collective>> bound_;
};

}  // namespace whale
