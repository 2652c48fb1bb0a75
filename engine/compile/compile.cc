#include "compile/compile.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/philox.h"
#include "base/text.h"
#include "base/watch.h"
#include "compile/automatic.h"
#include "compile/checks.h"
#include "compile/estimate.h"
#include "compile/passes.h"
#include "compile/prepare.h"
#include "grad/passes.h"
#include "plan/limits.h"
#include "report/fit.h"
#include "report/notes.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

// `memory_price`: CostModel's. `last`: the plan is wanted whole, even where its variables alone are too large.
Plan make_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
               double memory_price, bool last) {
  Prepared prepared = prepare(graph, devices, options, memory_price);
  auto& [source, scoped, micro_batches, profile] = prepared;
  const Passes passes{options, scoped.tasks, gradients_of(options)};
  Plan plan = outline(prepared, scoped, devices, options, memory_price);
  const std::vector<uint8_t> file = serialize(graph);  // its training included
  plan.model_hash = hash_name({reinterpret_cast<const char*>(file.data()), file.size()});

  std::vector<std::string> entries;
  if (trains(source))
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
  plan.source = std::move(source);
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
  check_limits(plan);
  passes.after("plan", plan, true);
  return plan;
}

Plan make_fitting_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  std::optional<Plan> best;
  Shortage least;
  const auto judge = [&](Plan plan, const Shortage& shortage) {
    if (!best || shortage.bytes < least.bytes) least = shortage, best = std::move(plan);
  };
  std::vector<double> cut_short;  // prices at which the variables alone were too large
  for (int k = 0; k < kPrices; ++k) {
    Plan plan = make_plan(graph, devices, options, price_of(options, k), k == kPrices - 1);
    const Shortage shortage = shortage_of(plan);
    if (shortage.bytes == 0) return plan;
    if (plan.entries.empty())
      cut_short.push_back(price_of(options, k));
    else
      judge(std::move(plan), shortage);
  }
  for (const double price : cut_short) {
    if (missing_bytes(estimate_at(graph, devices, options, price), devices) >= least.bytes) continue;
    Plan plan = make_plan(graph, devices, options, price, true);
    const Shortage shortage = shortage_of(plan);
    judge(std::move(plan), shortage);
  }
  constexpr double kLeastSeconds = 2;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  throw does_not_fit(*best, least,
                     tried_remedies(graph, devices, options, *best, std::max(kLeastSeconds, 2 * took.count())));
}

// The other batch sizes, as a session would plan them.
void add_entries(Plan& plan, const char* name, const std::vector<int64_t>& batches) {
  for (const int64_t batch : batches)
    if (plan.find_entry(name, batch) == nullptr) plan.entries.push_back(compile_entry(plan, name, batch));
}

}  // namespace

Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  if (options.strategy == kAutomatic) return compile_automatic(graph, devices, options);
  return stoppable([&] {
    Plan plan = make_fitting_plan(graph, devices, with_rooms(graph, devices, without_idle(options, graph)));
    const size_t own = plan.entries.size();
    add_entries(plan, "train", options.train_batches);
    add_entries(plan, "eval", options.eval_batches);
    if (plan.entries.size() > own) check_limits(plan), verify(plan);
    return plan;
  });
}

}  // namespace whale
