// What a checkpoint gives each variable of a plan. Split weights (grad/split_weights.cc) are one fp32 number in two
// files: halves are joined for a plan that has them whole, and cut for one that has halves.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "plan/plan.h"
#include "run/machine.h"

namespace whale {

// As messages and checkpoints call it: "adamw", "sgd with momentum", "none".
std::string optimizer_name(const Optimizer& optimizer);

class Restoration {
 public:
  // Every variable of the plan must be in the checkpoint, and nothing else: throws invalid_argument for another model
  // or optimizer. A plan that keeps no optimizer state leaves out what there is. The checkpoint must outlive this.
  Restoration(const Plan& plan, const Checkpoint& checkpoint);

  // The files have been verified; that nobody wrote to them since is checked on the way.
  void write_to(Machine& machine) const;
  const std::vector<std::string>& left_out() const { return left_out_; }  // optimizer state

 private:
  struct Row {
    size_t variable = 0;
    std::optional<size_t> low_variable = {};  // of a split weight: its state "low"
    const StoredTensor* stored = nullptr;
    const StoredTensor* low_stored = nullptr;  // in the optimizer's file
  };
  const StoredTensor* low_of(const StoredTensor& weight) const;
  std::optional<size_t> low_of(const PlanVariable& weight) const;
  void match_model();
  void match_state();
  void check_type(const SafetensorsFile& file, const StoredTensor& stored, const Row& row) const;
  void check_optimizer(const std::vector<const StoredTensor*>& stored, const std::vector<size_t>& kept) const;
  void write(Machine& machine, const Row& row) const;

  const Plan& plan_;
  const Checkpoint& from_;
  std::vector<Row> rows_;
  std::vector<std::string> left_out_;
};

}  // namespace whale
