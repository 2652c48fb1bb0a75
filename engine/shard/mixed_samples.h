// What micro-batches cannot have: values that mix all samples of the batch with parameters, before the loss.
#pragma once

#include <vector>

#include "shard/choose.h"
#include "shard/reshards.h"

namespace whale {

// The program before reshards were inserted.
struct SourceOps {
  std::vector<Op> ops;
  std::vector<OpId> producers;  // per tensor

  explicit SourceOps(Graph& graph);  // takes its ops
  // kNone: no op makes it, or it is of a reshard.
  OpId producer(TensorId id) const { return static_cast<size_t>(id) < producers.size() ? producers[id] : kNone; }
  const Op& op(OpId id) const { return ops[id]; }
};

// Names the op that wants all samples of `id` at once, of a gradient the forward op behind it.
[[noreturn]] void refuse_mixed(const ReshardBuilder& b, const SourceOps& source, const Choices& choices, const Op& user,
                               TensorId id);

}  // namespace whale
