// The level between graph and plan: the logical program with reshards in it, and where every tensor is. Dimensions are
// still those of the whole tensors; cutting them is lowering's.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "ir/number_range.h"
#include "ir/sharding.h"
#include "ops/op.h"
#include "task/axes.h"

namespace whale {

// What leaves every value of the type as it is. (The largest i64 is none of a double: the largest double below it is.)
inline double neutral_of(Combine combine, DType dtype) {
  if (combine == Combine::kSum) return 0;
  if (is_float(dtype)) return (combine == Combine::kMin ? 1 : -1) * std::numeric_limits<double>::infinity();
  const double end = end_of(dtype);
  if (combine == Combine::kMax) return has_negatives(dtype) ? -end : 0;
  return end - 1;  // of i64: 2^63, which a fill takes for its largest number
}

struct ShardedGraph : Axes {
  Graph graph;                      // Op::region and Op::stage are filled in; reshards are ops
  std::vector<Sharding> shardings;  // per tensor: time, then the axes of its stage's mesh
  std::vector<int32_t> stages;      // per tensor: where it is
  // Sums over micro-batches are fixed binary trees over all of them (semantics.md section 9): an `accumulate` reads the
  // value twice, and its result is whole along replicas too.
  bool exact = false;
  uint32_t offload = 0;              // OffloadClass bits: what waits in the host's memory
  std::vector<NamedTensor> fetches;  // "loss", outputs by name, "grad:NAME"
  int64_t batch = 0;                 // 0: no input has a batch dimension
  // Further forms of an input: read whole in the prologue (denominators), or in another stage. The tensor, and the
  // input that it stands for.
  std::vector<std::pair<TensorId, TensorId>> input_forms;
  std::vector<std::string> notes;  // what passes decided and why, one sentence each

  explicit ShardedGraph(TaskGraphs t) : Axes{std::move(t)} {}
  const AxisSharding& at(TensorId id, size_t axis) const { return shardings[id].axes[axis]; }
  AxisSharding& at(TensorId id, size_t axis) { return shardings[id].axes[axis]; }
  Placement placement(TensorId id, size_t axis) const {
    return id == kNone ? Placement::kReplicate : at(id, axis).placement;
  }
  int32_t stage(TensorId id) const { return stages[id]; }
  bool time_varies(TensorId id) const {  // a value of its own per micro-batch
    return at(id, kTime).placement != Placement::kReplicate;
  }
};

// A further tensor of the same type and sharding in the same stage, its name continued; nobody makes it yet.
TensorId add_like(ShardedGraph& graph, TensorId id, std::string_view suffix);
// An op that stands where `op` does: in its scope, phase, region and stage.
Op op_beside(const Op& op, OpCode code, std::string name, TensorIds inputs, TensorIds outputs);

// However the op is cut, each element has the bits that it has in the whole. Of others, cut along a result or not, the
// kernel chooses the order of its sums by the shape (a product of fewer rows).
bool keeps_bits(const Op& op);

// The part of a sub-axis that a cut uses: `part` equals a sub-axis inside `whole`, which spans outer * extent(part) *
// inner of it.
struct SubAxisPart {
  int64_t outer = 1, inner = 1;
  friend bool operator==(const SubAxisPart&, const SubAxisPart&) = default;
};
bool find_sub_axis_part(const SubAxis& whole, int64_t whole_extent, const SubAxis& part, int64_t part_extent,
                        SubAxisPart& out);
SubAxis sub_axis_part(const SubAxis& whole, const SubAxisPart& sub);
int64_t extent_of(const Dims& dims, const SubAxis& sub_axis);
// Both can be cut at once: other dimensions, one inside the other, or the same.
bool compatible(const Dims& dims, const SubAxis& a, const SubAxis& b);

std::string to_string(const AxisSharding& sharding);  // "R", "S0", "S0:2x16" (outer 2, inner 16), "P(sum)"
std::string to_string(const Sharding& sharding);      // "S0,R"
std::string print(const ShardedGraph& graph);         // an op a line with shardings and regions

// Checks that every op's operands lie as its factors allow, independently of how they were chosen.
void verify(const ShardedGraph& graph);

}  // namespace whale
