// Interleaved 1F1B: the micro-batches come in rounds of about p; within a round every virtual stage runs all of the
// round's micro-batches before the next virtual stage does, forwards from the first virtual stage on, backwards from
// the last. Where p does not divide m the rounds are made as even as they go instead of a short last one, which would
// deadlock.
#include <algorithm>

#include "schedule/work_order.h"

namespace whale {

namespace {

// The larger rounds first: the warm-up is made for them.
std::vector<int> round_sizes(int stages, int micro_batches) {
  const int rounds = std::max(1, micro_batches / stages);
  std::vector<int> sizes(rounds, micro_batches / rounds);
  for (int r = 0; r < micro_batches % rounds; ++r) ++sizes[r];
  return sizes;
}

}  // namespace

WorkOrders interleaved_orders(const PipelineShape& shape) {
  const int p = shape.stages, v = shape.virtual_stages, total = shape.micro_batches * v;
  const std::vector<int> rounds = round_sizes(p, shape.micro_batches);
  std::vector<int> virtual_stage_of;  // [n]: the virtual stage of the n-th forward; the n-th backward runs virtual
                                      // stage v - 1 - virtual_stage_of[n]
  for (const int size : rounds)
    for (int c = 0; c < v; ++c) virtual_stage_of.insert(virtual_stage_of.end(), size, c);

  WorkOrders orders;
  for (int d = 0; d < p; ++d) {
    WorkOrder order(shape);
    const int ahead = std::min(total, 2 * (p - 1 - d) + (v - 1) * rounds[0]);
    for (int n = 0; n < ahead; ++n) order.forward(virtual_stage_of[n]);
    for (int n = 0; n < total; ++n) {
      if (ahead + n < total) order.forward(virtual_stage_of[ahead + n]);
      order.backward(v - 1 - virtual_stage_of[n]);
    }
    orders.push_back(order.take());
  }
  return orders;
}

}  // namespace whale
