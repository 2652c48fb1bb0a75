// The end of the step: next values go to their storage sharding, fetched values to a sharding that can be handed over.
#pragma once

#include "shard/placer.h"

namespace whale {

// When all ops are placed: fills in fetches and the variables' next values, and drops what nobody reads.
void finish_step(Placer& placer);

}  // namespace whale
