// A plan that contradicts itself: what is wrong with it, and where.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "plan/plan.h"

namespace whale {

// An instruction of a device; what is not known or not meant is empty or -1.
struct InstructionPlace {
  int32_t device = -1;
  int32_t micro_batch = -1;  // -1: the segment runs once
  std::string segment, instruction, verb, scope;
  int32_t number = -1;  // of the instruction in its segment
};

// "3 of forward: matmul 'y' in block0": an instruction as paths name it.
std::string told(const Plan& plan, const Segment& segment, size_t instruction);

// What verify(plan) throws. The message says all of it; beside it are its parts.
struct PlanFault : Error {
  PlanFault(std::string message, const Entry* of_entry, std::string what_is_found, InstructionPlace place,
            std::vector<std::string> that_led_there);

  std::string entry;  // "all": of none
  int64_t batch = 0;  // of the entry
  std::string found;
  InstructionPlace at;
  std::vector<std::string> path;  // who made what the instruction reads, or reads what it makes
};

// Where something was found.
struct FaultSite {
  const Program* program = nullptr;
  int32_t device = kNone;  // kNone: the first that runs the program
  const Segment* segment = nullptr;
  size_t instruction = SIZE_MAX;
  int32_t micro_batch = kNone;         // kNone: of the row, or of the segment's first, if it runs several times
  const ScheduleRow* row = nullptr;    // of the program's schedule; nullptr: any of the segment's
  std::vector<std::string> path = {};  // what is known beside operands and results
};
// The first instruction that has a buffer, or the first for which `is_it` holds; none: of the program alone.
FaultSite site_of(const Program& program, BufferId buffer);
FaultSite site_of(const Program& program, const std::function<bool(const Instruction&)>& is_it);

// `where`: how the message begins. The site's ids may be of a plan that is not verified.
[[noreturn]] void fail_at(const Plan& plan, const Entry& entry, const FaultSite& site, const std::string& where,
                          const std::string& found);
// Of no entry.
[[noreturn]] void fail_at(const Plan& plan, int32_t device, const std::string& found);

}  // namespace whale
