#include "compile/automatic.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "base/text.h"
#include "base/watch.h"
#include "cluster/devices.h"
#include "compile/checks.h"
#include "compile/estimate.h"
#include "compile/model_parts.h"
#include "grad/passes.h"
#include "plan/figures.h"
#include "search/thread_seconds.h"
#include "simulate/simulate.h"
#include "task/strategy.h"

namespace whale {
namespace {

// What makes a plan take less memory, one after the other, by what it costs.
struct Saving {
  const char* name;
  int zero;
  Recompute recompute;
  uint32_t offload;  // classes in the host's memory
};
constexpr Saving kSavings[] = {
    {"", 0, Recompute::kNone, 0},
    {"zero 1", 1, Recompute::kNone, 0},
    {"recompute selective", 0, Recompute::kSelective, 0},
    {"zero 1, recompute selective", 1, Recompute::kSelective, 0},
    {"zero 2, recompute selective", 2, Recompute::kSelective, 0},
    {"recompute full", 0, Recompute::kFull, 0},
    {"zero 1, recompute full", 1, Recompute::kFull, 0},
    {"zero 2, recompute full", 2, Recompute::kFull, 0},
    {"zero 3, recompute full", 3, Recompute::kFull, 0},
    {"zero 3, recompute full, offload state", 3, Recompute::kFull, kOffloadState},
    {"zero 3, recompute full, offload all", 3, Recompute::kFull, kOffloadAll},
};

// Tensors of a parameter's size that the optimizer keeps beside it.
double states_of(const Optimizer& optimizer) {
  switch (optimizer.kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kLamb: return 2;
    case OptimizerKind::kAdagrad: return 1;
    case OptimizerKind::kSgd: return optimizer.momentum != 0 ? 1 : 0;
    default: return 0;
  }
}

Ints divisors(int64_t n) {
  Ints out;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) out.push_back(d);
  return out;
}

// The type of each device; those of one name with other figures are another.
std::vector<std::string> types_of(const std::vector<DeviceSpec>& devices) {
  std::map<std::string, std::vector<const DeviceSpec*>> known;
  std::vector<std::string> out;
  for (const DeviceSpec& d : devices) {
    const std::string name = d.type.empty() ? name_of(d.kind) : d.type;
    auto& list = known[name];
    const auto at = std::ranges::find_if(
        list, [&](const DeviceSpec* k) { return k->figures == d.figures && k->memory_bytes == d.memory_bytes; });
    const auto number = at - list.begin();
    if (at == list.end()) list.push_back(&d);
    out.push_back(number == 0 ? name : fmt::format("{} ({})", name, number + 1));
  }
  return out;
}

std::vector<DeviceSpec> of(const std::vector<DeviceSpec>& devices, const std::vector<int32_t>& chosen) {
  std::vector<DeviceSpec> out;
  std::map<int, int> nodes;  // numbered anew
  for (const int32_t d : chosen) {
    out.push_back(devices[static_cast<size_t>(d)]);
    out.back().node = nodes.try_emplace(out.back().node, static_cast<int>(nodes.size())).first->second;
  }
  return out;
}

class Search {
 public:
  Search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options)
      : graph_(graph), devices_(devices), options_(options), asked_(options.search), began_(thread_seconds()) {
    batch_ = batch_of(graph), states_ = states_of(graph.training.optimizer);
    for (const Op& op : graph.ops) {
      flops_ += cost_of(view_of(graph, op)).flops;
      if (has_flag(op.code, kProduct))
        for (const TensorId t : op.outputs)
          if (t != kNone) products_ += static_cast<double>(element_count(graph.tensor(t).dims) * size_of(DType::kF32));
    }
    for (const Variable& v : graph.variables)
      if (v.role == Role::kParameter) {
        const Tensor& t = graph.tensor(v.tensor);
        parameters_ += static_cast<double>(element_count(t.dims) * size_of(t.dtype));
      }
  }

