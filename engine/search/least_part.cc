#include "search/least_part.h"

#include <algorithm>
#include <map>
#include <set>

namespace whale {
namespace {

// Dinic's algorithm.
class Flow {
 public:
  explicit Flow(size_t nodes) : out_(nodes) {}
  void edge(size_t from, size_t to, double capacity) {
    out_[from].push_back(edges_.size());
    edges_.push_back({to, capacity});
    out_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }
  double most(size_t source, size_t sink) {
    double sum = 0;
    while (levels(source, sink)) {
      next_.assign(out_.size(), 0);
      while (const double pushed = push(source, sink, 1e300)) sum += pushed;
    }
    return sum;
  }

 private:
  static constexpr double kSmall = 1e-12;
  struct Edge {
    size_t to;
    double left;
  };
  bool levels(size_t source, size_t sink) {
    level_.assign(out_.size(), -1);
    level_[source] = 0;
    std::vector<size_t> queue{source};
    for (size_t i = 0; i < queue.size(); ++i)
      for (const size_t e : out_[queue[i]])
        if (edges_[e].left > kSmall && level_[edges_[e].to] < 0) {
          level_[edges_[e].to] = level_[queue[i]] + 1;
          queue.push_back(edges_[e].to);
        }
    return level_[sink] >= 0;
  }
  double push(size_t at, size_t sink, double flow) {
    if (at == sink) return flow;
    for (size_t& i = next_[at]; i < out_[at].size(); ++i) {
      Edge& edge = edges_[out_[at][i]];
      if (edge.left <= kSmall || level_[edge.to] != level_[at] + 1) continue;
      if (const double pushed = push(edge.to, sink, std::min(flow, edge.left)); pushed > 0) {
        edge.left -= pushed;
        edges_[out_[at][i] ^ 1].left += pushed;
        return pushed;
      }
    }
    return 0;
  }
  std::vector<std::vector<size_t>> out_;
  std::vector<Edge> edges_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

}  // namespace

double least_part_ms(const PartitionGroups& groups, int group) {
  // On the source's side: the part. A group there costs its time; an output costs once where its sender and readers are
  // not all on one side.
  std::map<int, std::set<int>> ends;  // by node whose output is read elsewhere: the groups that touch it
  for (size_t g = 0; g < groups.groups.size(); ++g)
    for (const auto& [node, edges] : groups.groups[g].reads) {
      ends[node].insert(static_cast<int>(g));
      ends[node].insert(groups.group_of[node]);
    }
  const size_t n = groups.groups.size(), sink = n + 2 * ends.size();
  Flow flow(sink + 1);
  constexpr double kNever = 1e300;
  for (size_t g = 0; g < n; ++g)
    if (g != static_cast<size_t>(group)) flow.edge(g, sink, groups.groups[g].device_ms);
  size_t at = n;
  for (const auto& [node, touched] : ends) {
    flow.edge(at, at + 1, groups.send_ms[node]);
    for (const int g : touched) {
      flow.edge(static_cast<size_t>(g), at, kNever);
      flow.edge(at + 1, static_cast<size_t>(g), kNever);
    }
    at += 2;
  }
  return groups.groups[group].device_ms + flow.most(static_cast<size_t>(group), sink);
}

}  // namespace whale
