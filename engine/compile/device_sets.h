// Which devices of a cluster a search uses: all of them, or some that may do better without the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compile/compile.h"
#include "cost/cost.h"

namespace whale {

struct DeviceSet {
  std::string name;  // empty: all, as they are listed
  std::vector<int32_t> devices;
  bool ordered = false;  // of worth only where stages go along the devices
  // Of these devices.
  std::vector<DeviceSpec> specs = {};
  std::optional<CostModel> cost = {};
  std::string types = {};  // of which they are, once each
  bool unlike = false;     // are_unlike(specs)
  int64_t memory = 0;      // of the largest
  int64_t node = 1;        // that divides the devices of every node
  double flops = 0;        // a second, of all
  double price_hour = 0;   // of all
};

// All of them. Of each type all, its first nodes, halved again and again, and the first devices of its first node: what
// a slow network costs may be more than what is behind it brings. All but one type; those of each zone alone; all
// without the slowest few, where fewer can be cut in more ways; where devices are unlike, all with the nodes of much
// memory first (Jia et al., 2022, section 3.3.2), or last. Mixes of some of each type. Of several ranks: all alone, as
// they are listed.
std::vector<DeviceSet> device_sets(const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                                   Precision precision);

// Divisors from 1 on.
Ints divisors(int64_t n);

}  // namespace whale