  Found run() {
    const bool priced = std::ranges::any_of(devices_, [](const DeviceSpec& d) { return d.figures.price_per_hour > 0; });
    if (!priced && (asked_.objective == Objective::kPrice || std::isfinite(asked_.most_price)))
      throw invalid(
          "strategy auto is to go by the price of a step, and no device of this cluster has one: give "
          "price_per_hour in a cluster file (docs/clusters.md), or device types");
    sets_ = sets_of_devices();
    parts_ = parts_worth_a_clause(graph_);
    for (const Set& set : sets_) is_annotated() ? annotated_shapes(set) : shapes(set);
    Found out{.list = {}, .batch = batch_};
    if (!asked_.present.empty()) out.not_tried = keep_near(shape_of(asked_.present));
    // What is likely to be fast first; the time runs out on the others.
    std::ranges::stable_sort(shapes_, {}, [](const Shape& s) { return s.rank; });
    // Nothing that is left can be as fast as the best by its estimate, were its counts as far off to its favour as any
    // were so far; twice as far while few have said how far that is.
    constexpr size_t kFewest = 8;
    constexpr double kLonger = 3;  // is looked while nothing fits
    double best = std::numeric_limits<double>::infinity(), off = 1;
    size_t fit = 0;
    for (const Shape& shape : shapes_) {
      const bool hopeless = shape.rank * off * (fit >= kFewest ? 1 : 0.5) > best;
      if (elapsed() > kLooked * asked_.seconds * (fit > 0 ? 1 : kLonger) || hopeless) {
        ++out.not_tried;
        continue;
      }
      std::optional<Judged> judged = first_that_fits(shape, best);
      if (!judged) continue;
      if (allowed(*judged)) {
        ++fit;
        off = std::min(off, judged->seconds / shape.rank);
        if (asked_.objective == Objective::kThroughput) best = std::min(best, judged->seconds);
      }
      out.list.push_back(std::move(*judged));
    }
    rank(out);
    try_schedules(out);
    simulate_best(out);
    say_why(out);
    return out;
  }

 private:
  static constexpr double kLooked = 0.6;  // of the time; what is left is for the simulator

  struct Shape {
    Candidate candidate;
    int64_t stages = 1, split = 1;
    bool replicas = false;
    double rank = 0;
    double ways = 1;               // that parameters are cut into
    double cut = 0, cut_ways = 1;  // bytes of parameters that are cut in other ways
  };

  // The stages and ways of a strategy that is written.
  static Shape shape_of(const std::string& strategy) {
    Shape out;
    for (const StrategyClause& clause : parse_clauses(strategy))
      if (clause.name.empty())
        for (const Scope& scope : clause.nest) {
          if (scope.kind == ScopeKind::kPipeline) out.stages = std::max<int64_t>(1, scope.count);
          if (scope.kind == ScopeKind::kSplit) out.split = std::max<int64_t>(1, scope.count);
        }
    return out;
  }
  // Shapes with half to twice as many stages and ways as the present one. Returns how many go.
  size_t keep_near(const Shape& present) {
    const auto near = [](int64_t a, int64_t b) { return a <= 2 * b && b <= 2 * a; };
    return std::erase_if(
        shapes_, [&](const Shape& s) { return !near(s.stages, present.stages) || !near(s.split, present.split); });
  }

  double elapsed() const { return thread_seconds() - began_; }
  struct Set {
    std::string name;  // empty: all, as they are listed
    std::vector<int32_t> devices;
    bool ordered = false;  // of worth only where stages go along the devices
    // Of these devices.
    std::vector<DeviceSpec> specs = {};
    std::optional<CostModel> cost = {};
    int64_t memory = 0, node = 1;  // of the largest; what divides the devices of every node
    double flops = 0;              // a second, of all
  };
  void measure(Set& set) const {
    const Precision precision = options_.precision.value_or(graph_.training.precision);
    set.specs = of(devices_, set.devices);
    set.cost.emplace(set.specs, 1, options_.profile, precision);
    set.node = node_size(set.specs);
    for (const DeviceSpec& d : set.specs) {
      set.memory = std::max(set.memory, d.memory_bytes);
      set.flops += set.cost->rates_of(d).flops_per_second;
    }
  }
  bool is_annotated() const {
    return std::ranges::any_of(graph_.scopes, [](const Scope& s) {
      return s.kind != ScopeKind::kRoot && s.kind != ScopeKind::kName && s.kind != ScopeKind::kCluster;
    });
  }
  // All of them; where they are unlike, also those of each type alone, and all with the nodes of much memory first
  // (Jia et al., 2022, section 3.3.2), or last.
  std::vector<Set> sets_of_devices() const {
    const std::vector<std::string> types = types_of(devices_);
    Set all;
    std::map<std::string, std::vector<int32_t>> of_type;
    for (size_t d = 0; d < devices_.size(); ++d) {
      all.devices.push_back(static_cast<int32_t>(d));
      of_type[types[d]].push_back(all.devices.back());
    }
    std::vector<Set> out{all};
    if (asked_.ranks > 1) {
      measure(out[0]);
      return out;
    }
    const auto add_set = [&](Set set) {
      if (!set.devices.empty() && std::ranges::none_of(out, [&](const Set& s) { return s.devices == set.devices; }))
        out.push_back(std::move(set));
    };
    // Of each type all, and its first nodes, halved again and again, and then of its first node the first devices: what
    // a slow network costs may be more than what is behind it brings.
    for (const auto& [type, list] : of_type) {
      const std::string name = of_type.size() > 1 ? type + " alone" : "";
      add_set({name, list});
      std::vector<int> nodes;
      for (const int32_t d : list)
        if (const int node = devices_[static_cast<size_t>(d)].node; nodes.empty() || nodes.back() != node)
          nodes.push_back(node);
      for (size_t keep = nodes.size() / 2; keep > 0; keep /= 2) {
        Set some{fmt::format("{} of {} nodes", keep, nodes.size()), {}};
        for (const int32_t d : list)
          if (devices_[static_cast<size_t>(d)].node <= nodes[keep - 1]) some.devices.push_back(d);
        add_set(std::move(some));
      }
      size_t first = 0;
      while (first < list.size() && devices_[static_cast<size_t>(list[first])].node == nodes[0]) ++first;
      for (size_t keep = first; keep > 0; keep /= 2)
        add_set({fmt::format("{} of {} devices", keep, devices_.size()),
                 {list.begin(), list.begin() + static_cast<std::ptrdiff_t>(keep)}});
    }
    if (of_type.size() > 2)  // without one type
      for (const auto& [type, list] : of_type) {
        Set others{"without " + type, {}};
        for (const int32_t d : all.devices)
          if (types[static_cast<size_t>(d)] != type) others.devices.push_back(d);
        add_set(std::move(others));
      }
    add_set(without_some(all));
    if (are_unlike(devices_)) add_sorted(all, out);
    for (Set& set : out) measure(set);
    return out;
  }

