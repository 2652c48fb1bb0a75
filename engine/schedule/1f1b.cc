// 1F1B, backward first: device d lets as many micro-batches in as there are devices behind it, then runs one forward
// and one backward in turn, so that at most p - d micro-batches are alive on it; or as many as its warm-up lets in.
#include "schedule/work_order.h"

namespace whale {

WorkOrders one_f_one_b_orders(const PipelineShape& shape) {
  WorkOrders orders;
  for (int d = 0; d < shape.stages; ++d) {
    WorkOrder order(shape);
    const int ahead = passes_ahead(shape, d);
    for (int u = 0; u < ahead; ++u) order.forward();
    for (int u = 0; u < shape.micro_batches; ++u) {
      order.forward();
      order.backward();
    }
    orders.push_back(order.take());
  }
  return orders;
}

}  // namespace whale
