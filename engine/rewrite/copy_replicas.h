// Unlike replicas (task/unlike.h) in the program: a copy of the body for each, whose sums over samples are added.
#pragma once

#include "task/task_graph.h"

namespace whale {

// After canonicalise, before anything that asks for the stage of an op. Each op that has samples, and each that is made
// of parameters alone, stands in the program once a replica, in a scope of it; parameters and inputs are one, so that
// gradients of the copies are added as those of any tied use. A copy has the dimensions, keys and names of random ops
// of the program, of which its mesh holds a part of the samples. A batch so small that one replica gets all of it is
// that replica's alone. Without unlike replicas the graph stays as it is.
void copy_replicas(Graph& graph, const TaskGraphs& tasks);

// After differentiate: refuses an op whose gradient sums over samples by itself (batch norm), where no op of the
// program adds what the copies make.
void check_copies(const Graph& graph, const TaskGraphs& tasks);

// After apply_precision, which casts a parameter once for all: each copy casts its own, so that gradients of the copies
// are added in the parameter's type.
void part_casts(Graph& graph, const TaskGraphs& tasks);

// After differentiate: what the copies of an op each round, to be added, is added first and rounded once, as of one
// device (the f64 sums of a batch norm's gradients).
void add_before_casts(Graph& graph, const TaskGraphs& tasks);

}  // namespace whale
