#include "compile/estimate.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include "base/heap.h"
#include "base/watch.h"
#include "cluster/device_kinds.h"
#include "compile/attempted.h"
#include "compile/checks.h"
#include "compile/faster_pipeline.h"
#include "compile/passes.h"
#include "compile/prepare.h"
#include "lower/storage.h"
#include "ops/cost.h"
#include "schedule/schedule.h"
#include "task/condense.h"

namespace whale {
namespace {

// Where what is asked for is the same in all layers.
std::optional<Condensed> condensed_form(const Scoped& scoped, const CompileOptions& options, size_t more,
                                        const std::vector<int32_t>& kinds) {
  const bool waits =
      scoped.tasks.stages() > 1 && scoped.graph.training.accumulation == 1;  // whole stages for each other
  const bool late = !scoped.tasks.schedule.empty() && schedule_rule(scoped.tasks.schedule).split_backward;
  if (waits || late || !scoped.tasks.replicas.empty() || options.prefetch || options.exact || options.adasum ||
      options.offload || !options.fetch.empty() || !options.stage_recompute.empty())
    return std::nullopt;
  constexpr double kBuckets = 2;  // that the gradients of a layer fill
  return condense(scoped.graph, scoped.tasks, kBuckets * static_cast<double>(bucket_bytes(scoped.tasks.cost, options)),
                  more, kinds);
}

// A model's first entry, or that of its condensed form, as far as estimates need it.
struct Lowered {
  ShardedGraph lg;
  Plan plan;
};
Lowered lowered(Scoped scoped, Detail detail, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                double memory_price, const std::vector<DeviceSpec>& few = {}) {
  const Passes passes{options, scoped.tasks, gradients_of(options), false};
  const char* name = trains(scoped.graph) ? "train" : "eval";
  Plan plan = outline(scoped, devices, options, memory_price);
  ShardedGraph lg =
      passes.on_shardings(passes.on_graph(std::move(scoped.graph), name), name, plan.micro_batches, nullptr);
  plan.variables = variables_of(lg);
  plan.entries.push_back(passes.make_entry(lg, {}, name, plan.variables, nullptr, detail));
  if (detail == Detail::kFiguresOfFew) {
    plan.devices = few;
    plan.devices.resize(plan.entries[0].rows.size(), devices[0]);
  }
  return {std::move(lg), std::move(plan)};
}

// Those of the stages that the condensed form's are like, in its numbers.
std::vector<DeviceSpec> devices_of(const Condensed& form, const TaskGraphs& tasks,
                                   const std::vector<DeviceSpec>& devices) {
  std::vector<DeviceSpec> out;
  for (size_t v = 0; v < form.stage_like.size(); ++v) {
    const std::vector<int32_t>& few = form.tasks.mesh(form.stage_like[v]).devices;
    const std::vector<int32_t>& all = tasks.mesh(static_cast<int32_t>(v)).devices;
    for (size_t k = 0; k < few.size(); ++k) {
      if (few[k] < 0) continue;
      const auto at = static_cast<size_t>(few[k]);
      if (at >= out.size()) out.resize(at + 1, devices[0]);
      out[at] = devices[all[k]];
    }
  }
  return out;
}

// A condensed form and its plan.
struct Few {
  Condensed form;
  Lowered plan;
  Estimate estimate;  // of the model
};

void place_arenas(Plan& plan) {
  MemoryPlanner planner;
  for (Program& program : plan.entries[0].programs) place_arenas(program, planner);
}

// Whether `few` layers say of all what `more` of them say, and of these what they are.
bool tell_all(const Few& few, Few& more) {
  int64_t layers = 1, least = INT64_MAX;
  for (const auto& of_stage : more.form.layers)
    for (const int64_t n : of_stage) layers = std::max(layers, n);
  for (const Estimate::Class& c : more.estimate.classes) least = std::min(least, c.memory.device.total());
  const auto same = [&](const Estimate& a, const Estimate& b) { return agree(a, b, layers, least); };
  if (!same(few.estimate, more.estimate)) return false;
  place_arenas(more.plan.plan);
  return same(estimate_of(one_layer_less(few.form, more.form), more.form.tasks, few.plan.lg, few.plan.plan),
              estimate_of(more.plan.lg, more.plan.plan));
}

// Few layers say what all do where one more says the same of them, and is itself what they say of it; else none.
std::optional<Estimate> condensed_estimate(const Scoped& scoped, const std::vector<DeviceSpec>& devices,
                                           const CompileOptions& options, double memory_price, Care care) {
  const TaskGraphs& tasks = scoped.tasks;
  const std::vector<int32_t> kinds = kinds_of(devices);
  const auto with_more = [&](size_t more) -> std::optional<Few> {
    std::optional<Condensed> form = condensed_form(scoped, options, more, kinds);
    if (!form) return std::nullopt;
    Lowered plan = lowered({form->graph, form->tasks}, Detail::kFiguresOfFew, devices, options, memory_price,
                           devices_of(*form, tasks, devices));
    Estimate estimate = estimate_of(*form, tasks, plan.lg, plan.plan);
    return Few{std::move(*form), std::move(plan), std::move(estimate)};
  };
  if (care == Care::kQuick) {
    std::optional<Few> few = with_more(0);
    return few ? std::optional(std::move(few->estimate)) : std::nullopt;
  }
  // Where a stage begins with a whole layer, that one may be unlike the others: then they say so from one more on.
  const bool stages = tasks.stages() > 1;
  std::optional<Few> middle = with_more(1);
  if (!middle) return std::nullopt;
  for (const size_t other : {stages ? 2 : 0, stages ? 0 : 2}) {
    std::optional<Few> next = with_more(other);
    if (!next || next->form.tasks.stages() != middle->form.tasks.stages()) continue;
    Few &few = other == 0 ? *next : *middle, &more = other == 0 ? *middle : *next;
    if (tell_all(few, more)) return std::move(more.estimate);
  }
  return std::nullopt;
}

Estimate estimate_prepared(Scoped scoped, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                           double memory_price, Care care) {
  if (std::optional<Estimate> few = condensed_estimate(scoped, devices, options, memory_price, care))
    return std::move(*few);
  Lowered all = lowered(std::move(scoped), Detail::kFigures, devices, options, memory_price);
  place_arenas(all.plan);
  return estimate_of(all.lg, all.plan);
}

// Whether messages between stages may take a part of a pass that is worth a thought, by counts: of what ops make for
// other stages, and arithmetic.
bool links_may_be_slow(const Scoped& scoped, const std::vector<DeviceSpec>& devices) {
  constexpr double kPart = 0.005;
  const TaskGraphs& tasks = scoped.tasks;
  const Graph& graph = scoped.graph;
  std::vector<double> flops(tasks.stages()), bytes(tasks.stages());
  std::set<std::pair<TensorId, int32_t>> seen;
  for (const Op& op : graph.ops) {
    flops[op.stage] += cost_of(graph, op).flops;
    for (const TensorId id : op.inputs) {
      const OpId made = id == kNone ? kNone : graph.tensor(id).producer;
      if (made == kNone || graph.op(made).stage == op.stage || !seen.insert({id, op.stage}).second) continue;
      bytes[graph.op(made).stage] +=
          static_cast<double>(element_count(graph.tensor(id).dims) * size_of(graph.tensor(id).dtype));
    }
  }
  const auto present = [&](int32_t stage) {
    std::vector<DeviceSpec> out;
    for (const int32_t d : tasks.mesh(stage).devices)
      if (d >= 0) out.push_back(devices[d]);
    return out;
  };
  for (int32_t s = 0; s + 1 < static_cast<int32_t>(tasks.stages()); ++s) {
    const std::vector<DeviceSpec> from = present(s), to = present(s + 1);
    double rate = 0;
    for (const DeviceSpec& d : from) rate += tasks.cost.rates_of(d).flops_per_second;
    const auto beside = std::ranges::count(from, from[0].node, &DeviceSpec::node);
    const auto each =
        bytes[s] / static_cast<double>(from.size() * static_cast<size_t>(scoped.graph.training.accumulation));
    const double work = flops[s] / rate / static_cast<double>(scoped.graph.training.accumulation);
    if (link_seconds(each, 1, tasks.cost.between(from[0], to[0], beside)) > kPart * work) return true;
  }
  return false;
}

// The estimate of the faster pipeline that a plan would be, where there may be one.
std::optional<Estimate> of_faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                           const CompileOptions& options, double memory_price) {
  if (!knows_devices(devices, options.profile)) return std::nullopt;
  const Scoped scoped = prepare(graph, devices, options, memory_price);
  if (scoped.tasks.stages() < 2 || scoped.graph.training.accumulation < 2) return std::nullopt;
  if (!links_may_be_slow(scoped, devices) &&
      !is_cut_otherwise(graph, devices, options, memory_price, scoped.tasks.stage_begins))
    return std::nullopt;
  const MakePlan step = [&](const Graph& g, const CompileOptions& with) {
    return plan_of_step(g, devices, with, memory_price);
  };
  const std::optional<Faster> faster = faster_pipeline(graph, devices, options, step(graph, options), step);
  if (!faster) return std::nullopt;
  Estimate out = estimate_at(faster->made_of.graph, devices, faster->made_of.options, memory_price);
  return missing_bytes(out, devices) == 0 ? std::optional(std::move(out)) : std::nullopt;
}

}  // namespace

