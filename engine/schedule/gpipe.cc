// GPipe: every device runs all forwards, then all backwards.
#include "schedule/work_order.h"

namespace whale {

WorkOrders gpipe_orders(const PipelineShape& shape) {
  WorkOrders orders;
  for (int d = 0; d < shape.stages; ++d) {
    WorkOrder order(shape);
    for (int u = 0; u < shape.micro_batches; ++u) order.forward();
    for (int u = 0; u < shape.micro_batches; ++u) order.backward();
    orders.push_back(order.take());
  }
  return orders;
}

}  // namespace whale
