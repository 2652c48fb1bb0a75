// What the options, the model and the devices of a plan must agree on; what does not is an error.
#pragma once

#include "compile/compile.h"
#include "task/task_graph.h"

namespace whale {

void check_options(const CompileOptions& options);
void check_options(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks, int64_t micro_batches);
// Without what asks for that which is so anyway: gradients of a float32 model are summed in f32.
CompileOptions without_idle(CompileOptions options, const Graph& graph);
bool trains(const Graph& graph);  // has a loss and an optimizer
// Of options that find nothing to do, one sentence each.
std::vector<std::string> idle_notes(const Plan& plan);
// At most as many as samples. `tasks`: whose devices run them.
void check_micro_batches(const Graph& source, const TaskGraphs& tasks, int64_t micro_batches);
int64_t batch_of(const Graph& graph);  // samples; 0: no input counts them
// What planning takes against options.max_bytes; an estimate.
void check_memory(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks, int64_t devices,
                  int64_t micro_batches);
// `others`: batch sizes whose entries the plan has too.
double planning_bytes(const Graph& source, const TaskGraphs& tasks, int64_t devices, int64_t micro_batches,
                      size_t others);
void check_recompute(const CompileOptions& options, const TaskGraphs& tasks);
void check_devices(const std::vector<DeviceSpec>& devices, const Graph& source);
// No finite number of the model is infinite as the plan holds it. float16 may round to infinity: masks do.
void check_numbers(const Graph& source);

}  // namespace whale
