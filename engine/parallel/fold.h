// Ops folded into attributes and operands of a matrix product beside them: fewer passes over memory. (Batch norm folds
// what follows it in grad/canonicalise.)
#pragma once

#include "ir/graph.h"

namespace whale {

// add(matmul(a, b), bias [n]) -> matmul(a, b, bias). Before differentiation, so that the gradient of the bias folds
// too.
void fold_bias(Graph& graph);

// relu(matmul(...)) -> matmul(..., activation relu). After differentiation: relu's gradient needs only its result.
void fold_activation(Graph& graph);

}  // namespace whale
