// An entry of a plan bound to a machine: every instruction of every segment with its kernel, collective or copy, so
// that a step only walks lists.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "data/feed.h"
#include "data/input_slices.h"
#include "device/device.h"
#include "plan/plan.h"
#include "run/handed_over.h"
#include "run/machine.h"

namespace whale {

struct BoundInstruction {
  const Instruction* source = nullptr;
  int32_t index = 0;                       // in the segment
  std::unique_ptr<Kernel> kernel;          // kKernel
  std::unique_ptr<Collective> collective;  // kCollective, kSend, kReceive
  char* data = nullptr;                    // kFeed, kFetch, kVote: the device's tensor, dense; op overflow: its result
  struct Copy {                            // kCopy
    void* to = nullptr;
    const void* from = nullptr;
    size_t bytes = 0;
  };
  std::vector<Copy> copies;
  std::vector<std::vector<HandedRun>>
      runs;                        // kFetch: by micro-batch, or one for all; none: another device hands it over
  std::vector<SampleRuns> pieces;  // kFeed: of the host's, likewise
  std::vector<std::vector<FedRun>> slices;  // kFeed: where the host has this rank's slices alone, likewise
  std::vector<Wait> waits;                  // of its row
  std::vector<uint64_t*> versions;          // of the variables it writes
  // An op whose index the graph computes: what is checked before it runs, by way of `host`.
  struct IndexCheck {
    Operand operand;
    IndexRange range;
    std::vector<char> host;
  };
  std::unique_ptr<IndexCheck> index_check;
};

// A segment on one version of its buffers.
struct BoundSegment {
  int32_t segment = 0;
  uint32_t count = 0;  // instructions of all queues
  std::array<std::vector<BoundInstruction>, kQueues> queues;
};

// One device's part.
struct BoundProgram {
  const Program* program = nullptr;
  std::optional<Program> placed;  // the row's, when its program has holes
  const DeviceRow* row = nullptr;
  std::vector<BoundSegment> segments;
  std::vector<int32_t> rows;                              // of the schedule: which of `segments`
  std::array<bool, kQueues> queues{};                     // in use; the compute queue always
  std::array<std::vector<RowContext>, kQueues> contexts;  // by sample cut; the kernels of a queue read theirs
  std::array<size_t, kQueues> runs{};                     // instructions a step, for the timeline
  const char* loss = nullptr;                             // the device's value; null: no loss is fetched
  DType loss_dtype{};
  uint32_t votes = 0;         // of a step, on the loss
  uint32_t index_checks = 0;  // of a step
  bool indices_checked_before_commit = true;
  size_t gradient_bytes = 0;  // operands of collectives and updates, for the report
  size_t input_bytes = 0;
};

// Binds the program of `row` on its device's compute thread. `entry` and `links`, of the entry, must outlive the result
// and not move.
std::unique_ptr<BoundProgram> bind_program(Machine& machine, const Entry& entry, Links& links, const DeviceRow& row);

// The buffer whose storage this one shares.
BufferId root_of(const Program& program, BufferId id);

}  // namespace whale
