// The parts of verify(plan), one a question. Internal to this module.
#pragma once

#include <string>
#include <vector>

#include "plan/fault.h"
#include "plan/lives.h"
#include "plan/plan.h"

namespace whale {

struct VerifyContext {
  const Plan& plan;
  const Entry& entry;
  size_t program_number;
  const Program& program;

  // Of a site of this program; the message begins with the devices that run it.
  [[noreturn]] void fail(FaultSite site, const std::string& what) const;
  [[noreturn]] void fail(const std::string& what) const { fail(FaultSite{}, what); }
  [[noreturn]] void fail(const Segment& s, size_t k, const std::string& what) const {
    fail(FaultSite{.segment = &s, .instruction = k}, what);
  }
  // Of a buffer, at the first instruction that has it.
  [[noreturn]] void fail_buffer(BufferId buffer, const std::string& what) const {
    fail(site_of(program, buffer), what);
  }
  // Of a row of the schedule.
  [[noreturn]] void fail_row(const ScheduleRow& row, const std::string& what) const;
};

// Reads wait for what they read; no two values share bytes while both are needed, in any row of the schedule.
void verify_memory(const VerifyContext& c);
// An order of programs in which those are equal that are alike in all that verify_memory looks at.
bool before_in_memory(const Program* a, const Program* b);

// Messages and collectives: those who take part agree, boxes lie inside their tensors, and nobody waits for ever, given
// the capacities of the channels.
void verify_communication(const Plan& plan, const Entry& entry);

// Operands and results of collectives are what the cuts of their group say.
void verify_collectives(const Plan& plan, const Entry& entry);

// Variables are written behind the commit, and the loss is final before its vote, which is made before the commit.
// `step`: some device writes some.
void verify_commit(const VerifyContext& c, bool step);

// Groups are the lines of the meshes, in the order of the coordinates.
void verify_groups(const Plan& plan);

// Every sample is some device's in every micro-batch, by the shares of the meshes; every micro-batch is worked on once.
void verify_work(const Plan& plan, const Entry& entry);

}  // namespace whale
