// What the options, the model and the devices of a plan must agree on; what does not is an error.
#pragma once

#include "compile.h"
#include "parallel/task_graph.h"

namespace whale {

void check_options(const CompileOptions& options);
void check_options(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks, int64_t micro_batches);
void check_recompute(const CompileOptions& options, const TaskGraphs& tasks);
void check_devices(const std::vector<DeviceSpec>& devices, const Graph& source);

}  // namespace whale
