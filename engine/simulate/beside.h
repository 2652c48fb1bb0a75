// What the devices of a plan do at the same time, and how it slows each other down.
#pragma once

#include "plan/walk.h"

namespace whale {

// GPUs of the table of types: as measured work of their kind does (cost/interference.h). Devices that communicate with
// the cores that compute: two at once take as long as one after the other. Others: nothing is slower.
Besides besides_of(const Plan& plan, const Entry& entry);

}  // namespace whale
