// Cuts of a pipeline's stages made better by its clock: the slowest stage says not all, where messages take time and
// few micro-batches fill and drain the stages.
#pragma once

#include <functional>
#include <vector>

#include "schedule/timing.h"
#include "schedule/warmup.h"

namespace whale {

struct PipelineOfCuts {
  size_t places = 0;  // where a stage may begin or end, from 0 to this
  int micro_batches = 1;
  std::vector<std::vector<int>> warmups = {};                               // depths of the stages: the best of these
  std::function<StageTimes(size_t begin, size_t end, size_t stage)> times;  // infinite: not to be taken
  std::function<LinkTimes(size_t place, size_t stage)> sends;               // over the border behind the stage
};

// Of the seconds of others: by less the clock, which does not know all, tells nothing.
inline constexpr double kWorthOtherCuts = 0.99;

// The least seconds_of_1f1b with stages that begin at these places, the first at 0.
double seconds_of_cuts(const PipelineOfCuts& pipeline, const std::vector<size_t>& begins);

// Better ones near each of these, as far as some hundred microseconds to a few milliseconds of walking reach, and of
// all the fastest: borders are moved alone and in runs beside each other, which takes work from one stage to one
// further away, as long as that gains. `finds_warmup`: with the depths that are best for the cuts, for which other cuts
// are the best, and so on, a few times; first with those that the pipeline has.
std::vector<size_t> refined_cuts(PipelineOfCuts pipeline, const std::vector<std::vector<size_t>>& starts,
                                 bool finds_warmup);

}  // namespace whale
