// An all-gather for ranks that have several members each: a part goes to one member of each other rank, and those of a
// rank copy it from that one's result. A rank receives each byte once, however many members it has.
#pragma once

#include "comm/chain.h"

namespace whale {

// `here` as bind_chain's. `part`, `whole`: of each member, what this one sends and where it puts what that one sends,
// in the order of those operands of `spec` that have elements.
std::unique_ptr<Collective> bind_process_gather(inproc::GroupState& here, const RanksOfGroup& ranks, const Seat& seat,
                                                const CollectiveSpec& spec, const Pieces& part, const Pieces& whole);

}  // namespace whale
