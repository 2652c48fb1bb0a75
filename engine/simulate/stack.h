// How long the instructions of a plan take under a training framework on GPUs: what its kernels achieve by their sizes,
// how fast its host issues them, what its collectives cost. The constants of a stack are few, have a physical meaning
// and are fitted to measured steps (docs/validation-steps.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulate/simulate.h"

namespace whale {

struct Stack {
  double product_flops = 270e12;      // FLOP/s of large products of 16 bits
  double product_edge = 200;          // a product of m x k by k x n takes 1 + edge (1/m + 1/n + 1/k) times as long
  double odd_factor = 3;              // and so many times where a side of it is no multiple of 8
  double memory_bytes = 1300e9;       // bytes/s of what is no product
  double issue_seconds = 50e-6;       // of the host for an instruction; it runs ahead of its device
  double meeting_seconds = 50e-6;     // of the host for a collective, for each further member: the latest one counts
  double collective_seconds = 50e-6;  // of a collective, beside its bytes
  double inside_bytes = 230e9;        // bytes/s of each device of a ring inside a node
  double network_bytes = 100e9;       // bytes/s of a node's network, which its devices share
  double message_seconds = 200e-6;    // of a message between stages, beside its bytes: both ends wait for it
  friend bool operator==(const Stack&, const Stack&) = default;
};

// visit(name, figure), of all of them.
template <class S, class Visit>
void each_figure_of_stack(S&& s, Visit&& visit) {
  visit("product_flops", s.product_flops);
  visit("product_edge", s.product_edge);
  visit("odd_factor", s.odd_factor);
  visit("memory_bytes", s.memory_bytes);
  visit("issue_seconds", s.issue_seconds);
  visit("meeting_seconds", s.meeting_seconds);
  visit("collective_seconds", s.collective_seconds);
  visit("inside_bytes", s.inside_bytes);
  visit("network_bytes", s.network_bytes);
  visit("message_seconds", s.message_seconds);
}
inline constexpr size_t kFiguresOfStack = 10;

// What there is to do, whatever the stack. Sums of instructions.
struct StackWork {
  double flops = 0, edges = 0;          // of products; edges: flops (1/m + 1/n + 1/k)
  double odd_flops = 0, odd_edges = 0;  // of those with a side that is no multiple of 8
  double bytes = 0;                     // of other kernels
  double collectives = 0;
  double inside_bytes = 0, network_bytes = 0;  // that a device passes on; of the network, times those who share it
  double messages = 0;
  double issued = 0, meetings = 0;  // instructions, and further members of collectives

  double device_seconds(const Stack& stack) const;
  double host_seconds(const Stack& stack) const;
  StackWork& operator+=(const StackWork& other);
};
template <class W, class Visit>
void each_work_of_stack(W&& w, Visit&& visit) {
  visit("flops", w.flops);
  visit("edges", w.edges);
  visit("odd_flops", w.odd_flops);
  visit("odd_edges", w.odd_edges);
  visit("bytes", w.bytes);
  visit("collectives", w.collectives);
  visit("inside_bytes", w.inside_bytes);
  visit("network_bytes", w.network_bytes);
  visit("messages", w.messages);
  visit("issued", w.issued);
  visit("meetings", w.meetings);
}

// Of an instruction of this device; what is between nodes is priced by the node numbers of the plan's devices.
using WorkOf = std::function<StackWork(const Instruction& instruction, int32_t device)>;
WorkOf work_of(const Plan& plan, const Entry& entry);

// Runs of a segment's instructions, [begin, end), that the host issues while the device is at them: of a block of the
// model, as its outermost name scopes say, and between blocks. What is done once a step is issued for many tensors at
// once, and takes the host nothing.
enum class StepPart : uint8_t { kPrologue, kForward, kBackward, kEpilogue };
struct StackRun {
  StepPart part{};
  size_t begin = 0, end = 0;
  bool issued() const { return part == StepPart::kForward || part == StepPart::kBackward; }
};
std::vector<StackRun> runs_of(const Plan& plan, const Segment& segment);

// A run takes what its device computes or what its host issues, whichever is longer.
// `stacks`: of each device of the plan, or one for all.
Duration seconds_by(const std::vector<Stack>& stacks, const Plan& plan, const Entry& entry);

}  // namespace whale
