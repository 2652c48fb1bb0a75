// An entry of a plan on the clock (schedule/clock.h): its devices, or one of each class, walk through their rows.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "plan/communication.h"
#include "schedule/clock.h"

namespace whale {

// An instruction that is walked, and the last one before it of each other queue that must be over: position in the list
// of its segment; -1: none, or none that the step before it on its queue did not need.
struct PlanStep {
  int32_t instruction = 0;
  std::array<int32_t, kQueues> needs{};
};
using PlanSteps = std::vector<std::vector<std::vector<PlanStep>>>;  // [program][segment]
enum class Walked : uint8_t { kAll, kCommunication };
PlanSteps steps_of(const Entry& entry, Walked walked);

// Seconds; of a send or receive, of all its messages together, which go one after the other.
using Duration = std::function<double(const Instruction& instruction, int32_t device)>;

// What slows down what beside it, on each device.
struct Besides {
  std::vector<const Clock::Rates*> rates;                                   // of each device; nullptr: nothing does
  std::function<int(const Instruction& instruction, int32_t device)> kind;  // kNone: none, it takes nothing of anybody
};

class PlanWalk {
 public:
  // `classes` as classes_alike gives them: the first device of each walks. Of communication alone, rows are joined: who
  // never waits for ever then does not where they wait for less.
  PlanWalk(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& classes, const PlanSteps& steps,
           Walked walked, const Duration& seconds, const Besides& besides = {});

  struct Visit {
    int32_t device = 0, row = 0, segment = 0, instruction = 0;
    Clock::Item first = 0, last = 0;  // what it is on the clock: several messages are several items
  };
  // Who waits for whom where that has no end.
  struct Standstill {
    std::string text;          // "": there is none
    std::vector<Visit> waits;  // the first is at whom the text begins; what each of the others keeps from running
  };
  // Finds the times.
  Standstill run();

  const std::vector<Visit>& visits() const { return visits_; }  // by device, then row, then instruction
  const Instruction& instruction(const Visit& v) const;
  double begin(const Visit& v) const { return clock_.begin(v.first); }
  double end(const Visit& v) const { return clock_.end(v.last); }

 private:
  Standstill standstill(const Clock::Stuck& stuck) const;

  const Entries& e_;
  Clock clock_;
  std::vector<Visit> visits_;
};

}  // namespace whale
