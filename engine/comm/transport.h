// What moves data between devices. A transport runs collectives over the groups of a plan; members call them in the
// same order. inproc: the device threads of one process, over their shared memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/counter.h"
#include "device/device.h"
#include "plan/plan.h"

namespace whale {

// One member's side of a collective.
struct CollectiveSpec {
  OpCode op{};                      // all_reduce, all_gather
  Combine combine = Combine::kSum;  // all_reduce
  std::vector<Operand> in;          // all_reduce: the bucket; all_gather: this member's part
  std::vector<Operand> out;         // all_reduce: the same storage; all_gather: the whole tensor
  Digit digit;                      // all_gather: the digit of out that is cut ...
  std::vector<Interval> cuts;       // ... and the interval of each member
};

// Bound to its buffers for the session's life. run() allocates nothing; it blocks until the result is in place and the
// buffers may be written again. false: aborted, and the buffers hold no meaning.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual bool run(Lookout* lookout) = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Member `device` (its number in the plan) of group `group`. The devices' memory must outlive the collective.
  virtual std::unique_ptr<Collective> bind(int group, int device, const CollectiveSpec& spec, Device& memory) = 0;
  virtual void abort() = 0;  // every run() that waits, and every later one, returns false, until reset()
  virtual void reset() = 0;  // between runs, when no member is inside a collective
};

std::unique_ptr<Transport> make_inproc(const std::vector<Group>& groups);

}  // namespace whale
