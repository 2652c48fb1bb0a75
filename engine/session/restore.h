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

// One of several ranks.
struct RankOf {
  const std::vector<int32_t>& ranks;  // of the plan's devices; empty: there is one rank
  int rank = 0, size = 1;
};

class Restoration {
 public:
  // Every variable of the plan must be in the checkpoint, and nothing else: throws invalid_argument for another model
  // or optimizer. A plan that keeps no optimizer state leaves out what there is. The checkpoint must outlive this.
  Restoration(const Plan& plan, const Checkpoint& checkpoint, const RankOf& mine);

  // Reads what this rank needs, and compares the checksums; all ranks together read every byte. Throws data_loss. What
  // is read are stored pieces as wholes: they have the checksums.
  void verify() const;
  // Once it has been verified; that nobody wrote to the files since is checked on the way.
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
  void check_type(const StoredTensors& file, const StoredTensor& stored, const Row& row) const;
  void check_optimizer(const std::vector<const StoredTensor*>& stored, const std::vector<size_t>& kept) const;
  Wanted wanted(const Row& row) const;  // pieces of its tensors
  void write(Machine& machine, const Row& row) const;

  const Plan& plan_;
  const Checkpoint& from_;
  const RankOf mine_;
  std::vector<Row> rows_;
  std::vector<std::string> left_out_;
};

}  // namespace whale
