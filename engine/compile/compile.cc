#include "compile/compile.h"

#include <algorithm>
#include <optional>

#include "base/philox.h"
#include "base/text.h"
#include "base/thread_seconds.h"
#include "base/watch.h"
#include "compile/attempted.h"
#include "compile/automatic.h"
#include "compile/checks.h"
#include "compile/device_orders.h"
#include "compile/estimate.h"
#include "compile/faster_pipeline.h"
#include "compile/passes.h"
#include "compile/prepare.h"
#include "compile/proof_check.h"
#include "compile/remedies.h"
#include "compile/rooms.h"
#include "grad/passes.h"
#include "plan/limits.h"
#include "report/fit.h"
#include "report/notes.h"
#include "schema/graph_file.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

// Of a plan whose step fits and whose evaluation does not: is there one that does, and it is the plan's now.
bool fit_evaluation(Plan& plan) {
  if (plan.entries.size() < 2 || shortage_of(plan, plan.entries[0]).bytes > 0) return false;
  Entry& evaluation = plan.entries[1];
  if (shortage_of(plan, evaluation).bytes == 0) return false;
  std::optional<Entry> other = evaluation_that_fits(plan, evaluation.batch);
  if (other) evaluation = std::move(*other);
  return other.has_value();
}

// `memory_price`: CostModel's. `last`: the plan is wanted whole, even where its variables alone are too large.
Plan make_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
               double memory_price, bool last) {
  Scoped scoped = prepare(graph, devices, options, memory_price);
  const Passes passes{options, scoped.tasks, gradients_of(options)};
  Plan plan = outline(scoped, devices, options, memory_price);
  plan.source = source_of(graph, options);
  plan.source.training.accumulation = scoped.graph.training.accumulation;
  const std::vector<uint8_t> file = serialize(graph);  // its training included
  plan.model_hash = hash_name({reinterpret_cast<const char*>(file.data()), file.size()});

  std::vector<std::string> entries;
  if (trains(plan.source))
    entries.push_back("train");
  else if (!passes.gradients.empty())
    throw invalid("fetch 'grad:{}': the graph has no loss with an optimizer, so nothing is differentiated",
                  brief(passes.gradients[0]));
  entries.push_back("eval");
  StorageShardings storage_shardings;
  std::vector<std::string> decisions;  // of the first entry
  for (const std::string& name : entries) {
    const bool last_entry = &name == &entries.back();
    Graph whole = passes.on_graph(last_entry ? std::move(scoped.graph) : scoped.graph, name);
    const auto indices = indices_of_inputs(whole);
    const ShardedGraph lg = passes.on_shardings(std::move(whole), name, plan.micro_batches,
                                                storage_shardings.empty() ? nullptr : &storage_shardings);
    if (plan.variables.empty()) plan.variables = variables_of(lg);
    if (storage_shardings.empty()) storage_shardings = storage_shardings_of(plan.variables), decisions = lg.notes;
    if (!last && shortage_of(plan).bytes > 0) return plan;  // the rest would only add to it
    plan.entries.push_back(
        passes.make_entry(lg, indices, name, plan.variables, plan.entries.empty() ? &decisions : nullptr));
  }
  const bool evaluated_otherwise = fit_evaluation(plan);
  plan.notes = notes_of(plan);
  for (const std::string& note : idle_notes(plan)) plan.notes.push_back(note);
  plan.notes.insert(plan.notes.end(), decisions.begin(), decisions.end());
  plan.notes.insert(plan.notes.end(), scoped.tasks.notes.begin(), scoped.tasks.notes.end());
  if (const std::string note = idle_note(scoped.tasks, plan.micro_batches, options.exact); !note.empty())
    plan.notes.push_back(note);
  if (memory_price > 1)
    plan.notes.push_back(fmt::format(
        "The plan that is fastest without regard to memory does not fit; here a byte is worth {:g} times as much.",
        memory_price));
  if (evaluated_otherwise)
    plan.notes.emplace_back("The evaluation that is fastest does not fit; it is planned to hold less than a step.");
  check_limits(plan);
  passes.after("plan", plan, true);
  return plan;
}

// Or a faster pipeline, where links are slow or devices unlike.
Plan with_faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                          Plan plan) {
  const double price = plan.memory_price;
  const MakePlan step = [&](const Graph& g, const CompileOptions& with) {
    return plan_of_step(g, devices, with, price);
  };
  std::optional<Faster> faster =
      attempted([&] { return faster_pipeline(graph, devices, options, plan, step); }).value_or(std::nullopt);
  if (!faster) return plan;
  faster->plan = {};
  std::optional<Plan> made =
      attempted([&] { return make_plan(faster->made_of.graph, devices, faster->made_of.options, price, true); });
  if (!made || shortage_of(*made).bytes > 0) return plan;
  made->model_hash = plan.model_hash;
  made->notes.push_back(std::move(faster->why));
  return std::move(*made);
}

