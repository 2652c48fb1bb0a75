#include "search/partition_groups.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"

namespace whale {
namespace {

class Joined {
 public:
  explicit Joined(size_t n) : up_(n) { std::iota(up_.begin(), up_.end(), 0); }
  int of(int a) {
    while (up_[a] != a) a = up_[a] = up_[up_[a]];
    return a;
  }
  bool join(int a, int b) {
    a = of(a), b = of(b);
    up_[b] = a;
    return a != b;
  }

 private:
  std::vector<int> up_;
};

void verify(const PartitionProblem& problem) {
  const auto n = static_cast<int>(problem.nodes.size());
  if (n == 0) throw invalid("the graph has no nodes");
  if (problem.devices < 0 || problem.hosts < 0 || problem.devices + problem.hosts < 1)
    throw invalid("{} devices and {} hosts, expected at least one", problem.devices, problem.hosts);
  if (!std::isfinite(problem.device_bytes) || problem.device_bytes < 0)
    throw invalid("devices of {} bytes, expected a number from 0", problem.device_bytes);
  for (int i = 0; i < n; ++i) {
    const PartitionNode& node = problem.nodes[i];
    for (const double x : {node.device_ms, node.host_ms, node.bytes, node.send_ms})
      if (!std::isfinite(x) || x < 0) throw invalid("node {} has a figure of {}, expected numbers from 0", i, x);
  }
  for (const auto& [from, to] : problem.edges)
    if (from < 0 || to < 0 || from >= n || to >= n || from == to)
      throw invalid("an edge from node {} to node {}, there are {} nodes", from, to, n);
}

using Order = std::set<std::pair<int, int>>;

// Which group is before which: along edges of the forward pass. A group of backward nodes alone stands where it would
// as the mirror of a forward one.
Order order_of(const PartitionProblem& problem, Joined& joined) {
  std::set<int> forward;
  for (size_t i = 0; i < problem.nodes.size(); ++i)
    if (!problem.nodes[i].backward) forward.insert(joined.of(static_cast<int>(i)));
  Order order;
  for (const auto& [u, v] : problem.edges) {
    const int a = joined.of(u), b = joined.of(v);
    if (a == b) continue;
    const bool from_backward = problem.nodes[u].backward, to_backward = problem.nodes[v].backward;
    if (!from_backward && !to_backward) order.emplace(a, b);
    if (from_backward && to_backward && (!forward.contains(a) || !forward.contains(b))) order.emplace(b, a);
  }
  return order;
}

// Tarjan's components, without recursion; joins each. Whether any had two members.
bool join_cycles(const Order& order, Joined& joined) {
  std::map<int, std::vector<int>> after;
  for (const auto& [a, b] : order) {
    after[a].push_back(b);
    after[b];
  }
  struct Mark {
    int index = -1, low = 0;
    bool open = false;
  };
  std::map<int, Mark> marks;
  std::vector<int> stack;
  int next = 0;
  bool any = false;
  for (const auto& [root, unused] : after) {
    if (marks[root].index >= 0) continue;
    std::vector<std::pair<int, size_t>> walk{{root, 0}};
    while (!walk.empty()) {
      const auto [v, at] = walk.back();
      Mark& mark = marks[v];
      if (at == 0) {
        mark = {.index = next, .low = next, .open = true};
        ++next;
        stack.push_back(v);
      }
      const std::vector<int>& out = after[v];
      if (at < out.size()) {
        ++walk.back().second;
        const int w = out[at];
        if (marks[w].index < 0)
          walk.emplace_back(w, 0);
        else if (marks[w].open)
          mark.low = std::min(mark.low, marks[w].index);
        continue;
      }
      walk.pop_back();
      if (!walk.empty()) marks[walk.back().first].low = std::min(marks[walk.back().first].low, mark.low);
      if (mark.low != mark.index) continue;
      for (;;) {
        const int w = stack.back();
        stack.pop_back();
        marks[w].open = false;
        if (w == v) break;
        any |= joined.join(v, w);
      }
    }
  }
  return any;
}

// A group without work and with one neighbour is best placed with it, as long as memory is no matter.
bool join_idle(const PartitionProblem& problem, Joined& joined) {
  double bytes = 0;
  for (const PartitionNode& node : problem.nodes) bytes += node.bytes;
  const bool ample = bytes <= problem.device_bytes;
  std::map<int, std::set<int>> neighbours;
  for (const auto& [u, v] : problem.edges)
    if (joined.of(u) != joined.of(v)) {
      neighbours[joined.of(u)].insert(joined.of(v));
      neighbours[joined.of(v)].insert(joined.of(u));
    }
  std::map<int, bool> idle;
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const PartitionNode& node = problem.nodes[i];
    const bool here = node.device_ms < 1e-6 && node.host_ms < 1e-6 && node.on_device && (ample || node.bytes == 0);
    const auto at = idle.try_emplace(joined.of(static_cast<int>(i)), true).first;
    at->second &= here;
  }
  for (const auto& [group, is] : idle)
    if (is && neighbours[group].size() == 1) {
      joined.join(*neighbours[group].begin(), group);
      return true;
    }
  return false;
}

void verify_acyclic(const PartitionProblem& problem) {
  std::vector<int> left(problem.nodes.size(), 0), ready;
  std::vector<std::vector<int>> after(problem.nodes.size());
  for (const auto& [u, v] : problem.edges) {
    ++left[v];
    after[u].push_back(v);
  }
  for (size_t i = 0; i < left.size(); ++i)
    if (left[i] == 0) ready.push_back(static_cast<int>(i));
  size_t done = 0;
  while (!ready.empty()) {
    const int v = ready.back();
    ready.pop_back();
    ++done;
    for (const int w : after[v])
      if (--left[w] == 0) ready.push_back(w);
  }
  if (done < left.size())
    throw invalid("the graph has a cycle through {} of its {} nodes", left.size() - done, left.size());
}

}  // namespace

