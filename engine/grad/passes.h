// The passes between a user's graph and the graph of a whole training step (semantics.md sections 2 and 6). Each is a
// free function from a valid Graph to a valid Graph; errors name the op and scope. Order of a training graph:
//   canonicalise, apply_precision, clean, differentiate, split_weights, add_updates, clean, assign_regions.
// for_inference and rebatch take the user's graph, before canonicalise.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "ir/graph.h"
#include "ops/op.h"

namespace whale {

// Fewer ops for what follows: reduce_mean becomes reduce_sum times 1/N with the global N; batch_norm becomes
// statistics, normalization (with the relu and residual after it) and the update of the running statistics; a product's
// activation that needs its operand for its gradient becomes an op, where there is a loss; random ops get their keys.
void canonicalise(Graph& graph);

// Training::precision, before differentiation.
void apply_precision(Graph& graph);

// Appends the backward ops and fills Graph::gradients: parameter name -> gradient, in order of the variables. A
// parameter that the loss does not depend on has none.
void differentiate(Graph& graph);

// Optimizer::split_master_weights in bf16: trained fp32 parameters become their upper halves, bf16. After
// differentiate.
void split_weights(Graph& graph);

// Appends clipping and one update op per parameter with a gradient; adds the optimizer's state and the step scalars.
void add_updates(Graph& graph);
// Bytes of state that the optimizer keeps for each byte of a large matrix of f32.
double states_of(const Optimizer& optimizer);

// Which gradients are made in pieces (cut_gradients.cc): of more bytes, of so many columns at least each.
struct GradientPieces {
  int64_t bytes = 0, columns = 1;
  std::function<bool(const Op& op, const Dims& gradient)> may_be_cut;
};
// After add_updates.
void cut_gradients(Graph& graph, const GradientPieces& how);

// Ops that nothing reads.
void drop_dead(Graph& graph);
// Dead code, common subexpressions (never random ops), trivial constants, pairs of casts, reshapes and transposes.
void clean(Graph& graph);
// `written`: per scope, the one that stands in the program (a pipeline's cut divides scopes; empty: none did). What is
// merged follows from the program alone: merged before differentiation, two uses are one, and their gradients are added
// before they go on, so that a cut between them would change the order of a sum.
void clean_as_written(Graph& graph, const std::vector<ScopeId>& written);

// Ops and values that passes have given one name get others, by which the plan verifier tells collectives apart.
void name_apart(Graph& graph);

// A step may take the batch in parts.
bool many_micro_batches(const Graph& graph);

// Op::region of every op.
void assign_regions(Graph& graph);

// Ops with an index (OpDef::index) that the graph computes get the limit that each run of theirs checks; those whose
// index is an input as it is, only moved or widened, get none: the input is checked before the step.
void check_indices(Graph& graph);
// For each of Graph::inputs what its elements must be, for the ops of the second kind.
std::vector<std::vector<IndexRange>> indices_of_inputs(const Graph& graph);

// The forward pass alone, without dropout and with running statistics. Training keeps only loss and precision.
Graph for_inference(Graph graph);

// The same program for another batch size.
Graph rebatch(const Graph& graph, int64_t batch);

// Which sub-axis of each tensor is the batch, and its extent; what rebatch and assign_regions follow. Throws when two
// inputs disagree on the batch size. `strict`: throws at an op that the batch enters but whose factors do not say where
// it goes.
struct BatchSubAxes {
  int64_t batch = 0;        // 0: no input has a batch dimension
  std::vector<SubAxis> of;  // per tensor; absent: the same for every sample
};
BatchSubAxes batch_sub_axes(const Graph& graph, bool strict);

}  // namespace whale
