// Plans pipelines on a cluster of several types of devices: which devices, how many replicas of which kind, stages,
// cuts, splits, micro-batches, for the shortest step (pipeline_price.h).
#pragma once

#include <cstdint>

#include "search/pipeline_price.h"

namespace whale {

struct ClusterSearch {
  int most_stages = 8;
  int exhaustive_stages =
      0;  // up to so many stages, all cuts are tried instead of those that are even for some replica
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

// The cluster without one device of a node of this type; with one that takes `slower` times as long (its node becomes a
// type of its own, for splits wait for it).
ClusterProblem without_device(ClusterProblem problem, int type);
ClusterProblem with_slow_node(ClusterProblem problem, int type, double slower);

// The present plan's cuts and those near them, for a device that became slow: used with its node, or left idle.
FoundPipelines replan_slow(const ClusterProblem& problem, int type, double slower, const ClusterPlan& present,
                           double within_seconds);

}  // namespace whale