PartitionGroups group_nodes(const PartitionProblem& problem) {
  verify(problem);
  verify_acyclic(problem);
  Joined joined(problem.nodes.size());
  std::map<int64_t, int> colors;
  for (size_t i = 0; i < problem.nodes.size(); ++i)
    if (problem.nodes[i].color >= 0)
      joined.join(colors.try_emplace(problem.nodes[i].color, static_cast<int>(i)).first->second, static_cast<int>(i));
  Order order;
  do order = order_of(problem, joined);
  while (join_cycles(order, joined) || join_idle(problem, joined));

  // Depth first: whoever can come right after its last operand does.
  std::map<int, std::vector<int>> after;
  std::map<int, int> left;
  for (size_t i = 0; i < problem.nodes.size(); ++i) left[joined.of(static_cast<int>(i))];
  for (const auto& [a, b] : order) {
    after[a].push_back(b);
    ++left[b];
  }
  std::vector<int> ready, sorted;
  for (const auto& [group, count] : left)
    if (count == 0) ready.push_back(group);
  while (!ready.empty()) {
    const int group = ready.back();
    ready.pop_back();
    sorted.push_back(group);
    for (const int next : after[group])
      if (--left[next] == 0) ready.push_back(next);
  }

  PartitionGroups out;
  std::map<int, int> place;
  for (const int group : sorted) place.emplace(group, static_cast<int>(place.size()));
  out.groups.resize(sorted.size());
  out.group_of.resize(problem.nodes.size());
  out.readers.assign(problem.nodes.size(), 0);
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const PartitionNode& node = problem.nodes[i];
    out.group_of[i] = place.at(joined.of(static_cast<int>(i)));
    out.send_ms.push_back(node.send_ms);
    PartitionGroup& group = out.groups[out.group_of[i]];
    group.nodes.push_back(static_cast<int>(i));
    group.device_ms += node.device_ms;
    group.host_ms += node.host_ms;
    group.bytes += node.bytes;
    group.on_device &= node.on_device;
  }
  for (const auto& [a, b] : order) {
    out.groups[place.at(a)].after.push_back(place.at(b));
    out.groups[place.at(b)].before.push_back(place.at(a));
  }
  std::map<std::pair<int, int>, int> reads;  // group, node
  for (const auto& [u, v] : problem.edges) {
    const int from = out.group_of[u], to = out.group_of[v];
    if (from == to || problem.nodes[u].send_ms == 0) continue;
    ++reads[{to, u}];
    if (out.readers[u]++ == 0) out.groups[from].senders.push_back(u);
  }
  for (const auto& [at, count] : reads) out.groups[at.first].reads.emplace_back(at.second, count);
  return out;
}

}  // namespace whale
