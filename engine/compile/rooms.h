// What devices hold of plans that do not fit, and the room by which stages are cut and shares are dealt again.
#pragma once

#include <vector>

#include "compile/compile.h"
#include "plan/figures.h"
#include "report/estimate.h"
#include "task/task_graph.h"

namespace whale {

class Rooms {
 public:
  explicit Rooms(const std::vector<DeviceSpec>& devices);
  // `held`: by each device, of a plan with these cuts and shares. False: no others are to be tried, because these came
  // before, nothing can be moved, or all devices together have too little.
  bool see(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held);
  // Of what was seen last, and of stages of all that was seen: each cut is then out of the question for good.
  void put_into(CompileOptions& options) const;

 private:
  struct Seen {
    Ints begins;
    std::vector<Mesh> meshes;
  };
  // A line through a point and the one before; through the point and the origin where there is none.
  struct Point {
    double part = -1, bytes = 0;
  };
  void see_shares(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held);
  StageRooms rooms_of_stages(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held) const;

  const std::vector<DeviceSpec>& devices_;
  std::vector<Seen> seen_;
  bool last_alone_ = false;  // all that was seen left no cuts that are new
  std::vector<Room> rooms_;
  std::vector<Point> parameters_, values_;  // by device
  StageRooms all_, last_;
};

std::vector<MemoryClasses> held_by_devices(const Estimate& estimate, size_t devices);
std::vector<MemoryClasses> held_by_devices(const Plan& plan, const Entry& entry);

}  // namespace whale
