// Pooling over channels-last images: what one output position does, over all its channels.
#pragma once

#include <cstdint>

#include "ir/dtype.h"

namespace whale::cpu {

// y[i] = max over taps of x[taps[t]][i]; index[i] = the tap's number, the first one where they tie. A NaN does not win.
void pool_max(DType dtype, const void* const* taps, const int32_t* numbers, int64_t count, int64_t channels, void* y,
              int32_t* index);
// y[i] = scale times the sum over taps.
void pool_sum(DType dtype, const void* const* taps, const float* scales, int64_t count, int64_t channels, void* y);
// dx[i] = sum over taps of dy[t][i] where index[t][i] == numbers[t].
void pool_max_grad(DType dtype, const void* const* taps, const int32_t* const* index, const int32_t* numbers,
                   int64_t count, int64_t channels, void* dx);

}  // namespace whale::cpu
