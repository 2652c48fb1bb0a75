// How long the instructions of a plan take under a training framework on GPUs: what its kernels achieve by their sizes,
// how fast its host issues them, what its collectives cost. The constants of a stack are few, have a physical meaning
// and are fitted to measured steps (docs/validation-steps.md).
#pragma once

#include <cstddef>

#include "simulate/simulate.h"

namespace whale {

// Of large products and passes over memory, then what small ones lose.
struct Stack {
  double product_flops = 250e12;       // FLOP/s of large products of 16 bits
  double product_edge = 200;           // a product of m x k by k x n takes 1 + edge (1/m + 1/n + 1/k) as long
  double unaligned = 3;                // so many times as long where a side of it is no multiple of 8
  double memory_bytes = 1300e9;        // bytes/s of what is no product
  double issue_seconds = 30e-6;        // of the host for an instruction; it runs ahead of its device
  double meeting_seconds = 50e-6;      // of the host, for a collective, for each further member: the latest one counts
  double inside_latency = 100e-6;      // of a collective inside a node
  double inside_bytes = 230e9;         // bytes/s of each device of a ring inside a node
  double network_bytes = 100e9;        // bytes/s of a node's network, which its devices share
  double message_seconds = 200e-6;     // of a message between stages, beside its bytes: both ends wait for it
  friend bool operator==(const Stack&, const Stack&) = default;
};

// visit(name, figure), of all of them.
template <class S, class Visit>
void each_figure_of_stack(S&& s, Visit&& visit) {
  visit("product_flops", s.product_flops);
  visit("product_edge", s.product_edge);
  visit("unaligned", s.unaligned);
  visit("memory_bytes", s.memory_bytes);
  visit("issue_seconds", s.issue_seconds);
  visit("meeting_seconds", s.meeting_seconds);
  visit("inside_latency", s.inside_latency);
  visit("inside_bytes", s.inside_bytes);
  visit("network_bytes", s.network_bytes);
  visit("message_seconds", s.message_seconds);
}
inline constexpr size_t kFiguresOfStack = 10;

// Of the devices of a plan whose links are those of the stack (with_links). A row of a schedule takes what its devices
// compute or what their host issues, whichever is longer.
Duration seconds_by(const Stack& stack, const Plan& plan, const Entry& entry);

}  // namespace whale
