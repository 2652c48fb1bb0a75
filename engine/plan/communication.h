// What the checks of an entry's communication share. Internal to them.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/verify.h"

namespace whale {

struct Entries {
  const Plan& plan;
  const Entry& entry;
  [[noreturn]] void fail(const std::string& what) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}': {}", plan.model, entry.name, what);
  }
  const Program& program(int32_t device) const {
    return entry.programs[static_cast<size_t>(entry.rows[static_cast<size_t>(device)].program)];
  }
};

using PartNumbers = std::vector<std::vector<int32_t>>;                // [group][device]; -1: no member
using Channels = std::vector<std::set<std::pair<int32_t, int32_t>>>;  // [link]: (from, to)

// Devices that do the same among peers that do the same, as numbers counted from 0 in the order of the devices: the
// coarsest classes in which all run programs of one number and have, group by group and link by link, members and peers
// of the same classes (colour refinement). What one of a class does, all of it can do at once. `programs`: equal
// numbers for those that communicate in the same way.
std::vector<int32_t> classes_alike(const Entries& e, const PartNumbers& part_of, const Channels& channels,
                                   const std::vector<int32_t>& programs);

// Nobody waits for ever: one device of each class walks through what it says to the others.
void verify_order(const Entries& e, const PartNumbers& part_of, const Channels& channels);

}  // namespace whale
