// Copies of what no cache near the core holds.
#pragma once

#include <cstddef>

namespace whale::cpu {

// memcpy, but for large ones past the caches: the target is not read before it is written, and what the core has at
// hand stays there.
void large_copy(void* to, const void* from, size_t bytes);

}  // namespace whale::cpu
