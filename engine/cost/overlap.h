// Computation and communication together (CoCoNeT; Jangda et al., 2022): what the joint forms cost, as pure functions.
#pragma once

#include "cost/cost.h"

namespace whale {

// An update of replicated parameters behind the sum of their gradients, per device.
struct UpdateWork {
  OpCost update;  // of the whole
  double gradient_bytes = 0;
  double result_bytes = 0;  // what is to be whole on every device after it: parameters, state that is not cut
  double slice_bytes = 0;   // operands of which the own slice has to be copied out first, of the whole
  int64_t devices = 1;
};
// all_reduce, then everybody updates everything.
double whole_update_seconds(const UpdateWork& work, const DeviceRates& rates, const LinkRates& link);
// reduce_scatter, an update of the own slice, all_gather. Bandwidth alone: buckets share the latencies.
double sliced_update_seconds(const UpdateWork& work, const DeviceRates& rates, const LinkRates& link);

// A product whose result (or operand) goes through a collective.
struct ProductWork {
  OpCost product;
  double seconds_of_collective = 0;  // of all of it, without latencies
  double latency_seconds = 0;        // of one collective
  int64_t rows = 1;
};
struct Chunks {
  int64_t count = 1;
  double seconds = 0;        // of `count` chunks
  double whole_seconds = 0;  // one behind the other
};
// `beside`: communication has engines of its own; else it takes the time of the computation beside it, and chunks only
// add starts. A chunk has `least_rows` or more.
Chunks choose_chunks(const ProductWork& work, const DeviceRates& rates, bool beside, int64_t least_rows = 1);

}  // namespace whale
