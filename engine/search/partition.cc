#include "search/partition.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "base/thread_seconds.h"
#include "search/least_part.h"
#include "search/partition_groups.h"

namespace whale {
namespace {

constexpr double kNever = 1e300;

// Time of a part that grows and shrinks group by group, last come first gone.
class Part {
 public:
  struct Sums {
    double device = 0, host = 0, bytes = 0;
    double sent = 0;     // what passes the border
    double settled = 0;  // of it: what comes from the ideal below, whose groups will never join
    int not_on_device = 0;
    double device_ms() const { return device + sent; }
    double least_device_ms() const { return device + settled; }  // of this part and of all that contain it
  };

  explicit Part(const PartitionGroups& groups) {
    std::vector<int32_t> place(groups.group_of.size(), -1);
    for (const PartitionGroup& g : groups.groups)
      for (const int u : g.senders) {
        place[u] = static_cast<int32_t>(outputs_.size());
        outputs_.push_back({.ms = groups.send_ms[u], .readers = groups.readers[u]});
      }
    for (const PartitionGroup& g : groups.groups) {
      Group group{.device = g.device_ms, .host = g.host_ms, .bytes = g.bytes, .not_on_device = g.on_device ? 0 : 1};
      group.sends = static_cast<int32_t>(sends_.size());
      for (const int u : g.senders) sends_.push_back(place[u]);
      group.reads = static_cast<int32_t>(reads_.size());
      for (const auto& [u, edges] : g.reads) reads_.push_back({place[u], edges});
      groups_.push_back(group);
    }
    groups_.push_back({.sends = static_cast<int32_t>(sends_.size()), .reads = static_cast<int32_t>(reads_.size())});
  }

  const Sums& sums() const { return sums_; }

  void add(int32_t g) {
    const Group &group = groups_[g], &end = groups_[static_cast<size_t>(g) + 1];
    sums_.device += group.device;
    sums_.host += group.host;
    sums_.bytes += group.bytes;
    sums_.not_on_device += group.not_on_device;
    for (int32_t j = group.sends; j < end.sends; ++j) {
      Output& out = outputs_[sends_[j]];
      out.here = true;
      if (out.read == 0)
        sums_.sent += out.ms;
      else if (out.read == out.readers)
        sums_.sent -= out.ms;
    }
    for (int32_t j = group.reads; j < end.reads; ++j) {
      const Read& read = reads_[j];
      Output& out = outputs_[read.output];
      out.read += read.edges;
      if (out.here) {
        if (out.read == out.readers) sums_.sent -= out.ms;
      } else if (out.read == read.edges) {
        sums_.sent += out.ms;
        if (out.below) sums_.settled += out.ms;
      }
    }
  }
  // `before`: the sums when it was added.
  void remove(int32_t g, const Sums& before) {
    const Group &group = groups_[g], &end = groups_[static_cast<size_t>(g) + 1];
    for (int32_t j = group.reads; j < end.reads; ++j) {
      const Read& read = reads_[j];
      outputs_[read.output].read -= read.edges;
    }
    for (int32_t j = group.sends; j < end.sends; ++j) outputs_[sends_[j]].here = false;
    sums_ = before;
  }
  // Whether a group is of the ideal below the part.
  void below(int32_t g, bool is) {
    const Group &group = groups_[g], &end = groups_[static_cast<size_t>(g) + 1];
    for (int32_t j = group.sends; j < end.sends; ++j) outputs_[sends_[j]].below = is;
  }

