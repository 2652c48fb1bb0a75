// From a graph and a list of devices to a Plan. passes.cc is the list of passes.
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "report/choice_report.h"
#include "report/estimate.h"
#include "report/reshard_report.h"
#include "search/deal_axes.h"

namespace whale {

inline constexpr std::string_view kAutomatic = "auto";  // CompileOptions::strategy
enum class Objective : uint8_t { kThroughput, kPrice };
// How `auto` looks for a strategy (automatic.h).
struct SearchOptions {
  Objective objective = Objective::kThroughput;
  double most_price = std::numeric_limits<double>::infinity();  // of a step
  double least_throughput = 0;                                  // samples a second
  double seconds = 10;                                          // that a search may take, about
  size_t simulated = 4;                                         // the best, judged by the simulator too
  int32_t ranks = 1;         // that the devices are of, in even runs: with several all devices are used, as listed
  bool front = false;        // what is best at every price is looked for, too: the list's pareto_front() is whole
  std::string present = {};  // a strategy that the model has now: what is near it is looked at, and nothing else
};

struct CompileOptions : PlanOptions {
  std::string strategy = {};                // of unannotated ops; empty: the graph's; "auto": searched for
  std::vector<std::string> fetch = {};      // besides the graph's outputs: tensor names, "grad:PARAMETER"
  int64_t accumulation = 0;                 // micro-batches; 0: the graph's
  std::optional<Precision> precision = {};  // none: the graph's
  std::vector<int64_t> train_batches = {};  // of other sizes, whose entries the plan has too
  std::vector<int64_t> eval_batches = {};   // likewise
  Profile profile = kMachineOfCores;        // what is known of the machine
  SearchOptions search = {};                // for "auto"
  double memory_price = 1;                  // where planning begins (CostModel::memory_price)
  std::vector<Room> rooms = {};             // that shares of unlike devices are dealt by; compile() finds them,
  StageLimits stages = {};                  // and these
  int64_t max_bytes = 0;                    // estimated memory that planning may take; 0: any
  bool verify_passes = true;                // each level after each of its passes; false: after the last one
  bool share_programs = true;               // false: each device's own, to compare with (slow)
  std::function<void(std::string_view pass, const std::string& text)> dump = {};  // text of the level after each pass
};

// A plan with the entry "train" (when there is a loss and an optimizer) and the entry "eval", then those of the other
// batch sizes that were asked for. Plans only: needs no device.
Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options = {});

// One more entry of the same plan, for another batch size (a last, smaller batch; evaluation), from Plan::source: same
// variables in the same order, same devices, shares and micro-batches. RESOURCE_EXHAUSTED where it needs more memory
// than a device says it has. Thread-safe.
Entry compile_entry(const Plan& plan, std::string_view name, int64_t batch);

// The reshards of a training step (without a loss: of an evaluation), with what they cost and what else was legal;
// found by planning Plan::source once more. Thread-safe.
std::vector<ReshardRow> reshards_of(const Plan& plan);

// kQuick: for comparisons of many choices. Few like layers say of all what nobody checks by one layer more.
enum class Care : uint8_t { kChecked, kQuick };

// What the first entry takes in memory and time, of the plan that `compile` would make, also where that does not fit:
// without the other entry, verification and a file; quickly also of the pipeline as it is, though another may be faster
// (faster_pipeline.h). Thread-safe.
Estimate estimate(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options = {},
                  Care care = Care::kChecked);

// Every cut of the first entry, as it was chosen, with what it costs; found in the same way. Thread-safe.
ChoiceReport choices_of(const Plan& plan);

// Where the user's code made what an instruction of this entry is named after ("model.py:12"), of a gradient or an
// update where its op was made; empty where that is not known. For errors: looks at Plan::source once more.
std::string location_of(const Plan& plan, std::string_view entry, std::string_view op);

}  // namespace whale
