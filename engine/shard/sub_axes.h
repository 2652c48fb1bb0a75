// Following sub-axes through a program by the ops' factors: where the samples are, and along which sub-axes a tensor
// could be cut so that its neighbours can follow.
#pragma once

#include <string_view>
#include <unordered_map>
#include <vector>

#include "ops/factor_table.h"
#include "shard/sharded_graph.h"

namespace whale {

// One factor of an op, or a part of it, that is to be cut.
struct OpCut {
  int factor = -1;  // -1: none
  SubAxisPart sub;
  bool state = false;    // by the shares of state
  bool samples = false;  // it holds the batch
  bool present() const { return factor >= 0; }
  friend bool operator==(const OpCut&, const OpCut&) = default;
};

// Where a variable lives: fixed once, for all entries of a plan.
struct StorageSharding {
  const Sharding* sharding = nullptr;  // over the axes of that mesh, without time
  int32_t mesh = 0;
};
using StorageShardings =
    std::unordered_map<std::string_view, StorageSharding>;  // by name; both are kept by whoever makes this

// A factor may be cut: of a kind that can be, in its units, and every result carries it or becomes partial.
bool can_cut(const Op& op, const Factor& factor, const SubAxisPart& sub);

// Where the operands that have a row per group carry a cut into `runs` along time; absent: it cuts groups.
SubAxis sub_axis_of_groups(const Factor& factor, const SubAxisPart& sub, int64_t runs);

// The operand's cut of `sub_axis` is one of the factor: that part of it.
bool cut_of_operand(const Factor& factor, size_t input, const SubAxis& sub_axis, int64_t extent, SubAxisPart& sub);

// What the operand carries of a factor that it may bring piece by piece (FactorKind::kStream); absent: nothing.
SubAxis streamed_sub_axis(const Factors& factors, size_t input);

// Per op, the factor that holds the sub-axis; `seeds` say where it is in the inputs (absent: nowhere). Values that no
// seed reaches have it where their readers pair them with one that has. Ops without samples (or where samples were
// summed before) have none.
std::vector<OpCut> follow(const Graph& graph, const std::vector<SubAxis>& seeds, OpFactors& factors);
std::vector<OpCut> follow_samples(const Graph& graph, OpFactors& factors);

// Per tensor, a few sub-axes (at most kMaxSubAxes): those that ops near it know by their factors. What attention calls
// heads, the product before it knows as the middle of its columns.
inline constexpr size_t kMaxSubAxes = 10;
using SubAxes = SmallVector<SubAxis, 4>;
std::vector<SubAxes> candidate_sub_axes(const Graph& graph, OpFactors& factors);

}  // namespace whale
