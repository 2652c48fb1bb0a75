// A GPT as Megatron-LM trains it (Shoeybi et al., 2019): dropout in attention and behind every block's halves, a
// classifier of its own; with the scopes of a run: replica > pipeline > stage > split.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/graph.h"

namespace whale {

struct GptSizes {
  int64_t layers = 0, hidden = 0, heads = 0, sequence = 0, vocabulary = 0, batch = 0;
  double dropout = 0.1;
  bool keeps_scores = false;  // attention as ops of its own, whose softmax is kept for the backward pass
  friend bool operator==(const GptSizes&, const GptSizes&) = default;
};
struct GptCuts {
  std::vector<int64_t> layers = {};  // of each stage; the first has the embedding too, the last the classifier
  int64_t replicas = 1, ways = 1, micro_batches = 1;
  friend bool operator==(const GptCuts&, const GptCuts&) = default;
};
// Names of its blocks: "block0", ...
Graph gpt_graph(const GptSizes& sizes, const GptCuts& cuts);

}  // namespace whale
