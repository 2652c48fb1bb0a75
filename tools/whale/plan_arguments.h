// What a plan is made with: the options of the command line, which one table knows (plan_arguments.cc).
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "api.h"

namespace CLI {
class App;
}

namespace tool {

struct PlanArguments {
  std::string devices = "cpu:1";
  std::string strategy;
  std::string precision;                     // "", "f32", "bf16", "f16", "f64"
  std::vector<std::string> fetch;            // tensors, besides the graph's outputs
  std::map<std::string, std::string> given;  // the other options by name, "matmul-chunks": as text; of a flag ""
  int32_t ranks = 1;                         // that the devices are of
  int64_t trials = 0;                        // of strategy auto: candidates that are run; 0: none
  double timeout = 0;                        // seconds of planning, and of a proof
  std::string init_dir;                      // that initial values may be read from
  std::function<std::string()> fixed;        // those on the command line that a finished plan has fixed, as text
};
void add_plan_options(CLI::App& command, PlanArguments& arguments);
void add_fetch(CLI::App& command, PlanArguments& arguments);
void bound_proof(CLI::App& command);  // says that --plan-timeout, which is there, is of a proof too
// Names joined by commas, on a command line; a comma or backslash in a name stands behind a backslash.
std::vector<std::string> names_in(const std::string& text);
std::string as_argument(const std::vector<std::string>& names);  // quoted for a shell where that is needed

int32_t precision_of(const std::string& name);  // whale_precision; "": the model's

Plan make_plan(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments);
// What a plan of the graph would take, as a table or as JSON.
std::string estimate_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments, bool json);
// What strategy auto looks through, as a table or as JSON.
std::string candidates_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments, bool json);
// JSON: the best strategy for the first so many devices and for each batch.
std::string prediction_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments,
                          const std::vector<int64_t>& counts, const std::vector<int64_t>& batches);
// The plan as a page; beside what these timelines of runs say.
std::string report_of(const whale_plan* plan, const std::vector<std::string>& traces);

}  // namespace tool