double price_of(const CompileOptions& options, int attempt) { return std::ldexp(options.memory_price, 2 * attempt); }

double last_price(const CompileOptions& options) { return std::ldexp(options.memory_price, 10); }

bool is_hopeless(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price) {
  constexpr double kFar = 1.1;  // of what there is: more than a few layers are wrong by
  const Scoped scoped = prepare(graph, devices, options, memory_price, Care::kQuick);
  const std::optional<Estimate> few = condensed_estimate(scoped, devices, options, memory_price, Care::kQuick);
  if (!few) return false;
  for (const Estimate::Class& c : few->classes)
    for (const int32_t d : c.devices) {
      const int64_t has = devices[d].memory_bytes;
      if (has > 0 && static_cast<double>(c.memory.device.total()) > kFar * static_cast<double>(has)) return true;
    }
  return false;
}

Estimate estimate_at(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double memory_price, Care care) {
  return estimate_prepared(prepare(graph, devices, options, memory_price, care), devices, options, memory_price, care);
}

Plan plan_of_step(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                  double memory_price) {
  return lowered(prepare(graph, devices, options, memory_price), Detail::kWhole, devices, options, memory_price).plan;
}

Fitted fitted(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options, double memory_price,
              Rooms rooms, Care care) {
  constexpr int kTries = 6;
  const auto next = [&] {
    Scoped scoped = prepare(graph, devices, options, memory_price, care);
    TaskGraphs tasks = scoped.tasks;
    return std::pair(estimate_prepared(std::move(scoped), devices, options, memory_price, care), std::move(tasks));
  };
  Fitted best;
  for (int k = 0; k < kTries; ++k) {
    auto one = k == 0 ? std::optional(next()) : attempted(next);
    if (!one) break;
    auto& [estimate, tasks] = *one;
    const int64_t missing = missing_bytes(estimate, devices);
    const bool goes_on = missing > 0 && rooms.see(tasks, held_by_devices(estimate, devices.size()));
    if (k == 0 || missing < best.missing) best = {options, missing, std::move(estimate)};
    if (!goes_on) break;
    rooms.put_into(options);
  }
  return best;
}

