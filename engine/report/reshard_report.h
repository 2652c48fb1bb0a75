// What the reshards of a laid-out program move, and what the other legal ways would have moved: the planner's choice,
// printable. Pure arithmetic on the shardings; nothing here changes a plan.
#pragma once

#include <string>
#include <vector>

#include "cost/cost.h"
#include "shard/sharded_graph.h"

namespace whale {

// One way of getting from a sharding to another, of the device that receives most in the first group along the axis.
struct ReshardWay {
  std::string name;    // "all_gather + local_slice"
  double bytes = 0;    // received
  int64_t rounds = 0;  // messages that wait for each other
  double seconds = 0;
};

// Reshards that differ in numbers inside the tensor's name only (those of repeated blocks) are one row.
struct ReshardRow {
  ReshardWay way;
  std::string tensor;  // of the first one: "block0.mlp.down.matmul"; "block*..." where there are several
  DType dtype{};
  Dims dims;             // global
  std::string axis;      // "replica"; "stage" between stages
  int64_t devices = 0;   // that take part
  std::string from, to;  // shardings: time, then the axes of the mesh
  Phase phase = Phase::kForward;
  int64_t count = 0;                     // in the program
  int64_t runs = 1;                      // of each, in a step: the micro-batches of the body
  std::vector<ReshardWay> alternatives;  // legal here, most expensive first
  double seconds() const { return way.seconds * static_cast<double>(count * runs); }  // of a step
  double bytes() const { return way.bytes * static_cast<double>(count * runs); }
};

// Most expensive first.
std::vector<ReshardRow> reshards_of(const ShardedGraph& graph);
std::string reshards_text(const std::vector<ReshardRow>& rows, const LinkRates& link);
std::string reshards_json(const std::vector<ReshardRow>& rows);

}  // namespace whale
