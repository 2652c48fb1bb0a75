// What moves data between devices. A transport runs collectives over the groups of a plan, whose members call them in
// the same order, and carries the messages of links. inproc: the device threads of one process, over their shared
// memory; reference: several ranks, over a wire.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/counter.h"
#include "device/device.h"
#include "plan/plan.h"

namespace whale {

class Wire;

// One member's side of a collective: what the plan says of it, and its operands.
struct CollectiveSpec : work::Collective {
  // all_reduce, all_gather, reduce_scatter: the bucket; else one tensor. all_reduce: `out` is the same storage.
  std::vector<Operand> in, out;
};
// Bound to its buffers for the session's life. run() allocates nothing; it blocks until the result is in place and the
// buffers may be written again. false: aborted, and the buffers hold no meaning.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual bool run(Lookout* lookout) = 0;
};

// The links of an entry. Message j of a channel waits until message j - capacity has been taken. The ends of a channel
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
  // Member `device` (its number in the plan) of the part of the collective's group that it is in. The devices' memory
  // must outlive the collective.
  virtual std::unique_ptr<Collective> bind(int device, const CollectiveSpec& spec, Device& memory) = 0;
  virtual std::unique_ptr<Links> open_links(const std::vector<Link>& links) = 0;
  virtual void abort() = 0;  // every run() that waits, and every later one, returns false, until reset()
  virtual void reset() = 0;  // between runs, when no member is inside a collective
};

std::unique_ptr<Transport> make_inproc(const std::vector<Group>& groups);
// Among ranks: `ranks` has that of each device. What stays inside this rank goes as in make_inproc, the rest as flat
// messages over the wire, in the form that is soonest done by the profile, which is the same on all; `everything`: that
// too.
std::unique_ptr<Transport> make_reference(const std::vector<Group>& groups, std::shared_ptr<Wire> wire,
                                          std::vector<int32_t> ranks, const Profile& profile = kMachineOfCores,
                                          bool everything = false);

}  // namespace whale
