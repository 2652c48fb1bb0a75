// The level between graph and plan: the logical program with bridges in it, and where every tensor is. Dimensions are
// still those of the whole tensors; cutting them is lowering's.
#pragma once

#include <string>
#include <vector>

#include "ir/layout.h"
#include "ops/op.h"

namespace whale {

// Layouts have one entry per axis: time (micro-batches) first, then the devices' axes.
struct LayoutAxis {
  std::string name;  // "time", "replica"
  int64_t size = 1;
  int64_t extent = 0;  // of the digit that this axis cuts: the samples of a batch
  bool is_time() const { return name == "time"; }
};

struct LayoutGraph {
  Graph graph;                  // Op::region is filled in; bridges are ops
  std::vector<Layout> layouts;  // per tensor
  std::vector<LayoutAxis> axes;
  std::vector<NamedTensor> fetches;  // "loss", outputs by name, "grad:NAME"
  int64_t batch = 0;                 // 0: no input has a batch dimension
  // Inputs read for the whole batch in the prologue (denominators): the tensor and the input that it stands for.
  std::vector<std::pair<TensorId, TensorId>> whole_inputs;

  const AxisLayout& at(TensorId id, size_t axis) const { return layouts[static_cast<size_t>(id)].axes[axis]; }
  bool time_varies(TensorId id) const;  // a value of its own per micro-batch
};

// The part of a digit that a cut uses: `part` equals a digit inside `whole`, which spans outer * extent(part) * inner
// of it.
struct SubDigit {
  int64_t outer = 1, inner = 1;
  friend bool operator==(const SubDigit&, const SubDigit&) = default;
};
bool find_sub_digit(const Digit& whole, int64_t whole_extent, const Digit& part, int64_t part_extent, SubDigit& out);
Digit sub_digit(const Digit& whole, const SubDigit& sub);

std::string to_string(const AxisLayout& layout);  // "R", "S0", "S0:2x16" (outer 2, inner 16), "P(sum)"
std::string to_string(const Layout& layout);      // "S0,R"
std::string print(const LayoutGraph& graph);      // an op a line with layouts and regions

// Checks that every op's operands lie as its factors allow, independently of how they were chosen.
void verify(const LayoutGraph& graph);

}  // namespace whale
