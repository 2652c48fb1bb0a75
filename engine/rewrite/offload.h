// Values that wait in the host's memory while the device does not need them: optimizer state, gradients, parameters,
// activations (Rajbhandari et al., 2021; Rhu et al., 2016).
#pragma once

#include <cstdint>

#include "ir/plan_options.h"
#include "shard/sharded_graph.h"

namespace whale {

// Variables of the classes (OffloadClass bits) live in the host's memory: they are copied in before they are used, each
// phase for itself, and copied out when they are updated. Activations wait there between forward and backward,
// gradients between the backward pass (or the micro-batches that they are summed over) and the update. Copies are ops
// `to_host` and `to_device`; what is copied in comes at most two copies ahead of the op that needs it. The last pass:
// the order of the ops is final, and no bit of any result changes.
void offload(ShardedGraph& graph, uint32_t classes);

// Only to_host and to_device touch it.
bool in_host(const ShardedGraph& graph, TensorId id);

}  // namespace whale
