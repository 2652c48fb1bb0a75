// `lag` and `lag_cpu`: the arithmetic of `ref` and of `cpu` on queues that are late at random, in memory that plan and
// host cannot touch. What a plan does not wait for is overtaken, and what reaches around the queues faults: a device as
// far away as a GPU, for machines that have none.
#pragma once

#include <memory>

#include "device/device.h"

namespace whale {

// `arithmetic` outlives the devices. A device of `cpu` has one thread for its kernels, unless the session says how
// many.
std::unique_ptr<Backend> make_lag_backend(Backend& arithmetic, DeviceKind kind);

}  // namespace whale
