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
  // A device, and what is known of where in its program.
  [[noreturn]] void fail(int32_t device, FaultSite site, const std::string& what) const {
    site.device = device;
    if (device >= 0 && device < std::ssize(entry.rows)) site.program = &program(device);
    fail_at(plan, entry, site, "", what);
  }
  const Program& program(int32_t device) const { return entry.programs[entry.rows[device].program]; }
};

using PartNumbers = std::vector<std::vector<int32_t>>;                // [group][device]; -1: no member
using Channels = std::vector<std::set<std::pair<int32_t, int32_t>>>;  // [link]: (from, to)
// Who works with whom. Without checks: of a plan that is verified, or about to be.
struct EntryPeers {
  PartNumbers parts;
  Channels channels;
};
EntryPeers peers_of(const Entries& e);

// The peers of a device at one end of a link, in the order in which it serves them.
struct LinkEnd {
  size_t link = 0;
  bool sends = false;
  std::vector<int32_t> peers;
};
std::vector<std::vector<LinkEnd>> ends_of_links(const Entries& e, const Channels& channels);  // [device]

// Devices that do the same among peers that do the same, as numbers counted from 0 in the order of the devices: the
// coarsest classes in which all are of one kind and have, group by group and link by link, members and peers of the
// same classes (colour refinement). What one of a class does, all of it can do at once. `kinds`, of each device: equal
// numbers for those that are taken for the same.
std::vector<int32_t> classes_alike(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& kinds);

// Nobody waits for ever: one device of each class walks through what it says to the others.
void verify_order(const Entries& e, const EntryPeers& peers);

}  // namespace whale
