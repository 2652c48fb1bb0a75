// A program that is to be cut, and what choosing asks of it: who reads a value, whose gradient it is, where the samples
// are. Worked out once; no cut changes it.
#pragma once

#include <map>
#include <unordered_map>
#include <vector>

#include "shard/choose.h"

namespace whale {

struct CutProblem {
  CutProblem(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options);

  const Graph& graph;
  const ShardOptions& options;
  Axes axes;
  mutable OpFactors factors;  // as a cache
  int64_t batch = 0;          // samples; 0: no input has a batch dimension
  int64_t micro_batches = 1;
  std::vector<OpCut> samples;                   // per op: along a replica axis
  std::vector<std::vector<OpId>> gradients_of;  // per op: those of the backward pass that are its gradients
  std::map<TensorId, TensorId> parameter_of;    // of a gradient
  std::map<TensorId, TensorId> settles;         // of a gradient, or of a stage's term of it, that is summed at once
  std::unordered_map<TensorId, std::vector<TensorId>> states_of;  // of a parameter
  // Per tensor, kNone: there is none.
  std::vector<OpId> first_reader;
  std::vector<TensorId> variable_of;  // of the next value of a variable
  std::vector<TensorId> forward_of;   // of a result of the backward pass
  // Per tensor.
  std::vector<char> constant;        // made of constants and the step's scalars
  std::vector<char> sums_of_unlike;  // over an unlike replica's samples: another one has others

  bool has_samples(OpId op) const { return batch > 1 && samples[op].present(); }
  // Its readers pair its rows with samples, though perhaps no input feeds it: it is cut along time as they are.
  bool has_own_rows(OpId op) const { return has_samples(op) && graph.op(op).phase != Phase::kUpdate; }
  TensorId gradient_in(TensorId id) const;  // the parameter's gradient that this is, or is cast from; kNone: none
};

// Gradients of parameters; of one that several stages read, each stage's term, so that none of them holds it whole.
std::map<TensorId, TensorId> settled_gradients(const Graph& graph, const std::map<TensorId, TensorId>& parameter_of,
                                               const ShardOptions& options);

}  // namespace whale
