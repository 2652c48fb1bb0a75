// Pipelines on a cluster of several types of devices, and what a step of them costs: sums and a few maxima over tables
// that were measured, so that plans of different planners are compared by one rule (docs/validation-planners.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace whale {

// Bandwidth in GB/s as a polynomial of log2(MB), highest power first.
struct BandwidthCurve {
  std::vector<double> coefficients;
  double seconds(double bytes) const;  // 0 for nothing sent
};

struct ClusterDevices {
  std::string name;
  std::vector<int> nodes;  // devices at hand in each node
  double memory_bytes = 0;
  double slower = 1;  // computes this many times as long as its profile says
};

// Times of all layers, of one type, split over so many devices, for micro-batches of one size.
struct LayerTimes {
  int type = 0, split = 1;
  int64_t micro_batch = 1;
  std::vector<double> seconds;         // forward and backward, by layer
  std::vector<double> update_seconds;  // by layer
};

struct ClusterProblem {
  int64_t batch = 1;
  int layers = 0;
  std::vector<ClusterDevices> types;
  std::vector<int> splits;                         // degrees of tensor parallelism, ascending, powers of two from 1
  std::vector<LayerTimes> times;                   // what is not here cannot be planned
  std::vector<std::vector<double>> parameters;     // elements on one device, by [place in splits][layer]
  std::vector<std::vector<double>> activations;    // elements kept a sample on one device, likewise
  std::vector<double> output_bytes;                // of a sample, by layer
  std::vector<double> weight_bytes;                // of the whole layer
  std::vector<std::vector<BandwidthCurve>> sends;  // by [type * splits + split] of sender and of receiver
  double bytes_per_parameter = 24;                 // weights, gradients, state and copies
  double bytes_per_activation = 4;
  std::vector<double> reserved_bytes;  // by place in splits
  double bucket_bytes = 500e6;         // what one all-reduce of gradients takes at most
  int split_index(int split) const;    // throws for a degree that is none of splits
  const BandwidthCurve& send(int from, int from_split, int to, int to_split) const;  // by places in splits
};

struct StagePlace {
  int type = 0, split = 1;
  bool operator==(const StagePlace&) const = default;
};

// Replicas that are alike: each runs `micro_batches` of `micro_batch` samples a step.
struct ReplicaClass {
  int64_t replicas = 0, micro_batches = 0, micro_batch = 0;
  std::vector<StagePlace> stages;
};

// All replicas have the same cuts: stage i has the layers [cuts[i], cuts[i + 1]).
struct ClusterPlan {
  std::vector<int> cuts;
  std::vector<ReplicaClass> classes;
  int stages() const { return static_cast<int>(cuts.size()) - 1; }
  int64_t replicas() const;
};

struct ClusterPrice {
  double step_seconds = 0;
  double sync_seconds = 0;            // of step_seconds: the all-reduce of gradients
  std::vector<double> class_seconds;  // from the first micro-batch to the update
  std::vector<double> peak_bytes;     // of the fullest device, by class
};

// Throws invalid for a plan that has not this problem's layers or batch, more devices than there are, or that does not
// fit.
ClusterPrice price(const ClusterProblem& problem, const ClusterPlan& plan);

// Bytes of a device of a stage. `after` stages follow it.
double stage_bytes(const ClusterProblem& problem, int begin, int end, int split_at, int64_t micro_batch, int after);

// Seconds of a ring all-reduce of so many bytes among so many replicas.
double ring_seconds(const ClusterProblem& problem, double bytes, int64_t replicas, const BandwidthCurve& curve);

// Throws invalid for tables that do not belong together, with what is missing.
void verify(const ClusterProblem& problem);

}  // namespace whale
