// What a plan does with its gradients once they are summed: the same gradients are given to one device, whose model is
// nothing but the parameters and their optimizer, and all that a step leaves is compared with what that leaves.
#pragma once

#include <memory>

#include "lockstep.h"

namespace tool {

// A plan of one device that updates `parameters` of a graph (as JSON) by the inputs "grad:PARAMETER".
Plan update_plan(whale_engine* engine, const std::string& graph_json, const std::vector<std::string>& parameters,
                 const PlanArguments& one);

class Updates {
 public:
  // setting: of float64 or float32, which updates compute in whatever the model does.
  Updates(whale_engine* engine, const std::function<Plan()>& plan, const Setting& setting,
          const std::vector<Variable>& variables);
  // Whether an update of these gradients makes this variable.
  bool makes(const std::string& variable) const;
  // Of a step of `plan` that started from `start` (in the order of `variables`), all copies, into the report.
  void compare(const Runner& plan, const std::vector<Tensor>& start, const std::vector<Values>& gradients,
               int64_t number, Report& report);

 private:
  struct Run {
    std::unique_ptr<Runner> runner;
    Shake shake;
  };
  void update(Run& run, bool moved, const std::vector<Tensor>& start, const std::vector<Values>& gradients);

  Setting setting_;
  std::vector<Variable> of_plan_, variables_;  // those that an update makes: in the plan, and here
  std::vector<size_t> places_;                 // of these among all of the plan
  std::vector<InputSpec> inputs_;
  std::vector<Run> runs_;  // the first is not moved
};

}  // namespace tool
