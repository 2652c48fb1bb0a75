// ZB-V: device d holds virtual stages d and 2p - 1 - d, so that a micro-batch that reaches the end of the V finds the
// first backward on the device of the last forward. Every device holds 2p virtual stages' activations at most, 1F1B's p
// M_B.
#include <algorithm>

#include "schedule/work_order.h"

namespace whale {

namespace {

// The order for m >= 2p - 1. 0 is the virtual stage going down the V, 1 the one coming back.
std::vector<WorkItem> full_order(const PipelineShape& shape, int d) {
  const int p = shape.stages, m = shape.micro_batches;
  WorkOrder order(shape);
  const auto whole_backward = [&](int virtual_stage) {
    order.backward(virtual_stage);
    order.weight(virtual_stage);
  };
  // Fill: go down until the first micro-batch has come back up to this device.
  for (int n = 0; n < 2 * (p - d) - 1; ++n) order.forward(0);
  for (int n = 0; n < d; ++n) {
    order.forward(1);
    order.forward(0);
  }
  for (int n = 0; n < p - d; ++n) {
    order.forward(1);
    whole_backward(1);
  }
  // Steady: one micro-batch in, one out, through both virtual stages.
  while (order.forwards(1) < m) {
    order.forward(0);
    whole_backward(0);
    order.forward(1);
    whole_backward(1);
  }
  // Drain: input gradients first, the weight gradients put off fill the wait at the end.
  for (int n = 0; n < d; ++n) {
    order.backward(0);
    order.backward(1);
  }
  for (int n = 0; n < p - d; ++n) whole_backward(0);
  for (int n = 0; n < m; ++n) order.weight(1);
  for (int n = 0; n < m; ++n) order.weight(0);
  return order.take();
}

}  // namespace

// Fewer micro-batches run the order of 2p - 1 with the missing ones left out.
WorkOrders zb_v_orders(const PipelineShape& shape) {
  PipelineShape full = shape;
  full.micro_batches = std::max(shape.micro_batches, 2 * shape.stages - 1);
  WorkOrders orders;
  for (int d = 0; d < shape.stages; ++d) {
    std::vector<WorkItem> order = full_order(full, d);
    std::erase_if(order, [&](const WorkItem& item) { return item.micro_batch >= shape.micro_batches; });
    orders.push_back(std::move(order));
  }
  return orders;
}

}  // namespace whale
