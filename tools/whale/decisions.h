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
  std::string made;    // the tensor that says what was decided; empty: the plan does not hand it out
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
// What a run hands out of decisions: their scores, then what was decided.
std::vector<std::string> names_of(const std::vector<Decision>& decisions);
struct Seen {
  const Values* scores = nullptr;
  const Values* made = nullptr;  // none: not handed out
};
// Decision `d` in the values of names_of, of which the first is `values[first]`.
Seen seen(const std::vector<Decision>& decisions, size_t d, const std::vector<Values>& values, size_t first = 0);

// Adds the decisions that these scores lead to: the k largest in descending order, ties to the lowest index. `rounded`:
// scores may be handed out in fewer bits than were decided by (a plan that splits a product adds its parts in float32,
// and decides by that), so a tie in them may have gone either way: it differs unless what was made of it is alike.
void compare_decisions(const Decision& decision, const Seen& plan, const Seen& single, bool rounded, Decided& decided);

}  // namespace tool
