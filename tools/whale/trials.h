// Strategy auto, judged by running: the first candidates train a few steps on their devices.
#pragma once

#include "plan_arguments.h"

namespace tool {

// Of the `arguments.trials` best candidates that use all devices the one whose steps take least, as arguments; says on
// the error stream what each took. On synthetic samples; variables are thrown away.
PlanArguments tried(whale_engine* engine, const whale_graph* graph, PlanArguments arguments);

}  // namespace tool
