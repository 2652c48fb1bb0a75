// The reference back end: every op as a plain loop. Slow, readable, the oracle that other back ends are compared with.
#pragma once

#include <memory>

#include "device/device.h"

namespace whale {

std::unique_ptr<Backend> make_ref_backend();

}  // namespace whale
