// Cutting a model into the stages of a pipeline where no `stage` is written.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cost/cost.h"
#include "ir/graph.h"

namespace whale {

// Of a stage: its parameters, counted where they are read first, and its results that depend on samples.
struct StageBytes {
  double parameters = 0, values = 0;
};
// `stage_of`: of every op of the graph; -1: of none.
std::vector<StageBytes> bytes_of_stages(const Graph& graph, const std::vector<int32_t>& stage_of, size_t stages);

// Of a device: what a stage may take of its memory, and what it holds for each byte of the stage.
struct StageRoom {
  double bytes = 0, of_parameters = 0, of_values = 0;
  double full(const StageBytes& stage) const {  // above 1: too full
    return (of_parameters * stage.parameters + of_values * stage.values) / bytes;
  }
  friend bool operator==(const StageRoom&, const StageRoom&) = default;
};
using StageRooms = std::vector<std::vector<StageRoom>>;  // of each stage's devices, those that say how much they have

// kWork: so that the slowest stage is fastest. The others: made better by the clock of the pipeline, where its devices
// are known, with the usual warm-up or with a deeper one that is found for them.
enum class CutsBy : uint8_t { kWork, kClock, kDeeperClock };

// What is known of where the stages of a model are cut.
struct StageLimits {
  StageRooms rooms = {};  // of all stages of the model; empty: memory is not looked at
  CutsBy cuts = CutsBy::kWork;
  Ints begins = {};  // ops at which stages begin that are not written (TaskGraphs::stage_begins); empty: to be found
};

// From a stage to the next one. While a device sends it computes more slowly (cost/interference.h): a second of sending
// takes so much of its work, and itself as much longer.
struct StageBorder {
  LinkRates link;
  struct Sender {
    double takes = 0, longer = 1;
  };
  Sender forward = {}, backward = {};  // the device before it; behind it
};

// Of a pipeline that runs 1F1B over devices that are known.
struct StageClock {
  int micro_batches = 1;
  std::vector<std::vector<int>> warmups = {};  // which it may have
  bool finds_warmup = false;                   // and others, found for the cuts
  double senders = 1;                          // of a stage, over all pipelines side by side
  std::vector<StageBorder> borders = {};
};

// For every op of `ops` (in order) the number of its stage, 0 .. stages - 1, never decreasing along the data: runs of
// ops so that the slowest stage has as little to compute as possible, cut where least is alive (dynamic programming
// over the places where few bytes cross). `keep_groups`: never between a value and the elementwise op that alone reads
// it, which may be fused. Throws when there are too few ops; `virtual_stages`: stages of a device, for that message.
// `rates`: of the slowest device of each stage; empty: all are as the cost model has them. `rooms`: of each stage,
// whose devices must have room for it; where no cut leaves room for all, the fullest device is as full as it must be.
// `parts`: in which the batch goes through them, micro-batches and devices of a stage: small ones take longer in sum.
// `clock`: what the cut is made better by at last (refine_cuts.h), where rooms are not looked at.
std::vector<int32_t> cut_stages(const Graph& graph, const std::vector<OpId>& ops, int64_t stages,
                                int64_t virtual_stages, const CostModel& cost, bool keep_groups = false,
                                const std::vector<DeviceRates>& rates = {}, const StageRooms& rooms = {},
                                double parts = 1, const std::optional<StageClock>& clock = {});

}  // namespace whale