  // Without the slowest few, where fewer can be cut in more ways: of 63 devices 60.
  Set without_some(const Set& all) const {
    constexpr double kLeast = 0.8, kMore = 1.25;  // of all; of what many ways are worth
    const auto n = std::ssize(all.devices);
    const auto worth = [](int64_t count) {
      return static_cast<double>(count) * std::log2(1 + std::ssize(divisors(count)));
    };
    int64_t best = n;
    for (int64_t count = n - 1; count >= kLeast * static_cast<double>(n); --count)
      if (worth(count) > kMore * worth(n) && worth(count) > worth(best)) best = count;
    std::vector<int32_t> slowest = all.devices;
    std::ranges::stable_sort(slowest, [&](int32_t a, int32_t b) {
      const auto rate = [&](int32_t d) { return devices_[static_cast<size_t>(d)].figures.f32_flops_per_second; };
      return std::pair(rate(a), b) < std::pair(rate(b), a);
    });
    Set out{fmt::format("{} of {} devices", best, n), {}};
    out.devices.assign(slowest.begin() + (n - best), slowest.end());
    std::ranges::sort(out.devices);
    return out;
  }

  void add_sorted(const Set& all, std::vector<Set>& out) const {
    std::map<int, double> room;  // of a node, and how fast it is where rooms are alike
    for (const DeviceSpec& d : devices_)
      room[d.node] =
          std::max(room[d.node], static_cast<double>(d.memory_bytes) + 1e-6 * d.figures.f32_flops_per_second);
    for (const bool rising : {false, true}) {
      Set sorted{rising ? "smallest memory first" : "largest memory first", all.devices, true};
      std::ranges::stable_sort(sorted.devices, [&](int32_t a, int32_t b) {
        const double mine = room.at(devices_[static_cast<size_t>(a)].node);
        const double other = room.at(devices_[static_cast<size_t>(b)].node);
        return rising ? mine < other : mine > other;
      });
      if (std::ranges::none_of(out, [&](const Set& s) { return s.devices == sorted.devices; }))
        out.push_back(std::move(sorted));
    }
  }

  // That divides the devices of every node.
  static int64_t node_size(const std::vector<DeviceSpec>& devices) {
    std::map<int, int64_t> sizes;
    for (const DeviceSpec& d : devices) ++sizes[d.node];
    int64_t common = 0;
    for (const auto& [node, size] : sizes) common = std::gcd(common, size);
    return common;
  }

  void shapes(const Set& set) {
    const auto n = static_cast<int64_t>(set.devices.size());
    const bool unlike = are_unlike(set.specs), ordered = set.ordered;
    constexpr int64_t kMostWays = 16, kMostStages = 64;
    for (const int64_t split : divisors(n)) {
      if (split > kMostWays) break;
      if (set.node % split != 0 && split != n && set.node != 1) continue;  // across nodes: all, or nodes of one device
      for (const int64_t stages : divisors(n / split)) {
        if (stages > kMostStages) break;
        const int64_t replicas = n / split / stages;
        if (replicas > std::max<int64_t>(1, batch_)) continue;
        if (stages == 1 && !ordered)
          for (const int64_t parts : {int64_t{0}, int64_t{4}, int64_t{16}, int64_t{64}})
            add(set, replicas, 1, split, parts, false);
        if (stages == 1 && split == 1 && replicas > 1 && !ordered) add_parts(set, replicas);
        if (stages > 1)
          for (const int64_t per : {int64_t{1}, int64_t{2}, int64_t{4}, int64_t{8}})
            for (const bool outside : {false, true})
              if (outside ? replicas > 1 && unlike : !ordered || replicas == 1)
                add(set, replicas, stages, split, stages * per, outside);
      }
    }
  }

