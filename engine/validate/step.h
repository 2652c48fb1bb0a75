// A measured training step of a GPT: the plan that the run had, and what the simulator says of it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "plan/plan.h"
#include "simulate/stack.h"
#include "validate/gpt_graph.h"

namespace whale {

struct StepRun {
  GptSizes sizes;
  GptCuts cuts;
  int64_t devices_of_node = 8;
  std::vector<std::string> types = {};  // of the devices of each node (cluster/device_types.h); the last: of all others
  LinkRates inside = {};                // that the plan is made for, between devices of a node; 0: of their types
  bool half = true;                     // bf16 with f32 parameters, sums of gradients in 16 bits; else all in f32
  bool repeat_blocks = false;           // blocks are computed again, whole, in the backward pass
  friend bool operator==(const StepRun&, const StepRun&) = default;
};

// As the run was: gradients are summed behind the backward pass, in 16 bits, nothing beside computation. Devices are
// placed as Megatron-LM does: a split inside a node, then replicas, then stages.
Plan plan_of(const StepRun& run);
// By the stack of each type of devices.
double seconds_of(const Plan& plan, const std::function<Stack(const std::string& type)>& stack_of);

// What there is to do on each class of devices, segment by segment, for who fits a stack (tools/fit/steps.py).
Json work_json(const Plan& plan);

}  // namespace whale
