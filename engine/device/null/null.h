// The null back end: accepts every op and executes nothing, so that all that stands above devices can be tested
// anywhere.
#pragma once

#include <cstdint>
#include <memory>

#include "device/device.h"

namespace whale {

std::unique_ptr<Backend> make_null_backend();

// Kernels that a null device was asked to run; -1 for a device of another back end.
int64_t null_kernels_run(const Device& device);

}  // namespace whale