  // A part of the model split among all replicas, or those of a node: each has some of its parameters, and computes
  // with them for the samples of all.
  void add_parts(const Set& set, int64_t replicas) {
    for (const ModelPart& part : parts_)
      for (const int64_t ways : {replicas, set.node}) {
        if (ways < 2 || replicas % ways != 0) continue;
        for (const int64_t parts : {int64_t{0}, int64_t{4}}) {
          if (parts > 0 && (batch_ / replicas < parts || batch_ % parts != 0)) continue;
          std::string split = fmt::format("split({})", ways);
          if (!part.factor.empty()) split.insert(split.size() - 1, ", factor=" + part.factor);
          if (ways < replicas) split.insert(0, fmt::format("replica({}) > ", replicas / ways));
          Shape shape{.candidate = {.strategy = fmt::format("replica({}); {}: {}", replicas, part.name, split),
                                    .options = options_,
                                    .accumulation = parts,
                                    .devices = set.devices,
                                    .of = set.name},
                      .replicas = true,
                      .cut = part.bytes,
                      .cut_ways = static_cast<double>(ways)};
          shape.rank = likely_seconds(set, shape, replicas, 1, 1, std::max<int64_t>(1, parts));
          shapes_.push_back(std::move(shape));
        }
        if (set.node == replicas) break;
      }
  }

  // By what is written in the model, which stays: what is left are devices, micro-batches and what saves memory.
  void annotated_shapes(const Set& set) {
    const bool pipeline =
        std::ranges::any_of(graph_.scopes, [](const Scope& s) { return s.kind == ScopeKind::kPipeline; });
    for (const int64_t parts : {int64_t{0}, int64_t{4}, int64_t{16}, int64_t{64}}) {
      if (parts > 0 && (pipeline || set.ordered || batch_ % parts != 0)) continue;
      Shape shape{.candidate = {.strategy = "",
                                .options = options_,
                                .accumulation = parts,
                                .devices = set.devices,
                                .of = set.name},
                  .replicas = true};
      shape.rank = kMachineOfCores.passes * flops_ / set.flops;
      shapes_.push_back(std::move(shape));
    }
  }

  // `outside`: the pipeline is around the replicas: stages of one type of devices.
  void add(const Set& set, int64_t replicas, int64_t stages, int64_t split, int64_t parts, bool outside) {
    if (parts > 0 && (batch_ / std::max<int64_t>(1, replicas) < parts || batch_ % parts != 0)) return;
    std::vector<std::string> scopes;
    const std::string pipeline = fmt::format("pipeline({}, micro_batches={})", stages, parts);
    if (stages > 1 && outside) scopes.push_back(pipeline);
    if (replicas > 1) scopes.push_back(fmt::format("replica({})", replicas));
    if (stages > 1 && !outside) scopes.push_back(pipeline);
    if (split > 1) scopes.push_back(fmt::format("split({})", split));
    if (scopes.empty()) scopes.emplace_back("replica(1)");
    Shape shape{.candidate = {.strategy = fmt::format("{}", fmt::join(scopes, " > ")),
                              .options = options_,
                              .accumulation = stages == 1 ? parts : 0,
                              .devices = set.devices,
                              .of = set.name},
                .stages = stages,
                .split = split,
                .replicas = replicas > 1,
                .rank = 0,
                .ways = static_cast<double>(split * stages)};
    shape.rank = likely_seconds(set, shape, replicas, stages, split, std::max<int64_t>(1, parts));
    shapes_.push_back(std::move(shape));
  }

  CompileOptions options_of(const Candidate& c) const {
    CompileOptions out = options_;
    static_cast<PlanOptions&>(out) = c.options;
    out.strategy = c.strategy;
    if (c.accumulation > 0) out.accumulation = c.accumulation;
    out.verify_passes = false, out.dump = {};
    return out;
  }

