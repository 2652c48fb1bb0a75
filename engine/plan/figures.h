// Figures that the summary and the picture of a Plan share.
#pragma once

#include "plan/plan.h"

namespace whale {

// Bytes by what they hold. An arena is as large as it must be at its fullest; that is what is split up here.
struct MemoryClasses {
  int64_t parameters = 0, state = 0, buffers = 0;  // variables
  int64_t gradients = 0;                           // and their sums
  int64_t copies = 0;                              // of variables that live in the host's memory
  int64_t activations = 0;                         // the rest of the arena: inputs and intermediate values too
  int64_t arena() const { return gradients + copies + activations; }
  int64_t total() const { return parameters + state + buffers + arena(); }
  int64_t& of(Role role) { return role == Role::kParameter ? parameters : role == Role::kState ? state : buffers; }
};
struct MemoryFigures {
  MemoryClasses device, host;
  MemoryClasses& in(Memory memory) { return memory == Memory::kHost ? host : device; }
};
// What lives from step to step in the device's own memory.
MemoryClasses variables_of_device(const Plan& plan, int32_t device);
// Of the first device that runs this program.
MemoryFigures memory_of(const Plan& plan, const Entry& entry, size_t program);
// What each storage of an arena holds, told by who reads and writes it.
enum class Holds : uint8_t { kActivation, kGradient, kCopy };
std::vector<Holds> contents_of(const Program& program, const std::vector<Group>& groups);
// What this device holds of a variable; a tensor of no elements where it holds nothing.
Dims local_dims(const Plan& plan, const PlanVariable& variable, int32_t device);

// Of one step of this device: its part of the micro-batches that it runs.
int64_t samples_of(const Entry& entry, const DeviceRow& row);

struct StepFigures {
  int64_t kernels = 0, feeds = 0, fetches = 0, collectives = 0, on_the_side = 0;  // of one step, rows repeated
  int64_t messages = 0;                                                           // sent to other stages or shardings
  double flops = 0, bytes = 0, communicated = 0;
};
StepFigures step_of(const Program& program);

// "replica 2, split 4 shares (3,1,1,1)"
std::string devices_text(const std::vector<int32_t>& devices, size_t most);  // "0-7,64-71"; at most so many runs
std::string axes_text(const std::vector<MeshAxis>& axes);

// Integers of this input must lie in [0, limit), for every op that takes them as an index (PlanInput::indices); 0: none
// does.
int64_t value_limit(const PlanInput& input);
// The integer outside of them that every such op takes too, and leaves out (labels of a loss).
std::optional<int64_t> value_ignored(const PlanInput& input);

std::string bytes_text(double bytes);  // "1.5 MB"
std::string count_text(double count);  // "3.2 G"
std::string seconds_text(double s);    // "1.20 ms"
const char* name_of(Phase phase);      // "forward", ...

}  // namespace whale
