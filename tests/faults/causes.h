// What of a plan is before what, over all devices: a message that answers one from here comes after what was done here
// before, though no wait says so. Slow, and written without a look at the plan's own walk: it judges which missing
// waits can show.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace whale::test {

class Causes {
 public:
  explicit Causes(const Plan& plan, const Entry& entry);
  // Two instructions of a device that may run at once and share bytes; "": there are none. `entry`: that of the
  // constructor, with fewer waits.
  std::string race_in(const Entry& entry) const;

 private:
  friend class Order;
  struct Node {
    int32_t device = 0, row = 0;
    int32_t index = 0;  // in its segment
    const Instruction* does = nullptr;
    std::vector<size_t> meets;  // the other members of a collective: nobody writes before all are there
    std::vector<std::pair<size_t, bool>> takes;  // a receive: the sends, in that order; whether each ends with it
    std::vector<size_t> freed;                   // a send: receives that must have taken something before it ends
    bool clears = false;                         // a receive: writes before anything has come
  };
  struct Conflict {
    size_t before = 0, after = 0;
    bool writes = false;  // the later one does
  };
  void add_nodes();
  void match_collectives();
  void match_messages();
  void find_conflicts();
  const Program& program(int32_t device) const { return entry_.programs[entry_.rows[device].program]; }
  const std::string& segment_of(const Node& n) const {
    const Program& p = program(n.device);
    return p.segments[p.schedule[n.row].segment].name;
  }

  const Plan& plan_;
  Entry entry_;                             // with a program for each device
  std::vector<Node> nodes_;                 // by device, row, index
  std::vector<std::vector<size_t>> first_;  // [device][row], and one more: its first node
  std::vector<Conflict> conflicts_;
};

}  // namespace whale::test