  // What a step of this shape takes, by counts alone: arithmetic with the bubble of its stages, all-reduces of products
  // that ways of a split add, of gradients, gathers of parameters that do not fit whole. For the order of looking.
  double likely_seconds(const Set& set, const Shape& shape, int64_t replicas, int64_t stages, int64_t split,
                        int64_t parts) const {
    const std::vector<DeviceSpec>& mine = set.specs;
    const CostModel& cost = *set.cost;
    const Saving* saving = &kSavings[0];
    while (saving != &kSavings[std::size(kSavings) - 1] && set.memory > 0 &&
           least_bytes(shape, *saving) > static_cast<double>(set.memory))
      ++saving;
    const auto ring = [](int64_t n) { return static_cast<double>(n - 1) / static_cast<double>(n); };
    const double bytes = cost.half ? 0.5 : 1;  // of what f32 takes
    double seconds = kMachineOfCores.passes * flops_ / set.flops;
    if (saving->recompute == Recompute::kFull) seconds *= 4.0 / 3;
    if (stages > 1) seconds *= 1 + static_cast<double>(stages - 1) / static_cast<double>(parts);
    constexpr double kReduced =
        4.0 / 9;  // of what products make, there and back: 4 of 9 widths of a transformer's layer
    const bool far = mine.back().node != 0;
    const LinkRates within = split > set.node && far ? cost.between(mine.front(), mine.back()) : cost.link;
    seconds += kReduced * 2 * ring(split) * bytes * products_ / static_cast<double>(replicas * stages) /
               within.bytes_per_second;
    const LinkRates outside = far ? cost.between(mine.front(), mine.back(), std::min(split, set.node)) : cost.link;
    const double gathered = saving->zero >= 3 ? 1 + static_cast<double>(parts) : 2;
    const auto reduced = static_cast<double>(replicas) / shape.cut_ways;
    const double sums = ring(replicas) * (parameters_ - shape.cut) / shape.ways +
                        (reduced > 1 ? (reduced - 1) / reduced * shape.cut / shape.cut_ways : 0);
    seconds += gathered * sums * (saving->zero >= 3 ? bytes : 1) / outside.bytes_per_second;
    if (saving->offload != 0) {  // state there and back; parameters come for each pass of a micro-batch
      const double held = (parameters_ - shape.cut) / shape.ways + shape.cut / shape.cut_ways;
      const bool all = (saving->offload & kOffloadParameters) != 0;
      const double moved = 2 * states_ + (all ? 2 * static_cast<double>(parts) : 0);
      seconds += moved * held / (saving->zero >= 3 ? static_cast<double>(replicas) : 1) /
                 cost.host_of(mine[0]).bytes_per_second;
    }
    return seconds;
  }

  // A lower bound of what a device holds: parameters and state alone.
  double least_bytes(const Shape& shape, const Saving& saving) const {
    if ((saving.offload & kOffloadParameters) != 0) return 0;
    const auto held = [&](double bytes, double replicas) {
      const double state = saving.offload != 0 ? 0 : states_ * (saving.zero >= 1 ? 1 / replicas : 1);
      return bytes * (state + (saving.zero >= 3 ? 1 / replicas : 1));
    };
    const auto n = static_cast<double>(shape.candidate.devices.size());
    return held((parameters_ - shape.cut) / shape.ways, n / shape.ways) +
           held(shape.cut / shape.cut_ways, n / shape.cut_ways);
  }

  // Savings take time: none is looked for where a step would take longer than `seconds` without.
  std::optional<Judged> first_that_fits(const Shape& shape, double seconds) {
    std::optional<Judged> best;  // that lacks least
    const std::vector<DeviceSpec> mine = of(devices_, shape.candidate.devices);
    int64_t memory = 0;
    for (const DeviceSpec& d : mine) memory = std::max(memory, d.memory_bytes);
    const Saving* before = nullptr;
    for (const Saving& saving : kSavings) {
      Watch::look();
      if (!shape.replicas && saving.zero > 0 && saving.zero < 3) continue;
      Judged judged{.candidate = shape.candidate, .lost = {}};
      PlanOptions& options = judged.candidate.options;
      options.zero = std::max(options.zero, shape.replicas ? saving.zero : 0);
      options.recompute = std::max(options.recompute, saving.recompute);
      options.offload |= saving.offload;
      const bool dearer = &saving != &kSavings[0];
      if (dearer && before != nullptr && same(options, *before, shape)) continue;
      before = &saving;
      const double least = least_bytes(shape, saving);
      const bool last = &saving == &kSavings[std::size(kSavings) - 1];
      if (memory > 0 && least > static_cast<double>(memory) && !last) {
        if (!best || static_cast<int64_t>(least) - memory < best->missing) {
          judged.bytes = static_cast<int64_t>(least), judged.missing = judged.bytes - memory;
          judged.at_least = true;
          best = judged;
        }
        continue;
      }
      try {
        judge(judged, mine);
      } catch (const Stopped&) {
        throw;
      } catch (const Error& e) {
        judged.lost = e.message();
        return judged;
      }
      if (judged.missing == 0) return judged;
      if (!best || judged.missing < best->missing) best = judged;
      if (judged.seconds > seconds) break;
    }
    return best;
  }

