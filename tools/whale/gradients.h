// Options that change the arithmetic of a sum of gradients on purpose (--adasum, --gradient-dtype) are compared with
// the arithmetic that they ask for: one device computes the gradient of each replica's samples at the plan's own
// parameters, and what the plan made of them is compared, step by step.
#pragma once

#include "lockstep.h"

namespace tool {

// A replica of a stage: the positions along its mesh's replica axes, outermost first, and the samples of each.
struct Replica {
  std::vector<int64_t> at;
  std::vector<int64_t> samples;
};
struct GradientSum {
  bool adasum = false;
  double roundoff = 0;  // of the sum's format: half a unit in the last place; 0: the gradient's own
  double smallest = 0;  // what it rounds to nothing
  std::vector<std::vector<Replica>> meshes;
  struct Parameter {
    std::string name;
    size_t mesh = 0;  // whose replicas combine its gradient
  };
  std::vector<Parameter> parameters;  // trained ones
};
// by_micro_batch: each micro-batch's part is a replica of its own (ZeRO 2 and 3 sum over replicas one by one).
GradientSum gradient_sum_of(const std::string& plan_json, const std::string& graph_json, bool by_micro_batch);

// Why Adasum of this model cannot be computed from the samples of one replica by themselves; empty: it can.
std::string why_not_by_replica(const std::string& graph_json);

// Both sides hand out "grad:PARAMETER" of every trained parameter.
Report compare_gradients(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
                         const SessionArguments& arguments, const std::vector<Decision>& decisions,
                         const GradientSum& sum, const Setting& setting, const Tick& tick);

}  // namespace tool
