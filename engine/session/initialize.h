// Initial values of variables. An element depends on (seed, variable name, element index) only: no plan changes it, and
// every precision rounds the same numbers.
#pragma once

#include <cstdint>
#include <string_view>

#include "plan/plan.h"
#include "run/machine.h"
#include "session/init_files.h"

namespace whale {

// Elements [begin, begin + count) of a variable; begin is a multiple of 4.
void initial_values(const Initializer& init, uint64_t seed, std::string_view name, DType dtype, uint64_t begin,
                    size_t count, void* to);

// All variables on all devices, over `threads` threads. Memory must be fresh (zeros stay untouched).
void initialize_variables(Machine& machine, uint64_t seed, size_t threads, const InitFiles& files);

}  // namespace whale
