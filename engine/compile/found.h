// What a search found: candidates with what they would take, and why they lost.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "compile/compile.h"

namespace whale {

struct Candidate {
  std::string strategy;
  PlanOptions options;
  int64_t accumulation = 0;      // micro-batches without a pipeline; 0: the graph's
  std::vector<int32_t> devices;  // of the cluster, ascending; others stay idle
  std::string of;                // which they are, where they are not all: "V100-32GB alone"
  std::vector<Room> rooms = {};  // by which shares of unlike devices were dealt (CompileOptions),
  StageLimits stages = {};       // and stages cut
};

struct Judged {
  Candidate candidate;
  double seconds = 0;      // of a step; 0: it was not planned that far
  bool simulated = false;  // seconds are the simulator's, not the estimate's
  bool walked = false;     // the simulator was asked, whether it could or not
  int64_t bytes = 0;       // of the fullest device
  bool at_least = false;   // bytes and missing: nobody planned that far
  int64_t missing = 0;     // bytes, on the device that lacks most; 0: it fits
  double price = 0;        // of a step, where devices have prices; 0: they have none
  bool allowed = false;    // within what was asked for
  std::string lost;        // why it is not the winner; empty: it is
};

struct Found {
  std::vector<Judged> list;  // the winner first, then what fits by rank, then what does not
  int64_t batch = 0;
  size_t not_tried = 0;  // candidates for which there was no time
  const Judged& winner() const { return list.front(); }
  bool fits() const { return !list.empty() && list.front().lost.empty(); }
};

class Judge;
// The winner first, then what is allowed by its worth, then what fits, then what does not by what is missing.
void rank(Found& found, const Judge& judge);
// Fills in why all but the winner lost.
void say_why(Found& found, const Judge& judge, const SearchOptions& asked);

std::string whole_text(const Judged& judged);  // the strategy with its options and devices
std::string found_text(const Found& found, const std::vector<DeviceSpec>& devices);
Json json_of(const Judged& judged, const std::vector<DeviceSpec>& devices);
Json found_json(const Found& found, const std::vector<DeviceSpec>& devices);
// Of those that fit and are within what was asked for: no other is as fast and as cheap. By rising price.
std::vector<Judged> pareto_front(const Found& found);

}  // namespace whale
