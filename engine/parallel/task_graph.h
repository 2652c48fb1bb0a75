// From the scope tree to TaskGraphs: each leaf of the tree with its ops, and the mesh of devices that runs it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.h"

namespace whale {

// One axis of a mesh, made by one scope.
struct Axis {
  std::string name;  // "replica"
  int64_t size = 1;
  std::vector<double> shares;  // by hand; empty: equal
  friend bool operator==(const Axis&, const Axis&) = default;
};

// Devices of the slot in row-major order of their coordinates, the outer axis first.
struct Mesh {
  std::vector<Axis> axes;
  int64_t size() const;
  std::vector<int64_t> coordinates(int64_t device) const;
  std::vector<double> device_shares() const;  // the product of the shares along the axes
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

struct TaskGraph {
  std::vector<Scope> nest;  // scopes with a placement, outer first; counts filled in
  std::string path;         // for messages: "replica/block.1"; "default strategy"
  std::vector<OpId> ops;
  Mesh mesh;
};

// Fills in counts that were left out and checks them against the devices of the slot. Throws naming the scope, the
// devices wanted and the devices there.
Mesh resolve_mesh(std::vector<Scope>& nest, int64_t devices, std::string_view path);

// `strategy`: for the ops without a scope of their own; empty: the graph's, or else replica. A bare `replica` takes
// count and shares from the strategy, or else from the first scope that gives them, so that one model has one mesh.
std::vector<TaskGraph> form_task_graphs(const Graph& graph, int64_t devices, std::string_view strategy);

}  // namespace whale
