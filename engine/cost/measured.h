// What was measured of a model's ops, by kind of device (`whale profile`, docs/profiles.md). A point is one op of one
// shape; between points of one op that differ by a multiple in some of their dimensions, as those of several local
// batches do, times are interpolated in logarithms, so that the model is never asked which dimension is the batch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "cluster/device_spec.h"
#include "ops/op.h"

namespace whale {

// What a time is known by. `key`: the op, the types and ranks of its operands, attributes; `numbers`: what sizes it
// has, of operands, results and attributes, in an order that follows from the key.
struct OpShape {
  std::string key;
  std::vector<int64_t> numbers;
  OpCost cost;
};
OpShape shape_of(const OpView& op, const OpCost& cost);
// Of what is no op: a feed or a fetch of so many elements.
OpShape shape_of(std::string_view verb, DType dtype, int64_t elements, const OpCost& cost);

struct MeasuredPoint {
  std::vector<int64_t> numbers;
  double seconds = 0;
  OpCost cost;
  int64_t samples = 0;  // the local batch that it was measured at, for people; 0: not said
};

// Which devices have a record: those of a type of the table by that, CPU devices by their cores and by how many of the
// devices of a run share them.
struct MeasuredKind {
  std::string kind;  // "cpu", "null"; of a type "null"
  std::string type;  // "V100-32GB"
  int64_t cores = 0, sharing = 1;
  friend auto operator<=>(const MeasuredKind&, const MeasuredKind&) = default;
};
std::string to_string(const MeasuredKind& kind);  // "cpu with 1 core", "V100-32GB"
MeasuredKind kind_of(const DeviceSpec& device, int64_t sharing);

// Seconds of multiples of a size: piecewise linear in logarithms. Beyond the last point they grow with the size; below
// the first one they fall as they do behind it, and by no more than the size.
class MeasuredTimes {
 public:
  explicit MeasuredTimes(std::vector<std::pair<double, double>> points);  // (multiple, seconds), not empty
  double at(double multiple) const;

 private:
  std::vector<std::pair<double, double>> logarithms_;  // ascending
};

// What a training step took by phase, of one device at a local batch.
struct MeasuredStep {
  int64_t samples = 0;
  double forward = 0, backward = 0, update = 0, step = 0;
};

// What a layer of a model took, by Sailor's and Metis's profiles: no ops are told apart.
struct MeasuredLayer {
  double forward = 0, backward = 0, update = 0;
};
struct MeasuredLayers {
  int64_t ways = 1, samples = 1;      // of a split inside each layer; of a micro-batch
  std::vector<MeasuredLayer> layers;  // the embedding, each block, the head
};

class MeasuredDevice {
 public:
  MeasuredKind kind;
  std::string device, description;
  std::vector<MeasuredStep> steps;
  std::vector<MeasuredLayers> layers;
  std::map<std::string, std::vector<MeasuredPoint>> ops;  // by key

  // Points of this very op: its own shape, or shapes that differ by one multiple in the same dimensions.
  std::optional<MeasuredTimes> own(const OpShape& shape) const;
  // Those, or what shapes of the same op and type took for as much work by the rates. Nothing: the op was not measured.
  std::optional<MeasuredTimes> of(const OpShape& shape, double flops_per_second, double bytes_per_second) const;
  // How many times as long as forward a whole pass over a micro-batch takes, updates apart; 0: not measured.
  double passes(double samples) const;
  void index();  // to be called once all points are there

 private:
  std::map<std::string, std::vector<const MeasuredPoint*>, std::less<>> alike_;  // by op and type
};

class MeasuredProfile {
 public:
  std::string path;    // of the file that it was read from; empty: of none
  std::string model;   // its name; empty: of no model
  std::string digest;  // of the graph that was run, 16 hexadecimal digits
  std::vector<std::unique_ptr<MeasuredDevice>> devices;
  std::vector<std::string> doubts;  // what in it may be wrong (cost/plausible.h), for people

  const MeasuredDevice* of(const MeasuredKind& kind) const;
  std::string name() const;   // "the profile 'here.json'"
  std::string kinds() const;  // of which there are records, as text
  bool of_ops() const;        // false: of layers alone
};

inline constexpr const char* kProfileSchema = "whale.profile/1";
inline constexpr double kMostMeasuredSeconds = 24 * 3600;  // of one op, layer or step: more than a day is another unit
Json json_of(const MeasuredProfile& profile);
// Throws invalid for what is none and for figures that cannot be right. nullptr: the JSON has figures of a machine
// alone.
std::shared_ptr<MeasuredProfile> measured_of(const Json& json);

// Of an op whose rows are done in so many equal parts, one after the other: as measured, else by the rates.
double seconds_in_parts(const OpView& op, const DeviceRates& rates, double parts);

}  // namespace whale
