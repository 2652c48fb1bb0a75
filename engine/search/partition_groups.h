// Nodes of a partition problem that are placed together, and the order in which a pipeline meets them.
#pragma once

#include <cstdint>
#include <vector>

#include "search/partition.h"

namespace whale {

struct PartitionGroup {
  std::vector<int> nodes;
  double device_ms = 0, host_ms = 0, bytes = 0;
  bool on_device = true;
  std::vector<int> after, before;  // groups that read from this one in the forward pass, and those that it reads from
  // Nodes whose output costs something and is read in another group: of this one, and others that are read here, with
  // the number of edges.
  std::vector<int> senders;
  std::vector<std::pair<int, int>> reads;
};

struct PartitionGroups {
  std::vector<PartitionGroup> groups;  // in an order that the forward pass allows
  std::vector<int> group_of;           // by node
  std::vector<int> readers;            // by node: edges into other groups
  std::vector<double> send_ms;         // by node
};

PartitionGroups group_nodes(const PartitionProblem& problem);

}  // namespace whale