 private:
  struct Output {  // of a node that other groups read
    double ms = 0;
    int32_t readers = 0, read = 0;  // edges to other groups, and of them those into the part
    bool here = false, below = false;
  };
  struct Read {
    int32_t output, edges;
  };
  struct Group {
    double device = 0, host = 0, bytes = 0;
    int32_t not_on_device = 0, sends = 0, reads = 0;
  };
  std::vector<Group> groups_;
  std::vector<Output> outputs_;
  std::vector<int32_t> sends_;
  std::vector<Read> reads_;
  Sums sums_;
};

// Sets of groups that contain all that they read, and how each grows by one group.
struct Ideals {
  struct Step {
    int32_t group, to;
  };
  std::vector<std::vector<Step>> steps;
  std::vector<double> device_ms, host_ms, bytes, crossing_ms;  // of the groups within; of what passes its border
  std::vector<char> rest_not_on_device;                        // whether some group without is on no device
  std::vector<int32_t> from, by;                               // one way to it
  bool complete = false;
};

class Cutter {
 public:
  Cutter(const PartitionProblem& problem, const PartitionSearch& search)
      : problem_(problem), search_(search), groups_(group_nodes(problem)), part_(groups_), begin_(thread_seconds()) {
    double most = 0;
    for (const PartitionGroup& g : groups_.groups) {
      total_ += g.device_ms;
      total_bytes_ += g.bytes;
      if (g.host_ms > 0) most = std::max(most, g.device_ms / g.host_ms);
      if (g.host_ms == 0 && g.device_ms > 0) most = kNever;
    }
    host_share_ = problem.hosts > 0 ? most : 0;
  }

  FoundPartition run() {
    // A good partition along one order first: it bounds all else.
    Ideals line;
    line_of(line);
    cut(line);
    const double bound = least();
    bool exact = best_ms_ <= bound * (1 + 1e-9);
    Ideals all;
    if (!exact && all_ideals(all)) exact = cut(all);
    if (best_ms_ >= kNever)
      throw invalid("no partition fits {} devices of {:.2f} GB and {} hosts", problem_.devices,
                    problem_.device_bytes / 1e9, problem_.hosts);
    FoundPartition out;
    out.ms = best_ms_;
    out.proven = exact;
    out.least_ms = exact ? best_ms_ : bound;
    out.parts = std::move(best_);
    out.groups = static_cast<int64_t>(groups_.groups.size());
    out.ideals = static_cast<int64_t>(all.steps.size());
    out.pairs = pairs_;
    out.seconds = elapsed();
    return out;
  }

 private:
  double elapsed() const { return thread_seconds() - begin_; }
  bool late() const { return search_.within_seconds > 0 && elapsed() > search_.within_seconds; }

  // No partition is faster: all work shared evenly, and the part of any one group. The groups with most work are asked.
  double least() const {
    double bound = total_ / (problem_.devices + (problem_.hosts > 0 ? problem_.hosts * host_share_ : 0));
    std::vector<int> order;
    for (size_t g = 0; g < groups_.groups.size(); ++g) order.push_back(static_cast<int>(g));
    const auto work = [&](int g) { return groups_.groups[g].device_ms; };
    std::ranges::sort(order, std::ranges::greater(), work);
    for (size_t j = 0; j < std::min<size_t>(3, order.size()); ++j) {
      double here = least_part_ms(groups_, order[j]);
      if (problem_.hosts > 0) here = std::min(here, groups_.groups[order[j]].host_ms);
      bound = std::max(bound, here);
    }
    return bound;
  }

  void line_of(Ideals& out) {
    const size_t n = groups_.groups.size();
    out.steps.resize(n + 1);
    for (size_t i = 0; i < n; ++i) out.steps[i].push_back({static_cast<int32_t>(i), static_cast<int32_t>(i + 1)});
    for (size_t i = 0; i <= n; ++i) {
      out.from.push_back(static_cast<int32_t>(i) - 1);
      out.by.push_back(static_cast<int32_t>(i) - 1);
    }
    measure(out);
    out.complete = true;
  }

