// ZB-H1: 1F1B whose backward pass is split. Device d stays d weight gradients behind its input gradients, so that the
// input gradients reach the devices before it sooner, and fills its own bubble at the end with the weight gradients.
#include "schedule/work_order.h"

namespace whale {

WorkOrders zb_h1_orders(const PipelineShape& shape) {
  WorkOrders orders;
  for (int d = 0; d < shape.stages; ++d) {
    WorkOrder order(shape);
    const int ahead = passes_ahead(shape, d);
    for (int u = 0; u < ahead; ++u) order.forward();
    for (int u = 0; u < shape.micro_batches; ++u) {
      order.forward();
      order.backward();
      if (order.backwards() - order.weights() > d) order.weight();
    }
    while (order.weights() < shape.micro_batches) order.weight();
    orders.push_back(order.take());
  }
  return orders;
}

}  // namespace whale
