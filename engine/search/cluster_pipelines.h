// Plans pipelines on a cluster of several types of devices: which devices, how many replicas of which kind, stages,
// cuts, splits, micro-batches, for the shortest step (pipeline_price.h).
#pragma once

#include <cstdint>

#include "search/pipeline_price.h"

namespace whale {

struct ClusterSearch {
  int least_stages = 1, most_stages = 16;
  double within_seconds = 0;  // no new cuts are tried after so long; 0: until none is left
  bool near_only = false;     // of a present plan: only its cuts and those near them
  double worth = 1e-4;        // gains below this share of a step are not looked for
};

struct FoundPipelines {
  ClusterPlan plan;
  ClusterPrice price;
  double seconds = 0;      // of searching
  int64_t cuts_tried = 0;  // ways to cut the model
};

// `present`: the plan that runs now, for another cluster or the same one; the search begins with its cuts. Throws
// invalid where nothing fits.
FoundPipelines plan_pipelines(const ClusterProblem& problem, const ClusterSearch& search = {},
                              const ClusterPlan* present = nullptr);

}  // namespace whale
