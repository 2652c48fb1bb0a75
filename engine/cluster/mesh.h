// Meshes: the devices that one TaskGraph runs on (the Whale paper's VirtualDevice), with an axis for every scope that
// cut them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/small_vector.h"

namespace whale {

struct MeshAxis {
  std::string name;  // "replica", "split"; "replica|split" where scopes that share the devices use it differently
  int64_t size = 1;
  // Of work; empty: equal. More than `size` of them: a row of `size` shares for each position along the axes outside of
  // this one, row-major (ragged: every group cuts in its own way). Rows may end with kNoDevice (ir/graph.h):
  // smaller groups.
  std::vector<double> shares;
  std::vector<double> state_shares;  // of state that ZeRO cuts; empty: equal
  // Of unlike replicas: the axis has one place in each mesh, and a mesh has part `only` of what is cut along it, by the
  // shares of all; the other parts are in other meshes. -1: any other axis.
  int64_t only = -1;
  bool ragged() const { return only < 0 && static_cast<int64_t>(shares.size()) > size; }
  bool exists(int64_t at, int64_t row) const { return !ragged() || shares[row * size + at] >= 0; }
  int64_t members(int64_t row) const {
    int64_t n = size;
    while (n > 1 && !exists(n - 1, row)) --n;
    return n;
  }
  bool has_gaps() const {
    return ragged() && std::any_of(shares.begin(), shares.end(), [](double s) { return s < 0; });
  }
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

// Which row of shares of axes[a] is that of these coordinates.
inline int64_t row_of(const std::vector<MeshAxis>& axes, size_t a, const Ints& coordinates) {
  int64_t row = 0;
  for (size_t b = 0; b < a; ++b) row = row * axes[b].size + coordinates[b];
  return row;
}

// The devices of one stage (all of them without a pipeline). The meshes of a plan have the same axes, of sizes of their
// own.
struct Mesh {
  std::vector<MeshAxis> axes;
  std::vector<int32_t> devices;  // row-major over the axes, the outermost first; -1: nobody is there
  Ints coordinates(int64_t position) const {
    Ints out(axes.size());
    for (size_t a = axes.size(); a-- > 0; position /= axes[a].size) out[a] = position % axes[a].size;
    return out;
  }
  bool has_position(int64_t position) const {
    const Ints at = coordinates(position);
    for (size_t a = 0; a < axes.size(); ++a)
      if (!axes[a].exists(at[a], row_of(axes, a, at))) return false;
    return true;
  }
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

// The devices that lie along the axis, a line of them for each position along all others that has any; row-major.
std::vector<std::vector<int32_t>> lines_along(const Mesh& mesh, size_t axis);

}  // namespace whale
