// Gradients that a user's graph asks for itself.
#pragma once

#include "ir/graph.h"

namespace whale {

// Before canonicalise: appends ops that compute the gradient of the sum of the elements of `of` by each of `by`, as
// part of the forward program, in the places of the ops that they come from; kNone where `of` does not depend on it.
// Unimplemented: an op between them has no gradient here, or is random (its numbers are fixed later).
TensorIds append_gradients(Graph& graph, TensorId of, const TensorIds& by);

}  // namespace whale
