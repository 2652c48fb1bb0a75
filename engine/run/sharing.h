// Host tensors of which each rank has some bytes, made whole on every rank: one flat message from each rank that has
// any to each other one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/wire.h"

namespace whale {

struct ByteRun {
  size_t at = 0, bytes = 0;
};
using ByteRuns = std::vector<ByteRun>;  // of one tensor
void join(ByteRuns& bytes);             // in order, without overlaps and empty ones

class Sharing {
 public:
  // parts: by rank and tensor. One of a session runs at a time, between a run's beginning and its end.
  Sharing(Wire& wire, std::vector<std::vector<ByteRuns>> parts);
  // In the order of the parts; null: not shared this time, on no rank. All ranks call this. false: aborted.
  bool run(const std::vector<void*>& tensors, Lookout* lookout);

 private:
  size_t bytes_of(size_t rank, const std::vector<void*>& tensors) const;
  Wire& wire_;
  std::vector<std::vector<ByteRuns>> parts_;
  std::vector<std::unique_ptr<Wire::Sender>> senders_;      // by rank; null: nothing ever goes there
  std::vector<std::unique_ptr<Wire::Receiver>> receivers_;  // likewise
};

}  // namespace whale
