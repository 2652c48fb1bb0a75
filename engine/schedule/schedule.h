// Pipeline schedules as data: in which order each device of a pipeline works through its micro-batches. A schedule is a
// pure function of (stages, micro-batches, virtual stages); schedules.def lists them all.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/small_vector.h"

namespace whale {

enum class WorkKind : uint8_t {
  kForward,
  kBackward,  // the input gradient; the whole backward pass where the schedule does not split it
  kWeight,    // the weight gradient, only in schedules that split the backward pass
};

struct WorkItem {
  WorkKind kind{};
  int virtual_stage = 0;
  int micro_batch = 0;
  friend bool operator==(const WorkItem&, const WorkItem&) = default;
};

// p stages (one device group each), m micro-batches, v virtual stages per device.
struct PipelineShape {
  int stages = 1;
  int micro_batches = 1;
  int virtual_stages = 1;
  // Of each stage: forward passes before the first backward one, so that as many micro-batches are alive on it at most.
  std::vector<int> warmup = {};  // empty: as the schedule has it
  int total_stages() const { return stages * virtual_stages; }
  friend bool operator==(const PipelineShape&, const PipelineShape&) = default;
};

// Which stage of the model (0 first) is virtual stage c of device d.
enum class VirtualStagePlacement : uint8_t {
  kLoop,  // c p + d: every virtual stage runs over the devices in the same direction
  kVee,   // odd virtual stages run backwards: first and last stage of a pair of virtual stages share device 0
};

using WorkOrders = std::vector<std::vector<WorkItem>>;  // [device][position]

struct PipelineSchedule {
  std::string name;
  PipelineShape shape;
  VirtualStagePlacement placement{};
  bool split_backward = false;
  WorkOrders devices;
};

// One row of schedules.def.
struct ScheduleRule {
  std::string_view name;
  WorkOrders (*orders)(const PipelineShape&);
  int min_virtual_stages = 1;  // also the default
  int max_virtual_stages = 1;
  VirtualStagePlacement placement{};
  bool split_backward = false;
  bool takes_warmup = false;  // how deep its warm-up is may be said
  std::string_view doc;
};

inline constexpr int kAnyVirtualStages = 1 << 20;

std::span<const ScheduleRule> schedule_rules();
std::string schedule_names();  // "gpipe, 1f1b, ..."

// A schedule as scopes and tasks have it: a name, and how deep the warm-up of each stage is where somebody says so:
// "1f1b", "1f1b[6,4,2,1]". Without a name, the default one is meant: "[6,4,2,1]".
struct ScheduleText {
  std::string name;
  std::vector<int64_t> warmup;
};
ScheduleText read_schedule(std::string_view text);  // throws invalid, with the names there are
std::string to_string(const ScheduleText& schedule);
const ScheduleRule& schedule_rule(std::string_view text);  // by the name

// Whether the depths are those of so many stages in a schedule that takes them: none deeper than the one before, which
// would wait for a forward pass that stands behind a backward one that waits for it. Throws invalid.
void check_warmup(const ScheduleText& schedule, int64_t stages);

// Any stages >= 1 and micro_batches >= 1; virtual stages 0 means the rule's least. Depths are cut to the micro-batches
// there are. Throws invalid.
PipelineSchedule make_schedule(std::string_view text, int stages, int micro_batches, int virtual_stages = 0);

// An item and the device that runs it.
struct WorkSite {
  int device = 0;
  WorkItem item;
  friend bool operator==(const WorkSite&, const WorkSite&) = default;
};

int model_stage(const PipelineSchedule& schedule, int device, int virtual_stage);
WorkSite site_at(const PipelineSchedule& schedule, WorkKind kind, int model_stage, int micro_batch);

// Who takes what this item makes: the next stage of the model after a forward, the one before after a backward. None at
// the ends of the model and for weight gradients. It is a message only where the devices differ.
std::optional<WorkSite> receiver_of(const PipelineSchedule& schedule, const WorkSite& site);
// Everything that must have ended before this item starts, on any device.
using WorkNeeds = SmallVector<WorkSite, 2>;
WorkNeeds needs_of(const PipelineSchedule& schedule, const WorkSite& site);

// How many micro-batches of each virtual stage are alive at once on a device with this order: versions go round.
// `between`: values that pass from one virtual stage of the device to another live until the last virtual stage is done
// with the micro-batch, so all virtual stages count as virtual stage 0.
std::map<int, int64_t> alive_at_once(const std::vector<WorkItem>& order, bool between);

// "F3", "B0", "W2" with one virtual stage, "F3.1" (micro-batch 3, virtual stage 1) with several.
std::string to_string(const PipelineSchedule& schedule, const WorkItem& item);
// One line per device: "0: F0 F1 B0 B1".
std::string to_string(const PipelineSchedule& schedule);

}  // namespace whale
