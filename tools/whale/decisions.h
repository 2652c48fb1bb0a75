// The discrete decisions of a model: experts that tokens go to, the largest of some values. Two computations that
// differ by rounding may decide differently where scores are nearly equal (semantics.md section 10); what follows then
// differs by more than rounding.
#pragma once

#include <string>
#include <vector>

#include "values.h"

namespace tool {

struct Decision {
  std::string op;      // "moe_gate", "top_k", "argmax"
  std::string scores;  // the tensor that it decides by
  int64_t k = 1;
  int64_t axis = -1;
};
// From the graph as JSON.
std::vector<Decision> decisions_of(const std::string& graph_json);

struct Decided {
  int64_t made = 0, differ = 0;
  double margin = 0;  // the largest gap between the two candidates of a decision that differs, of the largest score
  std::string worst;  // its tensor
  double scores = 0;  // the largest difference between two scores, of the largest score
};
// Adds the decisions that these scores lead to: the k largest in descending order, ties to the lowest index.
void compare_decisions(const Decision& decision, const Values& plan, const Values& single, Decided& decided);

}  // namespace tool