// Of plans that do not fit, the one that lacks least.
struct Nearest {
  std::optional<Plan> plan;
  CompileOptions options;
  Shortage shortage;
  std::vector<double> left_out;  // prices at which nothing was planned, as far too much would be needed
  void judge(Plan mine, const CompileOptions& made_with) {
    const Shortage lacks = shortage_of(mine);
    if (!plan || lacks.bytes < shortage.bytes) shortage = lacks, plan = std::move(mine), options = made_with;
  }
  // What is tried of itself, with other cuts or prices than were asked for: where it cannot be, it does not count, but
  // for the first of all, whose error is the answer.
  template <class Try>
  auto tried(const Try& work) const -> std::optional<decltype(work())> {
    return plan ? attempted(work) : std::optional(work());
  }
  // Those that lack less by their estimate, than this plan and than this plan's own estimate: where memory can cost
  // what it will and the plan is the same, the estimates are.
  void judge_at(const std::vector<double>& prices, const Graph& graph, const std::vector<DeviceSpec>& devices,
                const CompileOptions& with) {
    const auto estimated = [&](const CompileOptions& made_with, double price) {
      return tried([&] { return missing_bytes(estimate_at(graph, devices, made_with, price), devices); })
          .value_or(INT64_MAX);
    };
    std::optional<int64_t> own;
    for (const double price : prices) {
      if (plan) {
        const int64_t lacks = estimated(with, price);
        if (lacks >= shortage.bytes) continue;
        if (!own) own = estimated(options, plan->memory_price);
        if (lacks > 0 && lacks >= *own) continue;
      }
      const double before = plan ? plan->memory_price : 0;
      std::optional<Plan> made = tried([&] { return make_plan(graph, devices, with, price, true); });
      if (!made) continue;
      judge(std::move(*made), with);
      if (plan->memory_price != before) own.reset();
    }
  }
};

// At rising prices of memory.
std::optional<Plan> plan_at_prices(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                   const CompileOptions& options, Nearest& nearest) {
  std::vector<double> cut_short;  // prices at which the variables alone were too large
  for (int k = 0; k < kPrices; ++k) {
    const double price = price_of(options, k);
    if (k > 0 && nearest.plan && is_hopeless(graph, devices, options, price)) {
      nearest.left_out.push_back(price);
      continue;
    }
    std::optional<Plan> plan =
        nearest.tried([&] { return make_plan(graph, devices, options, price, k == kPrices - 1); });
    if (!plan) continue;
    if (shortage_of(*plan).bytes == 0) return plan;
    if (plan->entries.empty())
      cut_short.push_back(price);
    else
      nearest.judge(std::move(*plan), options);
  }
  nearest.judge_at(cut_short, graph, devices, options);
  return std::nullopt;
}

// With other cuts and shares, by what the nearest plan holds: of plans that fit by their estimate, a few are made. A
// cut may be none that the strategy can have: a stage of it may hold an op of a scope without what the scope splits.
std::optional<Plan> plan_with_rooms(const Graph& graph, const std::vector<DeviceSpec>& devices, Nearest& nearest) {
  constexpr int kMade = 3;
  Rooms rooms(devices);
  for (int k = 0; k < kMade; ++k) {
    const double price = nearest.plan->memory_price;
    const Entry* entry = nearest.plan->find_entry(nearest.shortage.entry, batch_of(graph));
    if (entry == nullptr && !nearest.plan->entries.empty()) entry = &nearest.plan->entries[0];
    if (entry == nullptr ||
        !rooms.see(prepare(graph, devices, nearest.options, price).tasks, held_by_devices(*nearest.plan, *entry)))
      return std::nullopt;
    CompileOptions options = nearest.options;
    rooms.put_into(options);
    const std::optional<Fitted> other = nearest.tried([&] { return fitted(graph, devices, options, price, rooms); });
    if (!other || other->missing >= nearest.shortage.bytes) return std::nullopt;
    std::optional<Plan> plan = nearest.tried([&] { return make_plan(graph, devices, other->options, price, true); });
    if (!plan) return std::nullopt;
    if (shortage_of(*plan).bytes == 0) return plan;
    nearest.judge(std::move(*plan), other->options);
    if (other->missing > 0) return std::nullopt;
  }
  return std::nullopt;
}

