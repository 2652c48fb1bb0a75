// The parts of verify(plan), one a question. Internal to this room.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "plan/memory.h"
#include "plan/plan.h"

namespace whale {

struct VerifyContext {
  const Plan& plan;
  const Entry& entry;
  size_t program_number;
  const Program& program;
  [[noreturn]] void fail(const std::string& what) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}', program {}: {}", plan.model, entry.name, program_number, what);
  }
  [[noreturn]] void fail(const Segment& s, size_t k, const std::string& what) const {
    fail(fmt::format("segment '{}', instruction {} ('{}'): {}", s.name, k, s.instructions[k].name, what));
  }
};

inline bool in_arena(const Buffer& b) { return b.kind == BufferKind::kArena || b.kind == BufferKind::kInput; }
// From one slot of a buffer to the next.
inline int64_t slot_stride(const Buffer& b) { return (b.bytes + kAlignment - 1) / kAlignment * kAlignment; }
inline int64_t bytes_of_slots(const Buffer& b) { return (b.slots - 1) * slot_stride(b) + b.bytes; }

// Of the memory that the buffer is in.
inline int64_t arena_of(const Program& p, const Buffer& b) {
  return b.memory == Memory::kHost ? p.host_bytes : p.arena_bytes;
}

// clocks[k][t]: the last instruction of stream t that is done before instruction k begins; -1: none.
using StreamClock = std::array<int64_t, kStreams>;
std::vector<StreamClock> clocks_of(const Segment& s);

// Reads wait for what they read; no two values share bytes while both are needed, in any row of the schedule.
void verify_memory(const VerifyContext& c);

// Messages and collectives: those who take part agree, boxes lie inside their tensors, and nobody waits for ever, given
// the slots of the channels.
void verify_communication(const Plan& plan, const Entry& entry);

// Operands and results of collectives are what the cuts of their group say.
void verify_collectives(const Plan& plan, const Entry& entry);

// Groups are the lines of the meshes, in the order of the coordinates.
void verify_groups(const Plan& plan);

// Every sample is some device's in every micro-batch, by the shares of the meshes; every micro-batch is worked on once.
void verify_work(const Plan& plan, const Entry& entry);

}  // namespace whale
