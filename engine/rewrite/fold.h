// Ops folded into attributes and operands of a matrix product beside them: fewer passes over memory. (Batch norm folds
// what follows it in grad/canonicalise.)
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// add(matmul(a, b), bias [n]) -> matmul(a, b, bias). Before differentiation, so that the gradient of the bias folds
// too. Outside splits.
void fold_bias(Graph& graph, const TaskGraphs& tasks);

// relu(matmul(...)) -> matmul(..., activation relu). After differentiation: relu's gradient needs only its result.
void fold_activation(Graph& graph, const TaskGraphs& tasks);

// Ops inside a split in their forms in pieces (OpDef::decompose); nothing is folded there, so that products stay linear
// and may leave sums of their parts.
void decompose_splits(Graph& graph, const TaskGraphs& tasks);

// Inside splits, once it is known which products leave sums: those that do not take their biases back.
void fold_whole_products(ShardedGraph& graph);

}  // namespace whale