  bool same(const PlanOptions& options, const Saving& before, const Shape& shape) const {
    return options.zero == std::max(options_.zero, shape.replicas ? before.zero : 0) &&
           options.recompute == std::max(options_.recompute, before.recompute) &&
           options.offload == (options_.offload | before.offload);
  }

  void judge(Judged& j, const std::vector<DeviceSpec>& mine) const {
    CompileOptions options = options_of(j.candidate);
    Estimate estimate = estimate_at(graph_, mine, options, options.memory_price);
    if (missing_bytes(estimate, mine) > 0 && are_unlike(mine)) {
      options = with_rooms(graph_, mine, options);
      estimate = estimate_at(graph_, mine, options, options.memory_price);
    }
    j.seconds = estimate.seconds;
    j.missing = missing_bytes(estimate, mine);
    for (const Estimate::Class& c : estimate.classes) j.bytes = std::max(j.bytes, c.memory.device.total());
    price(j, mine);
  }

  static void price(Judged& j, const std::vector<DeviceSpec>& mine) {
    constexpr double kHour = 3600;
    double an_hour = 0;
    for (const DeviceSpec& d : mine) an_hour += d.figures.price_per_hour;
    j.price = an_hour / kHour * j.seconds;
  }

  bool too_slow(const Judged& j) const { return static_cast<double>(batch_) < asked_.least_throughput * j.seconds; }
  bool allowed(const Judged& j) const {
    return j.seconds > 0 && j.missing == 0 && j.lost.empty() && j.price <= asked_.most_price && !too_slow(j);
  }

  double worth(const Judged& j) const { return asked_.objective == Objective::kPrice ? j.price : j.seconds; }

  void rank(Found& found) const {
    const auto key = [&](const Judged& j) {
      const bool cheap = asked_.objective == Objective::kPrice;
      return std::tuple(!allowed(j), !(j.seconds > 0 && j.missing == 0), j.missing, cheap ? j.price : j.seconds,
                        cheap ? j.seconds : j.price);
    };
    std::ranges::stable_sort(found.list, [&](const Judged& a, const Judged& b) { return key(a) < key(b); });
  }

  // Of the best pipeline: its other schedules, of which those that keep more alive may not fit.
  void try_schedules(Found& found) {
    constexpr const char* kOthers[] = {"interleaved", "zb_h1", "zb_v"};
    constexpr std::string_view kLast = "micro_batches=";
    std::vector<Judged> more;
    for (const Judged& j : found.list) {
      const size_t at = j.candidate.strategy.find(kLast);
      if (!allowed(j)) break;
      if (at == std::string::npos) continue;
      for (const char* schedule : kOthers) {
        if (elapsed() > kLooked * asked_.seconds) break;
        Judged other{.candidate = j.candidate, .lost = {}};
        std::string& text = other.candidate.strategy;
        text.insert(text.find(')', at), fmt::format(", schedule={}", schedule));
        try {
          judge(other, of(devices_, j.candidate.devices));
        } catch (const Stopped&) {
          throw;
        } catch (const Error& e) {
          other.lost = e.message();
        }
        more.push_back(std::move(other));
      }
      break;
    }
    std::ranges::move(more, std::back_inserter(found.list));
    rank(found);
  }

  // Estimates of pipelines have messages for nothing: the best are walked, until none that is left can be better were
  // its estimate as far off as any; what is too long for it is taken to be as much slower as those were.
  void simulate_best(Found& found) const {
    constexpr size_t kMostSteps = 2'000'000;
    double estimated = 0, walked = 0, off = 1, best = std::numeric_limits<double>::infinity();
    size_t walks = 0;
    for (Judged& j : found.list) {
      if (!allowed(j)) break;
      if (++walks > asked_.simulated && (elapsed() > asked_.seconds || worth(j) * off > best)) break;
      const std::vector<DeviceSpec> mine = of(devices_, j.candidate.devices);
      try {
        const Plan plan = compile(graph_, mine, options_of(j.candidate));
        const auto times = times_of(plan, plan.entries[0], kMostSteps);
        if (!times) continue;
        estimated += j.seconds, walked += times->seconds, off = std::min(off, times->seconds / j.seconds);
        j.seconds = times->seconds, j.simulated = true, price(j, mine);
        best = std::min(best, worth(j));
      } catch (const Error& e) {
        j.lost = e.message(), j.seconds = 0;
      }
    }
    if (walked > estimated)
      for (Judged& j : found.list)
        if (!j.simulated && j.seconds > 0) j.seconds *= walked / estimated, price(j, of(devices_, j.candidate.devices));
    rank(found);
  }

