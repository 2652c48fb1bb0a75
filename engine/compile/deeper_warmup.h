// Warm-ups of 1F1B that nobody has written, where links are slow (schedule/warmup.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compile/compile.h"
#include "schedule/warmup.h"

namespace whale {

// What part of a step more micro-batches under way must save, for what they take of the memory.
inline constexpr double kWorthDeeper = 0.01;

// A graph and options whose pipeline says how deep its warm-up is: in the scope that is annotated, or else in the
// strategy's text. Nothing where the pipeline says so already, has another schedule than 1f1b, or there is none, or
// several.
struct WithWarmup {
  Graph graph;
  CompileOptions options;
};
std::optional<WithWarmup> with_warmup(const Graph& graph, const CompileOptions& options,
                                      const std::vector<int>& depths);

// Of a pipeline's plan: what its first entry takes on the stages and between them for one micro-batch, and how deep the
// warm-up of each may be by the room that is there.
struct PipelineTimes {
  std::vector<StageTimes> stages = {};
  std::vector<LinkTimes> links = {};
  std::vector<int> most = {};
};
PipelineTimes times_of_stages(const Plan& plan);

// How deep the warm-ups of the stages are best, by what the plan's first entry takes on each and between them, and by
// the room that is there. Nothing: that saves too little, or nothing is known of the devices. The plan's warm-up is the
// usual one.
struct DeeperWarmup {
  std::vector<int> depths, usual;
  std::string why;  // for a note: what is slow
  bool is_deeper() const { return depths != usual; }
  void halve();  // of what is deeper, rounded down: for less memory
};
std::optional<DeeperWarmup> deeper_warmup(const Plan& plan);
bool knows_devices(const std::vector<DeviceSpec>& devices, const Profile& profile);

}  // namespace whale
