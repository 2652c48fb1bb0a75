// DeepSeek: the rows are in models.cc.
#pragma once

#include "models.h"

namespace tool {

// head_dim: features of a head, without those that know its position. hidden: of an expert.
ModelOptions deepseek_sizes(int64_t layers, int64_t dim, int64_t heads, int64_t head_dim, int64_t hidden,
                            int64_t dense_layers, int64_t experts, int64_t top_k, int64_t seq, int64_t vocab,
                            int64_t batch);
Value deepseek(Builder& b, const ModelOptions& o);

}  // namespace tool
