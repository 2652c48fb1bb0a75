// Tensors of a model that rounding may turn though no decision (decisions.h) shows it: those behind a comparison, a
// sign, a floor or a cast to integers of computed numbers, and integers behind decisions whose scores nobody sees.
#pragma once

#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tool {

class Jumps {
 public:
  // scores: of the decisions that are seen.
  Jumps(const nlohmann::json& graph, const std::set<std::string>& scores);
  bool may_turn(size_t tensor) const { return rows_[tensor].jumps || (rows_[tensor].unseen && !is_float(tensor)); }

 private:
  struct Row {
    bool fed = false;     // by variables or data; other numbers are the same wherever they are computed
    bool jumps = false;   // its numbers jump
    bool unseen = false;  // behind a decision that is not seen
    std::vector<size_t> from;
    std::set<size_t> compared;  // of what a comparison says: the numbers compared
  };
  bool is_float(size_t tensor) const;
  bool turns(const std::string& op, size_t operand, size_t result) const;
  bool reaches(size_t from, const std::set<size_t>& tensors) const;
  void walk(const nlohmann::json& op, const std::set<std::string>& scores);

  const nlohmann::json& tensors_;
  std::vector<Row> rows_;
};

// Parameters that an op reads beside floats of integer data that no parameter has entered: batch norm of pixels. No
// moved run moves those, and what is left of equal ones is rounding.
std::set<std::string> parameters_beside_integers(const nlohmann::json& graph);

}  // namespace tool
