// An all-reduce for ranks that have several members each. Those of a rank read each other's memory; between ranks a
// running sum goes from each rank to the next, in the order of the members, and the result comes back the same way, in
// chunks that follow each other. A rank sends and receives each byte twice, however many members it has, and an element
// is combined in the order of the members, as everywhere: a ring adds each slice in another order, and moves as much.
#pragma once

#include "comm/member.h"
#include "comm/messages.h"
#include "cost/collective_forms.h"

namespace whale {

// Members of a group, by the rank that they are on, where those of each rank stand side by side.
struct RanksOfGroup {
  struct Run {
    size_t begin = 0, count = 0;  // members
  };
  std::vector<Run> runs = {};  // in the order of the members; empty: they are mixed
  size_t here = 0;             // index of this rank's

  RanksOfGroup(const Seat& seat, int rank);
  size_t lanes() const;   // members of each rank that pass something on
  size_t widest() const;  // members of a rank, at most
  GroupWork work(double bytes) const;
};

// `here`: the members of this rank, of which this one is number `seat.rank - run.begin`.
std::unique_ptr<Collective> bind_chain(inproc::GroupState& here, const RanksOfGroup& ranks, const Seat& seat,
                                       const CollectiveSpec& spec);

}  // namespace whale
