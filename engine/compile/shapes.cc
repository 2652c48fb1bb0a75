#include "compile/shapes.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/text.h"
#include "compile/checks.h"
#include "cost/cost.h"
#include "grad/passes.h"
#include "ops/cost.h"
#include "ops/op.h"
#include "task/strategy.h"

namespace whale {
namespace {

class Shapes {
 public:
  Shapes(const Graph& graph, const ModelCounts& counts, const CompileOptions& options)
      : graph_(graph), counts_(counts), options_(options), parts_(parts_worth_a_clause(graph)) {}

  std::vector<Shape> run(const std::vector<DeviceSet>& sets) {
    const bool annotated = is_annotated(graph_);
    for (const DeviceSet& set : sets) annotated ? add_written(set) : add_shapes(set);
    return std::move(out_);
  }

 private:
  void add_shapes(const DeviceSet& set) {
    const auto n = static_cast<int64_t>(set.devices.size());
    const bool unlike = set.unlike, ordered = set.ordered;
    constexpr int64_t kMostWays = 16, kMostStages = 64;
    for (const int64_t split : divisors(n)) {
      if (split > kMostWays) break;
      if (set.node % split != 0 && split != n && set.node != 1) continue;  // across nodes: all, or nodes of one device
      for (const int64_t stages : divisors(n / split)) {
        if (stages > kMostStages) break;
        const int64_t replicas = n / split / stages;
        if (replicas > std::max<int64_t>(1, counts_.batch)) continue;
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
  void add_parts(const DeviceSet& set, int64_t replicas) {
    for (const ModelPart& part : parts_)
      for (const int64_t ways : {replicas, set.node}) {
        if (ways < 2 || replicas % ways != 0) continue;
        for (const int64_t parts : {int64_t{0}, int64_t{4}}) {
          if (parts > 0 && (counts_.batch / replicas < parts || counts_.batch % parts != 0)) continue;
          std::string split = fmt::format("split({})", ways);
          if (!part.factor.empty()) split.insert(split.size() - 1, ", factor=" + part.factor);
          if (ways < replicas) split.insert(0, fmt::format("replica({}) > ", replicas / ways));
          Shape shape{.candidate = {.strategy = fmt::format("replica({}); {}: {}", replicas, part.name, split),
                                    .options = options_,
                                    .accumulation = parts,
                                    .devices = set.devices,
                                    .of = set.name},
                      .set = &set,
                      .replicas = replicas,
                      .parts = std::max<int64_t>(1, parts),
                      .cut = part.bytes,
                      .cut_ways = static_cast<double>(ways)};
          rank(std::move(shape));
        }
        if (set.node == replicas) break;
      }
  }

  // By what is written in the model, which stays: what is left are devices, micro-batches and what saves memory.
  void add_written(const DeviceSet& set) {
    const bool pipeline =
        std::ranges::any_of(graph_.scopes, [](const Scope& s) { return s.kind == ScopeKind::kPipeline; });
    if (set.ordered && !pipeline) return;
    for (const int64_t parts : {int64_t{0}, int64_t{4}, int64_t{16}, int64_t{64}}) {
      if (parts > 0 && (pipeline || set.ordered || counts_.batch % parts != 0)) continue;
      Shape shape{.candidate = {.strategy = "",
                                .options = options_,
                                .accumulation = parts,
                                .devices = set.devices,
                                .of = set.name},
                  .set = &set,
                  .replicas = std::max<int64_t>(2, std::ssize(set.devices)),  // as many as may be
                  .parts = std::max<int64_t>(1, parts)};
      shape.rank = kMachineOfCores.passes * counts_.flops / set.flops;
      out_.push_back(std::move(shape));
    }
  }

  // `outside`: the pipeline is around the replicas: stages of one type of devices.
  void add(const DeviceSet& set, int64_t replicas, int64_t stages, int64_t split, int64_t parts, bool outside) {
    if (parts > 0 && (counts_.batch / std::max<int64_t>(1, replicas) < parts || counts_.batch % parts != 0)) return;
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
                .set = &set,
                .replicas = replicas,
                .stages = stages,
                .split = split,
                .parts = std::max<int64_t>(1, parts),
                .outside = outside,
                .ways = static_cast<double>(split * stages)};
    rank(std::move(shape));
  }

  void rank(Shape shape) {
    shape.rank = likely_seconds(shape);
    out_.push_back(std::move(shape));
  }

  // What a step of this shape takes, by counts alone, with the savings that take least of those that may fit.
  double likely_seconds(const Shape& shape) const {
    const auto memory = static_cast<double>(shape.set->memory);
    double least = std::numeric_limits<double>::infinity();
    for (const Saving& saving : kSavings) {
      const PlanOptions options = saved({}, saving, true);
      const bool last = &saving == std::end(kSavings) - 1;
      if (memory == 0 || least_bytes(counts_, shape, options) <= memory || (last && std::isinf(least)))
        least = std::min(least, likely_seconds(shape, options));
    }
    return least;
  }
  // Arithmetic with the bubble of its stages, all-reduces of products that ways of a split add, of gradients, gathers
  // of parameters that do not fit whole.
  double likely_seconds(const Shape& shape, const PlanOptions& saving) const {
    const DeviceSet& set = *shape.set;
    const std::vector<DeviceSpec>& mine = set.specs;
    const CostModel& cost = *set.cost;
    const auto parts = static_cast<double>(shape.parts);
    const auto ring = [](int64_t n) { return static_cast<double>(n - 1) / static_cast<double>(n); };
    const double bytes = cost.half ? 0.5 : 1;  // of what f32 takes
    double seconds = kMachineOfCores.passes * counts_.flops / set.flops;
    if (saving.recompute == Recompute::kFull) seconds *= 4.0 / 3;
    seconds *= 1 + static_cast<double>(shape.stages - 1) / parts;
    constexpr double kReduced =
        4.0 / 9;  // of what products make, there and back: 4 of 9 widths of a transformer's layer
    const bool far = mine.back().node != 0;
    const LinkRates within = shape.split > set.node && far ? cost.between(mine.front(), mine.back()) : cost.link;
    seconds += kReduced * 2 * ring(shape.split) * bytes * counts_.products /
               static_cast<double>(shape.replicas * shape.stages) / within.bytes_per_second;
    const LinkRates outside =
        far ? cost.between(mine.front(), mine.back(), std::min(shape.split, set.node)) : cost.link;
    const double gathered = saving.zero >= 3 ? 1 + parts : 2;
    const auto reduced = static_cast<double>(shape.replicas) / shape.cut_ways;
    const double sums = ring(shape.replicas) * (counts_.parameters - shape.cut) / shape.ways +
                        (reduced > 1 ? (reduced - 1) / reduced * shape.cut / shape.cut_ways : 0);
    seconds += gathered * sums * (saving.zero >= 3 ? bytes : 1) / outside.bytes_per_second;
    if (saving.offload != 0) {  // state there and back; parameters come for each pass of a micro-batch
      const double held = (counts_.parameters - shape.cut) / shape.ways + shape.cut / shape.cut_ways;
      const bool all = (saving.offload & kOffloadParameters) != 0;
      const double moved = 2 * counts_.states + (all ? 2 * parts : 0);
      seconds += moved * held / (saving.zero >= 3 ? static_cast<double>(shape.replicas) : 1) /
                 cost.host_of(mine[0]).bytes_per_second;
    }
    return seconds;
  }

  const Graph& graph_;
  const ModelCounts& counts_;
  const CompileOptions& options_;
  std::vector<ModelPart> parts_;
  std::vector<Shape> out_;
};

}  // namespace

ModelCounts::ModelCounts(const Graph& graph)
    : batch(batch_of(graph)), states(trains(graph) ? states_of(graph.training.optimizer) : 0) {
  for (const Op& op : graph.ops) {
    flops += cost_of(graph, op).flops;
    if (has_flag(op.code, kProduct))
      for (const TensorId t : op.outputs)
        if (t != kNone) products += static_cast<double>(element_count(graph.tensor(t).dims) * size_of(DType::kF32));
  }
  for (const Variable& v : graph.variables)
    if (v.role == Role::kParameter) {
      const Tensor& t = graph.tensor(v.tensor);
      parameters += static_cast<double>(element_count(t.dims) * size_of(t.dtype));
    }
}

std::vector<Shape> shapes_of(const Graph& graph, const ModelCounts& counts, const std::vector<DeviceSet>& sets,
                             const CompileOptions& options) {
  return Shapes(graph, counts, options).run(sets);
}

Present::Present(const std::string& strategy, int64_t devices) {
  for (const StrategyClause& clause : parse_clauses(strategy)) {
    double needs = 1;
    for (const Scope& scope : clause.nest)
      if (scope.nests.empty()) needs *= static_cast<double>(std::max<int64_t>(1, scope.count));
    if (needs > 2 * static_cast<double>(devices))
      throw invalid(
          "the present strategy '{}' needs {} devices, and there are {}, less than half of them: nothing near it is "
          "left; "
          "give the one that the model has now, or leave `present` out",
          brief(strategy), needs, devices);
    if (clause.name.empty())
      for (const Scope& scope : clause.nest) {
        if (scope.kind == ScopeKind::kPipeline) stages_ = std::max<int64_t>(1, scope.count);
        if (scope.kind == ScopeKind::kSplit) split_ = std::max<int64_t>(1, scope.count);
      }
  }
}

bool Present::is_near(const Shape& shape) const {
  const auto near = [](int64_t a, int64_t b) { return a <= 2 * b && b <= 2 * a; };
  return near(shape.stages, stages_) && near(shape.split, split_);
}

double least_bytes(const ModelCounts& counts, const Shape& shape, const PlanOptions& options) {
  if ((options.offload & kOffloadParameters) != 0) return 0;
  // Of a parameter's bytes, sums over micro-batches.
  const double gradients = (options.offload & kOffloadGradients) != 0           ? 0
                           : options.gradient_dtype || options.accumulate_dtype ? 0.5
                                                                                : 1;
  const auto held = [&](double bytes, double replicas) {
    const double state =
        (options.offload & kOffloadState) != 0 ? 0 : counts.states * (options.zero >= 1 ? 1 / replicas : 1);
    const double sums = shape.parts > 1 && counts.states > 0 ? gradients * (options.zero >= 2 ? 1 / replicas : 1) : 0;
    return bytes * (state + sums + (options.zero >= 3 ? 1 / replicas : 1));
  };
  const auto n = static_cast<double>(shape.candidate.devices.size());
  return held((counts.parameters - shape.cut) / shape.ways, n / shape.ways) +
         held(shape.cut / shape.cut_ways, n / shape.cut_ways);
}

}  // namespace whale
