#include "lower/tree.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"

#include "base/watch.h"

namespace whale {
namespace {

bool is_root(int64_t leaves, TreeNode node) { return node.index == 0 && (int64_t{1} << node.level) >= leaves; }

TreeNode sibling(TreeNode node) { return {node.level, node.index ^ 1}; }

// The highest node with the same leaves.
TreeNode highest(int64_t leaves, TreeNode node) {
  while (!is_root(leaves, node) && (sibling(node).index << node.level) >= leaves)
    node = {node.level + 1, node.index >> 1};
  return node;
}

// Takes `node`, held in `place`, up as far as its siblings are held; add(to, from).
template <class Add>
void climb(int64_t leaves, std::map<TreeNode, int32_t>& held, TreeNode& node, int32_t& place, Add&& add) {
  node = highest(leaves, node);
  while (!is_root(leaves, node)) {
    const auto other = held.find(sibling(node));
    if (other == held.end()) break;
    add(other->second, place);
    place = other->second;
    held.erase(other);
    node = highest(leaves, {node.level + 1, node.index >> 1});
  }
}

int64_t first_leaf(TreeNode node) { return node.index << node.level; }

}  // namespace

TreePlan plan_tree(int64_t leaves, const std::vector<int64_t>& order) {
  TreePlan plan;
  std::map<TreeNode, int32_t> held;
  std::set<int32_t> free;
  for (const int64_t leaf : watched(order)) {
    std::vector<TreeStep> steps;
    TreeNode node{0, leaf};
    int32_t place = -1;
    climb(leaves, held, node, place, [&](int32_t to, int32_t from) {
      steps.push_back({from, to, false});
      if (from >= 0) free.insert(from);
    });
    if (place < 0) {
      if (free.empty()) free.insert(plan.places++);
      place = *free.begin();
      free.erase(free.begin());
      steps.push_back({-1, place, true});
    }
    held[node] = place;
    plan.steps.push_back(std::move(steps));
  }
  std::vector<std::pair<TreeNode, int32_t>> left(held.begin(), held.end());
  std::sort(left.begin(), left.end(),
            [](const auto& a, const auto& b) { return first_leaf(a.first) < first_leaf(b.first); });
  for (const auto& [node, place] : left) plan.nodes.push_back(node), plan.place_of.push_back(place);
  return plan;
}

std::vector<TreeNode> tree_nodes(int64_t leaves, Interval run) {
  std::vector<int64_t> order(static_cast<size_t>(run.size()));
  std::iota(order.begin(), order.end(), run.begin);
  return plan_tree(leaves, order).nodes;
}

TreeMerge merge_tree(int64_t leaves, const std::vector<TreeNode>& rows) {
  TreeMerge merge;
  std::map<TreeNode, int32_t> held;
  for (const size_t r : watched(size_t{0}, rows.size())) {
    TreeNode node = rows[r];
    auto place = static_cast<int32_t>(r);
    climb(leaves, held, node, place, [&](int32_t to, int32_t from) { merge.additions.emplace_back(to, from); });
    held[node] = place;
  }
  WHALE_CHECK(held.size() == 1 && is_root(leaves, held.begin()->first), "the nodes hold all leaves");
  merge.root = held.begin()->second;
  return merge;
}

}  // namespace whale
