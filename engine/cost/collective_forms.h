// The forms of an all-reduce and of an all-gather between processes, none of which changes the order of a sum, and what
// they cost.
#pragma once

#include "cost/cost.h"

namespace whale {

enum class AllReduceForm {
  kWhole,   // each member sends everything to each other one, and adds up everything
  kSlices,  // each adds up a slice, and sends it to the others
  kChain,   // a running sum goes from process to process, and the result comes back (comm/chain.h)
};

struct GroupWork {
  double bytes = 0;
  int64_t members = 1, processes = 1;
  int64_t widest = 1;  // members of a process, at most
  double chunk = 0;    // bytes: of a chain's messages
};

enum class GatherForm {
  kEach,  // each member sends its part to each other one
  kOnce,  // to one of each process, from which the others there copy it (comm/process_gather.h)
};

// Of the process with the most members, whose core sends and adds.
double all_reduce_seconds(AllReduceForm form, const GroupWork& work, const Profile& profile);
// The one that is soonest done; a chain only where a process has several members.
AllReduceForm choose_all_reduce(const GroupWork& work, const Profile& profile);
// `work.bytes`: of all parts.
double gather_seconds(GatherForm form, const GroupWork& work, const Profile& profile);
GatherForm choose_gather(const GroupWork& work, const Profile& profile);

}  // namespace whale
