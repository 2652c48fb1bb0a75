// Cuts a graph of ops into connected stages for devices that are alike, and for one or more slower hosts: the least
// seconds a sample of the slowest stage, its communication included. Exact.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace whale {

struct PartitionNode {
  double device_ms = 0, host_ms = 0, bytes = 0;
  double send_ms = 0;     // its output to another device
  bool on_device = true;  // whether devices have it
  bool backward = false;
  int64_t color = -1;  // nodes of one color are on one device; -1: it has its own
};

// A device's time is that of its nodes and, once each, of the outputs that leave it and of those that it reads from
// elsewhere; a host's is that of its nodes. Forward nodes of a device are contiguous: no path between two of them
// leaves it. Backward nodes follow their colors.
struct PartitionProblem {
  std::vector<PartitionNode> nodes;
  std::vector<std::pair<int, int>> edges;
  int devices = 1, hosts = 0;
  double device_bytes = 0;
};

struct PartitionPart {
  bool host = false;
  double ms = 0, bytes = 0;
  std::vector<int> nodes;
};

struct FoundPartition {
  double ms = 0;        // of the slowest part
  double least_ms = 0;  // no partition is faster; equal to ms where `proven`
  bool proven = false;
  std::vector<PartitionPart> parts;  // in the order of the forward pass
  int64_t groups = 0;                // nodes that are placed together are one
  int64_t ideals = 0;                // sets of groups that contain all that they read: where a cut may be
  int64_t pairs = 0;                 // parts that were priced
  double seconds = 0;
};

struct PartitionSearch {
  double within_seconds = 0;      // 0: until proven
  int64_t most_ideals = 2000000;  // a graph with more of them is cut along one order only
};

// Throws invalid for graphs with cycles, edges to nowhere, figures that are none, or nodes that fit no device.
FoundPartition partition(const PartitionProblem& problem, const PartitionSearch& search = {});

// Milliseconds of a part, as above.
double part_ms(const PartitionProblem& problem, const std::vector<int>& nodes, bool host);

}  // namespace whale
