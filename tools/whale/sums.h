// How an option adds gradients up (--adasum, --gradient-dtype, --accumulate-dtype): whose samples make the parts, and
// the sum of them.
#pragma once

#include <string>
#include <vector>

#include "data.h"
#include "values.h"

namespace tool {

using Gradient = std::vector<double>;
double norm(const Gradient& a);
double apart(const Gradient& a, const Gradient& b);

// A replica of a stage: the positions along its mesh's replica axes, outermost first, and the samples of each.
struct Replica {
  std::vector<int64_t> at;
  std::vector<int64_t> samples;
};
// Labels that say of a place that it does not count.
struct Labels {
  std::string input;
  int64_t ignore = 0;
};
struct GradientSum {
  bool adasum = false;
  double roundoff = 0;  // of the sum's format: half a unit in the last place; 0: the gradient's own
  double smallest = 0;  // what it rounds to nothing
  std::vector<std::vector<Replica>> meshes;
  struct Parameter {
    std::string name;
    size_t mesh = 0;     // whose replicas combine its gradient
    bool whole = false;  // no replica has a part of it: they all have the same (mark_whole)
  };
  std::vector<Parameter> parameters;  // trained ones
  bool masks = false;                 // random ones, which follow the place of a sample in the batch
  std::vector<Labels> labels;
};
// by_micro_batch: each micro-batch's part is a replica of its own (ZeRO 2 and 3 sum over replicas one by one; a sum of
// micro-batches in fewer bits rounds after each).
GradientSum gradient_sum_of(const std::string& plan_json, const std::string& graph_json, bool by_micro_batch);

// Adasum has nothing to combine of a gradient that no collective of the backward pass leads to (of a factor on a
// function of the batch's mean). plan_json: of a plan that hands the gradients out.
void mark_whole(GradientSum& sum, const std::string& plan_json);

// Why Adasum of this model cannot be computed from the samples of one replica by themselves; empty: it can.
std::string why_not_by_replica(const std::string& graph_json);

// Adasum of the replicas' gradients of one parameter, axis by axis, the innermost first.
Gradient adasum_of(const std::vector<Replica>& replicas, std::vector<Gradient> own);

// The samples of a batch, in this order.
Batch pick(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples);
// The samples at their places in the batch, where masks are theirs; copies of them elsewhere, with labels that do not
// count.
Batch keep(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples,
           const std::vector<Labels>& labels);
// How many labels of these samples count; 0: there are none.
double counted(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples,
               const std::vector<Labels>& labels);
// The samples' rows of a tensor of a whole batch; nothing where its first dimension does not hold them in order.
Values rows_of(const Values& whole, int64_t batch, const std::vector<int64_t>& samples);

}  // namespace tool
