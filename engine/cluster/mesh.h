// Meshes: the devices that one TaskGraph runs on (the Whale paper's VirtualDevice), with an axis for every scope that
// cut them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace whale {

struct MeshAxis {
  std::string name;  // "replica", "split"; "replica|split" where scopes that share the devices use it differently
  int64_t size = 1;
  // Of work; empty: equal. More than `size` of them: a row of `size` shares for each position along the axes outside of
  // this one, row-major (ragged: every group cuts in its own way).
  std::vector<double> shares;
  std::vector<double> state_shares;  // of state that ZeRO cuts; empty: equal
  bool ragged() const { return static_cast<int64_t>(shares.size()) > size; }
  friend bool operator==(const MeshAxis&, const MeshAxis&) = default;
};

// The devices of one stage (all of them without a pipeline). The meshes of a plan have the same axes, of sizes of their
// own.
struct Mesh {
  std::vector<MeshAxis> axes;
  std::vector<int32_t> devices;  // row-major over the axes, the outermost first
  std::vector<int64_t> coordinates(int64_t position) const {
    std::vector<int64_t> out(axes.size());
    for (size_t a = axes.size(); a-- > 0; position /= axes[a].size) out[a] = position % axes[a].size;
    return out;
  }
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

}  // namespace whale