// With the devices in another order along the stages; what does not fit by its estimate is not planned.
std::optional<Plan> plan_in_other_order(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                        const CompileOptions& options, const Nearest& nearest) {
  for (const DeviceOrder& order : orders_by_memory(graph, options, *nearest.plan)) {
    CompileOptions with = options;
    with.strategy = order.strategy, with.rooms = {}, with.stages = {};
    const double price = nearest.plan->memory_price;
    const std::optional<Fitted> found =
        nearest.tried([&] { return fitted(graph, devices, with, price, Rooms(devices)); });
    if (!found || found->missing > 0) continue;
    std::optional<Plan> plan = nearest.tried([&] { return make_plan(graph, devices, found->options, price, true); });
    if (!plan || shortage_of(*plan).bytes > 0) continue;
    plan->notes.push_back(fmt::format(
        "The devices are in another order than they are listed in, {}: as listed, no cut of the stages fits.",
        order.what));
    return plan;
  }
  return std::nullopt;
}

// None: no price of memory, cuts by room and order of devices makes it fit.
std::optional<Plan> find_fitting(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                 const CompileOptions& options, Nearest& nearest, bool with_warmups) {
  if (std::optional<Plan> plan = plan_at_prices(graph, devices, options, nearest))
    return with_warmups ? with_faster_pipeline(graph, devices, options, std::move(*plan)) : std::move(*plan);
  if (std::optional<Plan> plan = plan_with_rooms(graph, devices, nearest)) return plan;
  if (std::optional<Plan> plan = plan_in_other_order(graph, devices, options, nearest)) return plan;
  const double last = last_price(options);
  if (is_hopeless(graph, devices, options, last)) {
    nearest.left_out.insert(nearest.left_out.begin(), last);
  } else {
    std::optional<Plan> plan = nearest.tried([&] { return make_plan(graph, devices, options, last, true); });
    if (plan && shortage_of(*plan).bytes == 0) return plan;
    if (plan) nearest.judge(std::move(*plan), options);
  }
  nearest.judge_at(nearest.left_out, graph, devices, options);
  return nearest.shortage.bytes == 0 ? std::move(nearest.plan) : std::nullopt;
}

// `asked`: by the user, without rooms.
Plan make_fitting_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                       const CompileOptions& asked) {
  Nearest nearest;
  const double began = thread_seconds();
  if (std::optional<Plan> plan = find_fitting(graph, devices, options, nearest, true)) return std::move(*plan);
  RemedyEffort effort;
  const double took = thread_seconds() - began;  // of deep models, and on slow machines, remedies take as long
  effort.estimates = std::max(effort.estimates, took / 2);
  effort.plans = std::max(effort.plans, 2 * took);
  const Plan& plan = *nearest.plan;
  const Shortage& shortage = nearest.shortage;
  const auto entry = std::ranges::find(plan.entries, shortage.entry, &Entry::name);
  throw does_not_fit(plan, *entry, shortage, remedies_for(graph, devices, asked, plan, shortage, effort));
}

// One more entry, as a session would plan it.
void add_entry(Plan& plan, const char* name, int64_t batch, const Graph& graph, const CompileOptions& asked) {
  if (plan.find_entry(name, batch) != nullptr) return;
  Entry entry = entry_for(plan, name, batch);
  Shortage shortage = shortage_of(plan, entry);
  shortage.batch = batch;
  if (shortage.bytes > 0)
    throw does_not_fit(plan, entry, shortage, remedies_for(graph, plan.devices, asked, plan, shortage));
  plan.entries.push_back(std::move(entry));
}

}  // namespace

std::optional<Plan> plan_that_fits(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                   const CompileOptions& options, bool warmups) {
  Nearest nearest;
  return find_fitting(graph, devices, with_rooms(graph, devices, without_idle(options, graph)), nearest, warmups);
}

Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  if (options.strategy == kAutomatic) return compile_automatic(graph, devices, options);
  return stoppable([&] {
    const bool unlike = has_unlike_replicas(graph, options);
    CompileOptions with = without_idle(options, graph);
    if (unlike) with.verify_passes = true;
    try {
      Plan plan = make_fitting_plan(graph, devices, with_rooms(graph, devices, with), with);
      const size_t own = plan.entries.size();
      for (const int64_t batch : options.train_batches) add_entry(plan, "train", batch, graph, with);
      for (const int64_t batch : options.eval_batches) add_entry(plan, "eval", batch, graph, with);
      if (plan.entries.size() > own) check_limits(plan), verify(plan);
      for (const Entry& entry : plan.entries) check_proof(plan, entry);
      return plan;
    } catch (const Error& e) {
      if (!unlike || e.code() != Code::kInternal) throw;
      throw cannot_be_unlike(e.message());
    }
  });
}

}  // namespace whale
