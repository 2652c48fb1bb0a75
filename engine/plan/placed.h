// Programs and the places of their devices: holes and the values that rows fill them with.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace whale {

// Attributes that say where an interval begins or ends; nothing that a program is checked by alone.
bool may_be_placed(std::string_view attribute);

int64_t value_of(const Program& program, const Hole& hole);
void set_value(Program& program, const Hole& hole, int64_t value);

// What the row's device runs: a program without holes. A copy, for those that need the values: execution binds it once.
Program bound(const Program& program, const DeviceRow& row);

// The rows that name each program.
std::vector<std::vector<const DeviceRow*>> rows_of_programs(const Entry& entry);

// A hole and what is wrong with it; "": nothing.
struct HoleFault {
  size_t hole = 0;
  std::string what;
};
// Of the holes of a program whose references are right.
HoleFault fault_of_holes(const Program& program);
// Of values of a program's holes, of which there are as many. Attributes are checked by
// the rules of their ops, when a plan is read.
HoleFault fault_of_values(const Program& program, const Ints& values);

// How parts of storages lie to each other: which ones overlap, are the same, or lie inside of another. All that the
// planner and the verifier know of a program's memory they know from this, offsets and the order of instructions.
class Overlaps {
 public:
  // As the program itself has it. `holes`: in any order; those that are kAt may move.
  Overlaps(const Program& program, const std::vector<Hole>& holes);
  // Is it so, too, with these values of the holes? The program must be the one that this was made from.
  bool hold(const Program& program, const Ints& values) const;

 private:
  struct Part {
    BufferId buffer = kNone;
    size_t hole = SIZE_MAX;  // none: it stays where it is
  };
  std::vector<Part> parts_;     // of storages of which one moves, storage by storage
  std::vector<size_t> begins_;  // of each storage in `parts_`, and the end
};

}  // namespace whale
