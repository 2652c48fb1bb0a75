// Where in a run a device's queue is, and what a rank waits for, in the words of the graph.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "run/recorder.h"
#include "world/world.h"

namespace whale {

struct QueuePlace {
  const Instruction* instruction = nullptr;
  std::string of;                // what it makes; of a collective or a message, what it moves
  std::string scope;             // "replica/block.3"; empty: the root
  int stage = -1;                // of a pipeline; -1: none
  int64_t micro_batch = -1;      // -1: all of them
  std::vector<int32_t> devices;  // a collective's, itself too; whom it receives from, or sends to
  int64_t began = 0;             // nanoseconds, of the steady clock
};
QueuePlace place_of(const Plan& plan, const Entry& entry, size_t device, const Recorder::Event& event);

const char* phase_text(Phase phase);                    // "forward"
bool waits_for_others(const Instruction& instruction);  // it ends when other devices have done something
// "all_reduce of h in replica/block.3 (backward of stage 2, micro-batch 1) among ranks 0-2". `ranks`: of the devices;
// empty: there is one rank, and devices are named.
std::string place_text(const QueuePlace& place, const std::vector<int32_t>& ranks);

// "rank 1", "ranks 0-2,5": by the words for one and for several.
std::string numbers(std::vector<int32_t> list, const char* one, const char* several);
// "ranks 0,2 have not begun": what, follows.
std::string have_not_begun(const std::vector<int32_t>& ranks, const World& world);

// What a rank says of itself when another one is lost.
struct RankPlace {
  bool waits = false;  // for other ranks
  std::string what;    // "all_reduce of ..."; empty: it says nothing
};
// "ranks 0,2 wait for all_reduce of ...; rank 3 is at matmul of ...": those that say the same together.
std::string joined_places(const std::vector<RankPlace>& by_rank);

}  // namespace whale
