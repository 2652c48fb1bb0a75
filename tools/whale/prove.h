// Proofs of plans, told.
#pragma once

#include <cstdio>

#include "api.h"

namespace tool {

// Prints the proof; returns the exit code: 0 proven, 1 refuted, 3 not covered.
int print_proof(const whale_plan* plan, bool json, FILE* to);

}  // namespace tool
