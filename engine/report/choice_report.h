// The choice of every cut as a table, with what it costs by the cost model: `whale plan --choices`.
#pragma once

#include <string>
#include <vector>

#include "shard/choose.h"

namespace whale {

// Ops that differ in numbers inside their names only (those of repeated blocks) are one row.
struct ChoiceRow {
  std::string name, op;  // "block*.mlp.up.matmul", "matmul"
  Phase phase = Phase::kForward;
  std::string cuts;                  // "replica by b, split by n"; "whole"
  std::vector<std::string> results;  // "f32[8,16,128] S0,S1"
  int64_t count = 0;
  Price price;  // of all of them, in a step
};

struct ChoiceReport {
  std::string strategy, axes;
  std::vector<ChoiceRow> variables;  // without cuts and price
  std::vector<ChoiceRow> ops;        // in the order of the program
  Price step;                        // of the devices that have most to do
};

ChoiceReport choice_report(const Graph& graph, const TaskGraphs& tasks, const Choices& choices, bool fold = true);
std::string choices_text(const ChoiceReport& report);
std::string choices_json(const ChoiceReport& report);

}  // namespace whale