  bool all_ideals(Ideals& out) {
    const size_t n = groups_.groups.size(), words = (n + 63) / 64;
    std::vector<uint64_t> sets(words, 0);  // one after the other
    std::unordered_multimap<uint64_t, int32_t> known;
    std::vector<uint64_t> keys(n);
    uint64_t state = 0x9e3779b97f4a7c15;
    for (uint64_t& key : keys) {  // splitmix64; a set's hash is the xor of its groups'
      uint64_t z = (state += 0x9e3779b97f4a7c15);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
      z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
      key = z ^ (z >> 31);
    }
    std::vector<uint64_t> hashes{0};
    known.emplace(0, 0);
    out.from.push_back(-1);
    out.by.push_back(-1);
    std::vector<std::vector<int32_t>> open(1);  // groups that each set may grow by
    for (size_t g = 0; g < n; ++g)
      if (groups_.groups[g].before.empty()) open[0].push_back(static_cast<int32_t>(g));
    out.steps.resize(1);
    for (size_t i = 0; i < out.from.size(); ++i) {
      const std::vector<int32_t> grow = std::move(open[i]);
      for (const int32_t g : grow) {
        std::vector<uint64_t> set(sets.begin() + static_cast<int64_t>(i * words),
                                  sets.begin() + static_cast<int64_t>((i + 1) * words));
        set[static_cast<size_t>(g) / 64] |= 1ull << (g % 64);
        const uint64_t hash = hashes[i] ^ keys[g];
        int32_t to = -1;
        for (auto [at, end] = known.equal_range(hash); at != end; ++at)
          if (std::equal(set.begin(), set.end(),
                         sets.begin() + static_cast<int64_t>(static_cast<size_t>(at->second) * words)))
            to = at->second;
        if (to < 0) {
          if (static_cast<int64_t>(out.from.size()) >= search_.most_ideals || late()) return false;
          to = static_cast<int32_t>(out.from.size());
          known.emplace(hash, to);
          hashes.push_back(hash);
          sets.insert(sets.end(), set.begin(), set.end());
          out.from.push_back(static_cast<int32_t>(i));
          out.by.push_back(g);
          out.steps.emplace_back();
          std::vector<int32_t> next;
          for (const int32_t other : grow)
            if (other != g) next.push_back(other);
          for (const int after : groups_.groups[g].after)
            if (std::ranges::all_of(groups_.groups[after].before,
                                    [&](int b) { return (set[static_cast<size_t>(b) / 64] >> (b % 64) & 1) != 0; }))
              next.push_back(after);
          open.push_back(std::move(next));
        }
        out.steps[i].push_back({g, to});
      }
    }
    measure(out);
    out.complete = true;
    return true;
  }

  // What each ideal holds. Every ideal comes after the one that it grew from.
  void measure(Ideals& out) {
    const size_t n = out.from.size();
    out.device_ms.assign(n, 0);
    out.host_ms.assign(n, 0);
    out.bytes.assign(n, 0);
    std::vector<int> off(n, 0);  // groups within that are on no device
    out.crossing_ms.assign(n, 0);
    std::vector<std::pair<int32_t, Part::Sums>> path;
    Part part(groups_);
    std::vector<int32_t> want;
    for (size_t i = 1; i < n; ++i) {
      // From the ideal before to this one, by way of what both hold; most share nearly all.
      want.clear();
      for (auto at = static_cast<int32_t>(i); at > 0; at = out.from[at]) want.push_back(out.by[at]);
      std::ranges::reverse(want);
      size_t same = 0;
      while (same < path.size() && same < want.size() && path[same].first == want[same]) ++same;
      while (path.size() > same) {
        part.remove(path.back().first, path.back().second);
        path.pop_back();
      }
      while (path.size() < want.size()) {
        path.emplace_back(want[path.size()], part.sums());
        part.add(path.back().first);
      }
      const auto from = static_cast<size_t>(out.from[i]);
      const PartitionGroup& last = groups_.groups[out.by[i]];
      out.host_ms[i] = out.host_ms[from] + last.host_ms;
      out.device_ms[i] = out.device_ms[from] + last.device_ms;
      out.bytes[i] = out.bytes[from] + last.bytes;
      off[i] = off[from] + (last.on_device ? 0 : 1);
      out.crossing_ms[i] = part.sums().sent;
    }
    int all_off = 0;
    for (const PartitionGroup& g : groups_.groups) all_off += g.on_device ? 0 : 1;
    for (const int count : off) out.rest_not_on_device.push_back(count < all_off);
  }

