// What moves data between devices. A transport runs collectives over the groups of a plan, whose members call them in
// the same order, and carries the messages of links. inproc: the device threads of one process, over their shared
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/counter.h"
#include "device/device.h"
#include "plan/plan.h"

namespace whale {

// How an operand of a bucket is cut.
struct DigitCuts {
  Digit digit;
  std::vector<Interval> cuts;  // the interval of each member, one behind the other
};

// One member's side of a collective. Digits and cuts are in local coordinates: what other axes cut is cut already.
struct CollectiveSpec {
  OpCode op{};                       // all_reduce, all_gather, reduce_scatter, all_to_all, shift, adasum
  Combine combine = Combine::kSum;   // all_reduce, reduce_scatter
  std::vector<Operand> in;           // all_reduce, all_gather, reduce_scatter: the bucket; else one tensor
  std::vector<Operand> out;          // all_reduce: the same storage
  Digit digit;                       // all_gather, all_to_all: cut in `in`; reduce_scatter: cut in `out`
  std::vector<Interval> cuts;        // the interval of each member, one behind the other
  std::vector<DigitCuts> more = {};  // all_gather, reduce_scatter: of the operands behind the first
  Digit to_digit = {};               // all_to_all: cut in `out`
  std::vector<Interval> to_cuts = {};
  Ints weights = {};  // adasum: samples of each member; empty: equal
};

// Bound to its buffers for the session's life. run() allocates nothing; it blocks until the result is in place and the
// buffers may be written again. false: aborted, and the buffers hold no meaning.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual bool run(Lookout* lookout) = 0;
};

// The links of an entry. Message j of a channel waits until message j - slots has been taken. The ends of a channel
// may lie on one device.
class Links {
 public:
  virtual ~Links() = default;
  // This device's end of a link: `tensor` is what is sent, or what is received. From any thread.
  virtual std::unique_ptr<Collective> bind(int link, int device, const Operand& tensor, bool sending,
                                           Device& memory) = 0;
  virtual void abort() = 0;
  virtual void reset() = 0;  // drops messages that nobody took
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Member `device` (its number in the plan) of the part of group `group` that it is in. The devices' memory must
  // outlive the collective.
  virtual std::unique_ptr<Collective> bind(int group, int device, const CollectiveSpec& spec, Device& memory) = 0;
  virtual std::unique_ptr<Links> open_links(const std::vector<Link>& links) = 0;
  virtual void abort() = 0;  // every run() that waits, and every later one, returns false, until reset()
  virtual void reset() = 0;  // between runs, when no member is inside a collective
};

std::unique_ptr<Transport> make_inproc(const std::vector<Group>& groups);

}  // namespace whale
