// Llama: the rows are in models.cc.
#pragma once

#include "models.h"

namespace tool {

ModelOptions llama_sizes(int64_t layers, int64_t dim, int64_t heads, int64_t kv_heads, int64_t hidden, int64_t seq,
                         int64_t vocab, int64_t batch);
Value llama(Builder& b, const ModelOptions& o);

}  // namespace tool