  // The best chain of ideals, and so of parts, if it is better than what is known. False where time ran out.
  bool cut(const Ideals& ideals) {
    const size_t n = ideals.steps.size();
    const int devices = problem_.devices, hosts = problem_.hosts;
    struct State {
      double ms = kNever;
      int32_t from = -1;
      bool host = false;  // the part that led here
    };
    const auto level = [&](int d, int h) { return static_cast<size_t>(h * (devices + 1) + d); };
    const size_t levels = level(devices, hosts) + 1;
    std::vector<State> all(n * levels);
    // Those of one ideal lie side by side.
    const auto states = [&](int d, int h, size_t i) -> State& { return all[i * levels + level(d, h)]; };
    states(0, 0, 0).ms = 0;
    struct Frame {
      int32_t ideal;
      size_t step;
      int32_t group;
      Part::Sums before;
    };
    std::vector<Frame> walk;
    std::vector<int32_t> stamp(n, -1);
    int32_t visit = 0;
    // Ideals in the order of their sizes: what leads to one comes before it, and its parts are walked once for all
    // numbers of devices before it.
    struct Begin {
      int d, h;
      double ms;
    };
    std::vector<Begin> begins;
    for (size_t i = 0; i + 1 < n; ++i) {
      begins.clear();
      for (int h = 0; h <= hosts; ++h)
        for (int d = 0; d <= devices && d + h < devices + hosts; ++d) {
          const double ms = states(d, h, i).ms;
          if (ms >= limit() || !possible(ideals, i, d, h)) continue;
          if (d + h + 1 == devices + hosts)  // one part is left: it takes all
            finish(ideals, states, i, d, h, ms);
          else
            begins.push_back({d, h, ms});
        }
      if (begins.empty()) continue;
      if (late()) return false;
      const auto below = [&](bool is) {
        for (auto at = static_cast<int32_t>(i); at > 0; at = ideals.from[at]) part_.below(ideals.by[at], is);
      };
      below(true);
      for (const bool host : {false, true}) {
        if (std::ranges::none_of(begins, [&](const Begin& b) { return host ? b.h < hosts : b.d < devices; })) continue;
        ++visit;
        const auto reach = [&](int32_t at) {
          const auto to = static_cast<size_t>(at);
          ++pairs_;
          const double part = host ? part_.sums().host : part_.sums().device_ms();
          if (part >= limit()) return;
          for (const Begin& b : begins) {
            const int to_d = b.d + (host ? 0 : 1), to_h = b.h + (host ? 1 : 0);
            if (to_d > devices || to_h > hosts) continue;
            State& next = states(to_d, to_h, to);
            const double here = std::max(b.ms, part);
            if (here >= next.ms || here >= limit() || !possible(ideals, to, to_d, to_h)) continue;
            next = {.ms = here, .from = static_cast<int32_t>(i), .host = host};
            if (to + 1 == n) keep(ideals, states, to_d, to_h, here);
          }
        };
        // Depth first over all ideals above that are not too much for one part.
        walk.assign(1, {static_cast<int32_t>(i), 0, -1, {}});
        stamp[i] = visit;
        while (!walk.empty()) {
          Frame& frame = walk.back();
          const auto& steps = ideals.steps[frame.ideal];
          if (frame.step == steps.size()) {
            if (frame.group >= 0) part_.remove(frame.group, frame.before);
            walk.pop_back();
            continue;
          }
          const Ideals::Step step = steps[frame.step++];
          if (stamp[step.to] == visit) continue;
          stamp[step.to] = visit;
          const Part::Sums before = part_.sums();
          part_.add(step.group);
          const Part::Sums& now = part_.sums();
          const bool over =
              host ? now.host >= limit()
                   : now.least_device_ms() >= limit() || now.not_on_device > 0 || now.bytes > problem_.device_bytes;
          if (over) {
            part_.remove(step.group, before);
            continue;
          }
          reach(step.to);
          walk.push_back({step.to, 0, step.group, before});
        }
      }
      below(false);
    }
    return true;
  }