  void say_why(Found& found) const {
    const Judged* winner = found.list.empty() || !allowed(found.list[0]) ? nullptr : &found.list[0];
    for (Judged& j : found.list) {
      if (&j == winner || !j.lost.empty()) continue;
      if (j.missing > 0)
        j.lost = fmt::format("does not fit: {}{} are missing", j.at_least ? "at least " : "",
                             bytes_text(static_cast<double>(j.missing)));
      else if (j.price > asked_.most_price)
        j.lost = fmt::format("over the budget: {:.4g} a step", j.price);
      else if (too_slow(j))
        j.lost = "below the throughput that was asked for";
      else if (winner != nullptr && asked_.objective == Objective::kPrice && winner->price > 0)
        j.lost = fmt::format("{:.2f} times the price", j.price / winner->price);
      else if (winner != nullptr && winner->seconds > 0)
        j.lost = fmt::format("{:.2f} times as slow", j.seconds / winner->seconds);
      else
        j.lost = "no faster";
    }
  }

  const Graph& graph_;
  const std::vector<DeviceSpec>& devices_;
  const CompileOptions& options_;
  const SearchOptions& asked_;
  double began_;
  int64_t batch_ = 0;
  double parameters_ = 0;            // bytes
  double states_ = 0;                // of optimizers, for each byte of a parameter
  double flops_ = 0, products_ = 0;  // of a forward pass; bytes that its products make
  std::vector<Set> sets_;
  std::vector<ModelPart> parts_;
  std::vector<Shape> shapes_;
};

std::string options_text(const Judged& j) {
  std::vector<std::string> out;
  const PlanOptions& o = j.candidate.options;
  if (j.candidate.accumulation > 0) out.push_back(fmt::format("accumulation {}", j.candidate.accumulation));
  if (o.zero > 0) out.push_back(fmt::format("zero {}", o.zero));
  if (o.recompute != Recompute::kNone)
    out.emplace_back(o.recompute == Recompute::kFull ? "recompute full" : "recompute selective");
  if (o.offload != 0) out.emplace_back(o.offload == kOffloadState ? "offload state" : "offload all");
  return fmt::format("{}", fmt::join(out, ", "));
}

std::string whole_text(const Judged& j) {
  std::string out = j.candidate.strategy.empty() ? "as it is annotated" : j.candidate.strategy;
  if (const std::string options = options_text(j); !options.empty()) out += ", " + options;
  if (!j.candidate.of.empty()) out += " (" + j.candidate.of + ")";
  return out;
}

}  // namespace

Found search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  return stoppable([&] { return Search(graph, devices, options).run(); });
}

Plan compile_automatic(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  const Found found = search(graph, devices, options);
  if (!found.fits()) {
    if (found.list.empty())
      throw invalid("strategy auto: no strategy cuts this model for {} device(s)", devices.size());
    const Judged& near = found.list.front();
    throw error(Code::kResourceExhausted, "strategy auto: none of {} strategies will do; nearest is {}: {}",
                found.list.size(), whole_text(near), near.lost);
  }
  const Candidate& best = found.winner().candidate;
  CompileOptions with = options;
  static_cast<PlanOptions&>(with) = best.options;
  with.strategy = best.strategy;
  if (best.accumulation > 0) with.accumulation = best.accumulation;
  Plan plan = compile(graph, of(devices, best.devices), with);
  std::vector<std::string> notes{fmt::format("Strategy auto chose {} of {}: {} a step.", whole_text(found.winner()),
                                             found.list.size() + found.not_tried,
                                             seconds_text(found.winner().seconds))};
  constexpr size_t kShown = 4;
  for (size_t k = 1; k < found.list.size() && k <= kShown; ++k)
    notes.push_back(fmt::format("Instead: {}: {}.", whole_text(found.list[k]), brief(found.list[k].lost, 160)));
  if (best.devices.size() < devices.size())
    for (size_t k = 1; k < found.list.size(); ++k)
      if (const Judged& all = found.list[k]; all.candidate.devices.size() == devices.size()) {
        notes.push_back(fmt::format("{} device(s) stay idle: with all of them the best ({}) is {}.",
                                    devices.size() - best.devices.size(), all.candidate.strategy,
                                    brief(all.lost, 160)));
        break;
      }
  plan.notes.insert(plan.notes.begin(), notes.begin(), notes.end());
  return plan;
}