CompileOptions with_rooms(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options,
                          Care care) {
  if (!are_unlike(devices) || std::ranges::none_of(devices, [](const DeviceSpec& d) { return d.memory_bytes > 0; }))
    return options;
  const double price = options.memory_price;
  return fitted(graph, devices, std::move(options), price, Rooms(devices), care).options;
}

Estimate estimate(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked, Care care) {
  keep_heap();
  return stoppable([&] {
    const CompileOptions as_asked = without_idle(asked, graph);
    if (care == Care::kQuick) check_graph(graph, as_asked);
    const CompileOptions options = with_rooms(graph, devices, as_asked, care);
    Estimate out;
    double price = options.memory_price;  // that least is missing at
    std::vector<double> left_out;
    const auto try_at = [&](double at) {
      const auto estimated = [&] { return estimate_at(graph, devices, options, at, care); };
      std::optional<Estimate> mine = out.classes.empty() ? std::optional(estimated()) : attempted(estimated);
      if (!mine) return false;
      const int64_t missing = missing_bytes(*mine, devices);
      if (out.classes.empty() || missing < missing_bytes(out, devices)) out = std::move(*mine), price = at;
      return missing == 0;
    };
    const auto faster_at = [&](double at) {
      return attempted([&] { return of_faster_pipeline(graph, devices, options, at); }).value_or(std::nullopt);
    };
    for (int k = 0; k < kPrices; ++k) {
      const double at = price_of(options, k);
      if (k > 0 && is_hopeless(graph, devices, options, at))
        left_out.push_back(at);
      else if (try_at(at))
        return care == Care::kQuick ? std::move(out) : faster_at(at).value_or(std::move(out));
    }
    const Fitted other = fitted(graph, devices, options, price, Rooms(devices), care);
    if (other.missing < missing_bytes(out, devices)) out = other.estimate;
    if (missing_bytes(out, devices) == 0 || try_at(last_price(options))) return out;
    for (const double at : left_out)
      if (try_at(at)) break;
    return out;
  });
}

}  // namespace whale
