#pragma once

#include "plan/plan.h"

namespace whale {

// Writes anew what instructions wait for in the row before, when everything has its place.
void add_row_waits(Program& program);

}  // namespace whale
