// What the schedules are written with: one device's order, where each virtual stage takes its micro-batches in turn.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "base/watch.h"
#include "schedule/schedule.h"

namespace whale {

// Forward passes before the first pair of one forward and one backward pass, of 1F1B and what follows it.
inline int passes_ahead(const PipelineShape& shape, int stage) {
  const int depth = shape.warmup.empty() ? shape.stages - stage : shape.warmup[stage];
  return std::min(shape.micro_batches, depth) - 1;
}

class WorkOrder {
 public:
  explicit WorkOrder(const PipelineShape& shape) : limit_(shape.micro_batches), done_(shape.virtual_stages) {}

  // The next micro-batch of this virtual stage; nothing once there is none left.
  void forward(int virtual_stage = 0) { add(WorkKind::kForward, virtual_stage); }
  void backward(int virtual_stage = 0) { add(WorkKind::kBackward, virtual_stage); }
  void weight(int virtual_stage = 0) { add(WorkKind::kWeight, virtual_stage); }

  int forwards(int virtual_stage = 0) const { return done_[virtual_stage].count[0]; }
  int backwards(int virtual_stage = 0) const { return done_[virtual_stage].count[1]; }
  int weights(int virtual_stage = 0) const { return done_[virtual_stage].count[2]; }

  std::vector<WorkItem> take() { return std::move(items_); }

 private:
  struct Done {
    int count[3] = {0, 0, 0};  // by WorkKind
  };
  void add(WorkKind kind, int virtual_stage) {
    int& next = done_[virtual_stage].count[static_cast<int>(kind)];
    glance_();
    if (next < limit_) items_.push_back({kind, virtual_stage, next++});
  }

  int limit_;
  std::vector<Done> done_;
  std::vector<WorkItem> items_;
  Glance glance_;
};

}  // namespace whale