std::string found_text(const Found& found, const std::vector<DeviceSpec>& devices) {
  std::string out = fmt::format("{:>10}{:>10}{:>10}  {}\n", "a step", "memory", "price", "strategy");
  constexpr size_t kRows = 12, kWide = 110;
  for (size_t k = 0; k < found.list.size() && k < kRows; ++k) {
    const Judged& j = found.list[k];
    out += fmt::format("{:>10}{:>10}{:>10}  {}{}\n", j.seconds > 0 ? seconds_text(j.seconds) : "-",
                       j.bytes > 0 ? bytes_text(static_cast<double>(j.bytes)) : "-",
                       j.price > 0 ? fmt::format("{:.3g}", j.price) : "-", brief(whole_text(j), kWide),
                       j.simulated ? "" : " *");
    if (!j.lost.empty()) out += fmt::format("{:32}{}\n", "", brief(j.lost, kWide));
  }
  out += "* estimated; the others are timed by the simulator\n";
  if (found.list.size() > kRows) out += fmt::format("and {} more\n", found.list.size() - kRows);
  if (found.not_tried > 0)
    out += fmt::format("{} were not tried: by counts many times as slow, or there was no time\n", found.not_tried);
  if (found.fits() && found.winner().candidate.devices.size() < devices.size())
    out += fmt::format("{} of {} devices stay idle\n", devices.size() - found.winner().candidate.devices.size(),
                       devices.size());
  return out;
}

namespace {
Json json_of(const Judged& j, const std::vector<DeviceSpec>& devices) {
  constexpr const char* kPolicies[] = {"none", "selective", "full"};
  const PlanOptions& o = j.candidate.options;
  return {{"strategy", j.candidate.strategy},
          {"options", options_text(j)},
          {"accumulation", j.candidate.accumulation},
          {"zero", o.zero},
          {"recompute", kPolicies[static_cast<size_t>(o.recompute)]},
          {"offload", o.offload == 0               ? ""
                      : o.offload == kOffloadState ? "state"
                                                   : "state,gradients,parameters,activations"},
          {"devices", j.candidate.devices},
          {"all_devices", j.candidate.devices.size() == devices.size() && std::ranges::is_sorted(j.candidate.devices)},
          {"devices_text", to_string(of(devices, j.candidate.devices))},
          {"seconds", json_value(j.seconds)},
          {"simulated", j.simulated},
          {"bytes", j.bytes},
          {"missing_bytes", j.missing},
          {"price", json_value(j.price)},
          {"lost", j.lost}};
}
}  // namespace

Json found_json(const Found& found, const std::vector<DeviceSpec>& devices) {
  Json rows = Json::array(), front = Json::array();
  for (const Judged& j : found.list) rows.push_back(json_of(j, devices));
  for (const Judged& j : pareto_front(found)) front.push_back(json_of(j, devices));
  return {{"batch", found.batch},
          {"fits", found.fits()},
          {"candidates", rows},
          {"not_tried", found.not_tried},
          {"pareto", front}};
}

std::vector<Judged> pareto_front(const Found& found) {
  std::vector<Judged> out;
  for (const Judged& j : found.list)
    if (j.seconds > 0 && j.missing == 0) out.push_back(j);
  std::ranges::stable_sort(out, [](const Judged& a, const Judged& b) {
    return std::pair(a.price, a.seconds) < std::pair(b.price, b.seconds);
  });
  double fastest = std::numeric_limits<double>::infinity();
  std::erase_if(out, [&](const Judged& j) {
    if (j.seconds >= fastest) return true;
    fastest = j.seconds;
    return false;
  });
  return out;
}

Json predict(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             const std::vector<int64_t>& counts, const std::vector<int64_t>& batches) {
  Json rows = Json::array();
  for (const int64_t batch : batches.empty() ? std::vector<int64_t>{batch_of(graph)} : batches) {
    const Graph sized = batch == batch_of(graph) ? graph : rebatch(graph, batch);
    for (const int64_t count : counts) {
      if (count < 1 || count > std::ssize(devices))
        throw invalid("{} device(s) are asked for, the cluster has {}", count, devices.size());
      const std::vector<DeviceSpec> first(devices.begin(), devices.begin() + count);
      Json row{{"devices", count}, {"batch", batch}};
      const Found found = search(sized, first, options);
      if (found.fits()) {
        const Judged& best = found.winner();
        row.update(json_of(best, first));
        row["devices"] = count;
        row["samples_per_second"] = json_value(static_cast<double>(batch) / best.seconds);
        row.erase("lost"), row.erase("missing_bytes");
      } else {
        row["error"] = found.list.empty() ? "no strategy cuts this model so" : found.list.front().lost;
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace whale
