// What the schedules are written with: one device's order, where each chunk takes its micro-batches in turn.
#pragma once

#include <utility>
#include <vector>

#include "base/watch.h"
#include "schedule/schedule.h"

namespace whale {

class DeviceOrder {
 public:
  explicit DeviceOrder(const PipelineShape& shape) : limit_(shape.micro_batches), done_(shape.chunks) {}

  // The next micro-batch of this chunk; nothing once there is none left.
  void forward(int chunk = 0) { add(WorkKind::kForward, chunk); }
  void backward(int chunk = 0) { add(WorkKind::kBackward, chunk); }
  void weight(int chunk = 0) { add(WorkKind::kWeight, chunk); }

  int forwards(int chunk = 0) const { return done_[chunk].count[0]; }
  int backwards(int chunk = 0) const { return done_[chunk].count[1]; }
  int weights(int chunk = 0) const { return done_[chunk].count[2]; }

  std::vector<WorkItem> take() { return std::move(items_); }

 private:
  struct Done {
    int count[3] = {0, 0, 0};  // by WorkKind
  };
  void add(WorkKind kind, int chunk) {
    int& next = done_[chunk].count[static_cast<int>(kind)];
    glance_();
    if (next < limit_) items_.push_back({kind, chunk, next++});
  }

  int limit_;
  std::vector<Done> done_;
  std::vector<WorkItem> items_;
  Glance glance_;
};

}  // namespace whale