  template <class States>
  void finish(const Ideals& ideals, const States& states, size_t i, int d, int h, double ms) {
    const size_t end = ideals.steps.size() - 1;
    const bool host = h < problem_.hosts;
    ++pairs_;
    if (!host && (total_bytes_ - ideals.bytes[i] > problem_.device_bytes || ideals.rest_not_on_device[i])) return;
    const double here = std::max(
        ms, host ? ideals.host_ms[end] - ideals.host_ms[i] : total_ - ideals.device_ms[i] + ideals.crossing_ms[i]);
    const int to_d = d + (host ? 0 : 1), to_h = h + (host ? 1 : 0);
    auto& last = states(to_d, to_h, end);
    if (here >= limit() || here >= last.ms) return;
    last.ms = here;
    last.from = static_cast<int32_t>(i);
    last.host = host;
    keep(ideals, states, to_d, to_h, here);
  }

  // A partition has to be better than this to matter.
  double limit() const { return best_ms_ >= kNever ? kNever : best_ms_ * (1 - 1e-12); }

  // Whether an ideal on so many devices and hosts, and the rest on the others, may be better than what is known: what
  // passes the border is paid on both sides, by devices.
  bool possible(const Ideals& ideals, size_t i, int d, int h) const {
    if (limit() >= kNever) return true;
    const double within = ideals.device_ms[i], rest = total_ - within, border = ideals.crossing_ms[i];
    const double slack = 1e-9 * total_;
    const auto side = [&](double work, int on_devices, int on_hosts) {
      if (on_hosts > 0 && host_share_ >= kNever) return true;
      return work + (on_hosts == 0 ? border : 0) <= limit() * (on_devices + on_hosts * host_share_) + slack;
    };
    return side(within, d, h) && side(rest, problem_.devices - d, problem_.hosts - h);
  }

  template <class States>
  void keep(const Ideals& ideals, const States& states, int d, int h, double ms) {
    best_ms_ = ms;
    best_.clear();
    auto at = static_cast<int32_t>(ideals.steps.size() - 1);
    while (at > 0) {
      const int32_t from = states(d, h, static_cast<size_t>(at)).from;
      std::set<int32_t> groups;
      for (auto walk = at; walk > 0; walk = ideals.from[walk]) groups.insert(ideals.by[walk]);
      for (auto walk = from; walk > 0; walk = ideals.from[walk]) groups.erase(ideals.by[walk]);
      PartitionPart part;
      for (const int32_t g : groups) {
        const PartitionGroup& group = groups_.groups[g];
        part.nodes.insert(part.nodes.end(), group.nodes.begin(), group.nodes.end());
        part.bytes += group.bytes;
      }
      std::ranges::sort(part.nodes);
      part.host = states(d, h, static_cast<size_t>(at)).host;
      part.ms = part_ms(problem_, part.nodes, part.host);
      (part.host ? h : d) -= 1;
      best_.insert(best_.begin(), std::move(part));
      at = from;
    }
  }

  const PartitionProblem& problem_;
  const PartitionSearch& search_;
  PartitionGroups groups_;
  Part part_;
  double begin_;
  double total_ = 0, total_bytes_ = 0, host_share_ = 0;  // host_share_: device time that a host may spare in its own
  double best_ms_ = kNever;
  std::vector<PartitionPart> best_;
  int64_t pairs_ = 0;
};

}  // namespace

double part_ms(const PartitionProblem& problem, const std::vector<int>& nodes, bool host) {
  std::vector<char> inside(problem.nodes.size(), 0);
  double ms = 0;
  for (const int i : nodes) {
    inside[i] = 1;
    ms += host ? problem.nodes[i].host_ms : problem.nodes[i].device_ms;
  }
  if (host) return ms;
  std::set<int> crossing;
  for (const auto& [u, v] : problem.edges)
    if (inside[u] != inside[v]) crossing.insert(u);
  for (const int u : crossing) ms += problem.nodes[u].send_ms;
  return ms;
}

FoundPartition partition(const PartitionProblem& problem, const PartitionSearch& search) {
  return Cutter(problem, search).run();
}

}  // namespace whale
