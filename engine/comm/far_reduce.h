// Reductions between ranks. An element is combined in the order of the members, by whoever needs it: the bits are
// those of the reduction in shared memory.
#pragma once

#include "comm/messages.h"
#include "comm/transport.h"

namespace whale {

// `gives`: what each member gets of this one, `mine` in `own`'s order; the sums of all members' go to `target`.
struct FarReduce {
  Combine combine{};
  DType dtype{};
  Pieces gives;                      // by member; this one's own among them
  std::vector<Strided> target = {};  // of the sums
  bool whole = false;                // all members have all, and combine it
  Pieces results = {};               // all_reduce by slices: where the sums of the others are put; else empty
};
std::unique_ptr<Collective> bind_far_reduce(const Seat& seat, FarReduce what);

}  // namespace whale
