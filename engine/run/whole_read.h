// A variable made whole on every rank: a run without devices, which all ranks begin alike.
#pragma once

#include <cstddef>

#include "run/machine.h"

namespace whale {

// Copy `copy` of a variable as a whole, on every rank; all call this. Throws what another rank tells instead.
void read_whole(Machine& machine, size_t index, size_t copy, void* to, size_t bytes);

}  // namespace whale
