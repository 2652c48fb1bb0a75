// Pipeline schedules as data: in which order each device of a pipeline works through its micro-batches. A schedule is a
// pure function of (stages, micro-batches, chunks); schedules.def lists them all.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace whale {

enum class WorkKind : uint8_t {
  kForward,
  kBackward,  // the input gradient; the whole backward pass where the schedule does not split it
  kWeight,    // the weight gradient, only in schedules that split the backward pass
};

struct WorkItem {
  WorkKind kind{};
  int chunk = 0;
  int micro_batch = 0;
  friend bool operator==(const WorkItem&, const WorkItem&) = default;
};

// p stages (one device group each), m micro-batches, v chunks of the model per device.
struct PipelineShape {
  int stages = 1;
  int micro_batches = 1;
  int chunks = 1;
  int virtual_stages() const { return stages * chunks; }
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

// Which virtual stage (its position in the model, 0 first) is chunk c of device d.
enum class ChunkPlacement : uint8_t {
  kLoop,  // c p + d: every chunk runs over the devices in the same direction
  kVee,   // odd chunks run backwards: first and last virtual stage of a pair of chunks share device 0
};

using DeviceOrders = std::vector<std::vector<WorkItem>>;  // [device][position]

struct PipelineSchedule {
  std::string name;
  PipelineShape shape;
  ChunkPlacement placement{};
  bool split_backward = false;
  DeviceOrders devices;
};

// One row of schedules.def.
struct ScheduleRule {
  std::string_view name;
  DeviceOrders (*orders)(const PipelineShape&);
  int min_chunks = 1;  // also the default
  int max_chunks = 1;
  ChunkPlacement placement{};
  bool split_backward = false;
  std::string_view doc;
};

inline constexpr int kAnyChunks = 1 << 20;

std::span<const ScheduleRule> schedule_rules();
const ScheduleRule& schedule_rule(std::string_view name);  // throws invalid with the names there are
std::string schedule_names();                              // "gpipe, 1f1b, ..."

// Any stages >= 1 and micro_batches >= 1; chunks 0 means the rule's least. Throws invalid.
PipelineSchedule make_schedule(std::string_view name, int stages, int micro_batches, int chunks = 0);

// An item and the device that runs it.
struct WorkSite {
  int device = 0;
  WorkItem item;
  friend bool operator==(const WorkSite&, const WorkSite&) = default;
};

int virtual_stage(const PipelineSchedule& schedule, int device, int chunk);
WorkSite site_at(const PipelineSchedule& schedule, WorkKind kind, int virtual_stage, int micro_batch);

// Who takes what this item makes: the next virtual stage after a forward, the one before after a backward. None at the
// ends of the model and for weight gradients. It is a message only where the devices differ.
std::optional<WorkSite> receiver_of(const PipelineSchedule& schedule, const WorkSite& site);
// Everything that must have ended before this item starts, on any device.
std::vector<WorkSite> needs_of(const PipelineSchedule& schedule, const WorkSite& site);

// How many micro-batches of each chunk are alive at once on a device with this order: slots go round. `between`: values
// that pass from one chunk of the device to another live until the last chunk is done with the micro-batch, so all
// chunks count as chunk 0.
std::map<int, int64_t> alive_at_once(const std::vector<WorkItem>& order, bool between);

// "F3", "B0", "W2" with one chunk, "F3.1" (micro-batch 3, chunk 1) with several.
std::string to_string(const PipelineSchedule& schedule, const WorkItem& item);
// One line per device: "0: F0 F1 B0 B1".
std::string to_string(const PipelineSchedule& schedule);

}  // namespace whale
