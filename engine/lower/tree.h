// A fixed binary tree over the micro-batches (semantics.md section 9): who adds what, when each device has some of the
// leaves. A node (level, index) is the sum of leaves [index << level, (index + 1) << level); one without a sibling is
// its parent.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/sharding.h"

namespace whale {

struct TreeNode {
  int level = 0;
  int64_t index = 0;
  friend auto operator<=>(const TreeNode&, const TreeNode&) = default;  // NOLINT(modernize-use-nullptr)
};

// `to` += `from`; from -1: the leaf that has just been made. `copies`: `to` = the leaf.
struct TreeStep {
  int32_t from = -1, to = 0;
  bool copies = false;
  friend auto operator<=>(const TreeStep&, const TreeStep&) = default;  // NOLINT(modernize-use-nullptr)
};

struct TreePlan {
  std::vector<std::vector<TreeStep>> steps;  // after each leaf of the order
  int32_t places = 0;                        // for sums, at most 2 log2 of all leaves
  std::vector<TreeNode> nodes;               // that are left, in order of their leaves
  std::vector<int32_t> place_of;             // per node
};

// `order`: the leaves of one device in the order in which they are made; `leaves`: of all devices.
TreePlan plan_tree(int64_t leaves, const std::vector<int64_t>& order);

// The nodes that a contiguous run of leaves comes to, whatever the order.
std::vector<TreeNode> tree_nodes(int64_t leaves, Interval run);

// Rows that hold these nodes, together all leaves: (to, from) additions in order; the sum of all is then in `root`.
struct TreeMerge {
  std::vector<std::pair<int32_t, int32_t>> additions;
  int32_t root = 0;
};
TreeMerge merge_tree(int64_t leaves, const std::vector<TreeNode>& rows);

}  // namespace whale
