// The plan's source planned once more: for another batch, or to be looked at.
#include <algorithm>
#include <cmath>

#include "base/watch.h"
#include "compile/attempted.h"
#include "compile/checks.h"
#include "compile/estimate.h"
#include "compile/passes.h"
#include "compile/prepare.h"
#include "compile/proof_check.h"
#include "compile/remedies.h"
#include "compile/source_check.h"
#include "grad/passes.h"
#include "report/fit.h"

namespace whale {
namespace {

// The plan's source once more, for another batch, or to be looked at.
struct Regraphed {
  Passes passes;
  Graph whole;
};
Regraphed graph_again(const Plan& plan, const CompileOptions& options, std::string_view name, int64_t batch,
                      double memory_price) {
  if (name != "train" && name != "eval") throw invalid("entry '{}', expected train or eval", name);
  if (name == "train" && !trains(plan.source))
    throw error(Code::kFailedPrecondition, "model '{}' has no loss with an optimizer; it can be evaluated only",
                plan.model);
  // Stages are cut by the plan's own batch: another one must not move them.
  Scoped scoped = scope_out(plan.source, plan.devices, options, memory_price);
  scoped.tasks.meshes = plan.meshes;  // with their shares, whatever they were dealt by
  check_recompute(options, scoped.tasks);
  check_micro_batches(plan.source, scoped.tasks, plan.source.training.accumulation);
  Passes passes{options, scoped.tasks, {}};
  for (const Entry& e : plan.entries)
    for (const PlanOutput& o : e.outputs)
      if (e.name == name && o.name.starts_with("grad:") &&
          std::find(passes.gradients.begin(), passes.gradients.end(), o.name.substr(5)) == passes.gradients.end())
        passes.gradients.push_back(o.name.substr(5));
  // What training asks of a batch (groups of samples) does not bind evaluation.
  const Graph base = name == "eval" ? for_inference(scoped.graph) : scoped.graph;
  const Graph source = batch == batch_of(plan.source) ? base : rebatch(base, batch);
  Graph whole = passes.on_graph(source, std::string(name));
  return {std::move(passes), std::move(whole)};
}

ShardedGraph lay_out_again(Regraphed again, const Plan& plan, std::string_view name, int64_t batch) {
  const int64_t micro_batches = batch > 1 ? plan.source.training.accumulation : 1;
  const StorageShardings storage_shardings = storage_shardings_of(plan.variables);
  return again.passes.on_shardings(std::move(again.whole), std::string(name), micro_batches, &storage_shardings);
}

CompileOptions options_of(const Plan& plan) {
  CompileOptions options{plan.options};
  options.profile = plan.profile;
  options.stages.begins = plan.stage_begins;
  options.verify_passes = false;
  return options;
}

}  // namespace

namespace {

Entry entry_at(const Plan& plan, std::string_view name, int64_t batch, double memory_price) {
  const CompileOptions options = options_of(plan);
  Regraphed again = graph_again(plan, options, name, batch, memory_price);
  const Passes passes = again.passes;
  const auto indices = indices_of_inputs(again.whole);
  const ShardedGraph shardings = lay_out_again(std::move(again), plan, name, batch);
  Entry entry = passes.make_entry(shardings, indices, std::string(name), plan.variables, nullptr);
  check_proof(plan, entry);
  return entry;
}

}  // namespace

std::optional<Entry> evaluation_that_fits(const Plan& plan, int64_t batch) {
  for (int k = 1; k < kPrices; ++k) {
    std::optional<Entry> entry =
        attempted([&] { return entry_at(plan, "eval", batch, std::ldexp(plan.memory_price, 2 * k)); });
    if (entry && shortage_of(plan, *entry).bytes == 0) return entry;
  }
  return std::nullopt;
}

Entry entry_for(const Plan& plan, std::string_view name, int64_t batch) {
  if (batch < 1) throw invalid("a batch of {} samples, expected at least 1", batch);
  Entry entry = entry_at(plan, name, batch, plan.memory_price);
  if (name == "eval" && shortage_of(plan, entry).bytes > 0)
    if (std::optional<Entry> other = evaluation_that_fits(plan, batch)) return std::move(*other);
  return entry;
}

Entry compile_entry(const Plan& plan, std::string_view name, int64_t batch) {
  return stoppable([&] {
    Entry entry = entry_for(plan, name, batch);
    Shortage shortage = shortage_of(plan, entry);
    shortage.batch = batch;
    if (shortage.bytes == 0) return entry;
    // A step or an evaluation may wait for this: a short look, and no other strategies.
    constexpr RemedyEffort kShort{.estimates = 0.5, .plans = 0.5, .search = 0};
    CompileOptions asked{plan.options};
    asked.profile = plan.profile;
    throw does_not_fit(plan, entry, shortage, remedies_for(plan.source, plan.devices, asked, plan, shortage, kShort));
  });
}

void verify_source(const Plan& plan) {
  stoppable([&] {
    const CompileOptions options = options_of(plan);
    for (const Entry& entry : plan.entries)
      check_source(plan, entry, graph_again(plan, options, entry.name, entry.batch, plan.memory_price).whole);
  });
}

std::vector<ReshardRow> reshards_of(const Plan& plan) {
  return stoppable([&] {
    const CompileOptions options = options_of(plan);
    const char* name = trains(plan.source) ? "train" : "eval";
    const int64_t batch = batch_of(plan.source);
    return reshards_of(lay_out_again(graph_again(plan, options, name, batch, plan.memory_price), plan, name, batch));
  });
}

ChoiceReport choices_of(const Plan& plan) {
  return stoppable([&] {
    const CompileOptions options = options_of(plan);
    const char* name = trains(plan.source) ? "train" : "eval";
    const auto [passes, whole] = graph_again(plan, options, name, batch_of(plan.source), plan.memory_price);
    const ShardOptions sharding = passes.shard_options(whole, name, plan.micro_batches, nullptr);
    return choice_report(whole, passes.tasks, choose_cuts(whole, passes.tasks, sharding));
  });
}

std::string location_of(const Plan& plan, std::string_view entry, std::string_view op) {
  try {
    const CompileOptions options = options_of(plan);
    for (const Op& made : graph_again(plan, options, entry, batch_of(plan.source), plan.memory_price).whole.ops)
      if (made.name == op) return made.location;
  } catch (const Error&) {  // there is another one to tell of
  }
  return "";
}

}  // namespace whale
