// What Adasum cannot combine.
#pragma once

#include "base/error.h"
#include "shard/gradients.h"

namespace whale {

// A gradient of which replicas' parts were added before anything that they all have was (a penalty).
void check_adasum(const ReshardBuilder& b, const Gradients& gradients);

// A part of a gradient that goes from one stage to another one with other replicas: Adasum combines what whole replicas
// made of a parameter, and of one that stages share they have to be the same.
void check_tied(const ReshardBuilder& b, const Op& reader, TensorId id, size_t axis);

}  // namespace whale
