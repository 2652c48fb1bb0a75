// The queues of a device, named by what they carry. Each runs its instructions in order, beside the others; one that no
// instruction is on costs nothing.
#pragma once

#include <cstdint>

namespace whale {

enum class Queue : uint8_t {
  kCompute,  // kernels, feeds and fetches, the commit; messages within a stage, which compute needs at once
  kReplica,  // collectives along an axis that has replicas
  kSplit,    // along one that has none
  kReceive,  // messages from other stages: not behind kSend, which waits for what compute makes
  kSend,     // to other stages
  kCopyIn,   // copies from the host's memory
  kCopyOut,  // to it
};
inline constexpr int kQueues = 7;

// Whose time it takes. Queues of one carrier run beside each other, and share it.
enum class Carrier : uint8_t { kProcessor, kNetwork, kHostLink };
inline constexpr int kCarriers = 3;

struct QueueDef {
  const char* name;
  Carrier carrier;
};
inline constexpr QueueDef kQueueDefs[kQueues] = {
    {"compute", Carrier::kProcessor}, {"replica", Carrier::kNetwork}, {"split", Carrier::kNetwork},
    {"receive", Carrier::kNetwork},   {"send", Carrier::kNetwork},    {"copy_in", Carrier::kHostLink},
    {"copy_out", Carrier::kHostLink},
};
inline const char* name_of(Queue queue) { return kQueueDefs[static_cast<int>(queue)].name; }
inline Carrier carrier_of(Queue queue) { return kQueueDefs[static_cast<int>(queue)].carrier; }

}  // namespace whale
