#include "report/estimate.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/json.h"
#include "cluster/device_kinds.h"
#include "schedule/timing.h"
#include "simulate/simulate.h"
#include "task/unlike.h"

namespace whale {
namespace {

// Where a row of a pipeline's schedule takes its time ("backward.2", "backward.2/1").
double& part_of(std::vector<StageTimes>& times, std::string_view segment) {
  const size_t dot = segment.find('.');
  size_t stage = 0;
  std::from_chars(segment.data() + dot + 1, segment.data() + segment.size(), stage);
  WHALE_CHECK(dot != segment.npos && stage < times.size(), "segment '{}' is of a stage", segment);
  StageTimes& t = times[stage];
  return segment.starts_with("forward") ? t.forward : segment.starts_with("backward") ? t.backward : t.weight;
}

class Estimator {
 public:
  Estimator(const ShardedGraph& lg, const Plan& plan)
      : tasks_(lg.tasks),
        plan_(plan),
        entry_(plan.entries[0]),
        pipelined_(!lg.tasks.schedule.empty() && plan.micro_batches > 1),
        times_(lg.tasks.stages()),
        seconds_(seconds_by(lg.tasks.cost, plan, entry_)) {}

  Estimate run() {
    Estimate out{.strategy = plan_.strategy, .classes = {}};
    double whole = 0;                                          // outside of the body
    std::vector<std::pair<int32_t, const DeviceSpec*>> kinds;  // of each class: its program, a device like its own
    for (const DeviceRow& row : entry_.rows) {
      const DeviceSpec& device = plan_.devices[row.device];
      const auto at = std::ranges::find_if(
          kinds, [&](const auto& kind) { return kind.first == row.program && are_alike(*kind.second, device); });
      const auto number = static_cast<size_t>(at - kinds.begin());
      if (at == kinds.end()) kinds.emplace_back(row.program, &device), out.classes.emplace_back();
      Estimate::Class& c = out.classes[number];
      c.devices.push_back(row.device);
      if (c.devices.size() > 1) continue;
      c.memory = memory_of(plan_, entry_, static_cast<size_t>(row.program));
      whole = std::max(whole, add_seconds(row, c.seconds));
      out.seconds = std::max(out.seconds, c.seconds);
    }
    if (!pipelined_) {
      if (tasks_.meshes.size() > 1) out.seconds = std::max(out.seconds, in_turn());
      return out;
    }
    auto times = times_.begin();
    for (const PipelineSchedule& schedule : pipelines_of(tasks_, plan_.micro_batches)) {
      const std::vector<StageTimes> own(times, times + schedule.shape.total_stages());
      times += schedule.shape.total_stages();
      out.seconds = std::max(out.seconds, whole + run_clock(schedule, own).makespan);
    }
    return out;
  }

 private:
  // Of one run of the segment, of all or of what updates; queues run beside each other.
  double seconds_of(const Segment& segment, int32_t device, bool updates_only = false) const {
    std::array<double, kCarriers> of{};
    for (const Instruction& i : segment.instructions)
      if (!updates_only || i.phase == Phase::kUpdate)
        of[static_cast<size_t>(carrier_of(i.queue))] += seconds_(i, device);
    return *std::ranges::max_element(of);
  }

  // Stages wait for each other, but for their updates, where the whole batch goes through them at once.
  double in_turn() const {
    double passes = 0, updates = 0, longest = 0;  // of unlike replicas each is a pipeline of its own
    for (size_t m = 0; m < tasks_.meshes.size(); ++m) {
      const Mesh& mesh = tasks_.meshes[m];
      double slowest = 0;
      if (std::ranges::any_of(tasks_.replicas,
                              [&](const UnlikeReplica& r) { return r.stage == static_cast<int32_t>(m); }))
        passes = 0;
      for (const int32_t d : mesh.devices) {
        if (d < 0) continue;
        const DeviceRow& row = entry_.rows[d];
        const Program& program = entry_.programs[row.program];
        double all = 0, update = 0;
        for (const ScheduleRow& r : program.schedule) {
          const Segment& s = program.segments[r.segment];
          all += seconds_of(s, row.device), update += seconds_of(s, row.device, true);
        }
        slowest = std::max(slowest, all - update), updates = std::max(updates, update);
      }
      passes += slowest, longest = std::max(longest, passes);
    }
    return longest + updates;
  }

  // All of the device's rows; into the stages' times those of its slowest micro-batch. Returns what is done once.
  double add_seconds(const DeviceRow& row, double& all) {
    const Program& program = entry_.programs[row.program];
    std::vector<double> seconds;
    for (const Segment& s : program.segments) seconds.push_back(seconds_of(s, row.device));
    double once = 0;
    for (const ScheduleRow& r : program.schedule) {
      const double mine = seconds[r.segment];
      all += mine;
      if (r.whole) {
        once += mine;
      } else if (pipelined_) {
        double& slowest = part_of(times_, program.segments[r.segment].name);
        slowest = std::max(slowest, mine);
      }
    }
    return once;
  }

  const TaskGraphs& tasks_;
  const Plan& plan_;
  const Entry& entry_;
  bool pipelined_;
  std::vector<StageTimes> times_;
  Duration seconds_;
};

// What each of them may take; 0: not said.
int64_t least_memory(const Estimate::Class& c, const std::vector<DeviceSpec>& devices) {
  int64_t least = 0;
  for (const int32_t d : c.devices)
    if (const int64_t has = devices[d].memory_bytes; has > 0) least = least == 0 ? has : std::min(least, has);
  return least;
}

}  // namespace

Estimate estimate_of(const ShardedGraph& graph, const Plan& plan) { return Estimator(graph, plan).run(); }

int64_t missing_bytes(const Estimate& estimate, const std::vector<DeviceSpec>& devices) {
  int64_t missing = 0;
  for (const Estimate::Class& c : estimate.classes)
    if (const int64_t has = least_memory(c, devices); has > 0)
      missing = std::max(missing, c.memory.device.total() - has);
  return missing;
}

std::string estimate_text(const Estimate& estimate, const std::vector<DeviceSpec>& devices) {
  const auto bytes = [](int64_t n) { return bytes_text(static_cast<double>(n)); };
  std::string text = fmt::format(
      "estimate of {} on {} device(s): a step takes {}\n\n{:<23}{:>11}{:>11}{:>11}"
      "{:>12}{:>11}{:>11}{:>11}\n",
      estimate.strategy.empty() ? "replica" : estimate.strategy, devices.size(), seconds_text(estimate.seconds),
      "devices", "parameters", "gradients", "state", "activations", "together", "of", "own work");
  // Classes that differ in what is not printed are one line.
  std::vector<std::pair<std::string, std::vector<int32_t>>> lines;
  for (const Estimate::Class& c : estimate.classes) {
    const MemoryClasses& m = c.memory.device;
    const int64_t has = least_memory(c, devices);
    std::string line = fmt::format("{:>11}{:>11}{:>11}{:>12}{:>11}{:>11}{:>11}\n", bytes(m.parameters),
                                   bytes(m.gradients), bytes(m.state), bytes(m.buffers + m.copies + m.activations),
                                   bytes(m.total()), has > 0 ? bytes(has) : "", seconds_text(c.seconds));
    const auto known = std::ranges::find(lines, line, [](const auto& l) { return l.first; });
    std::vector<int32_t>& of =
        (known == lines.end() ? lines.emplace_back(std::move(line), std::vector<int32_t>{}) : *known).second;
    of.insert(of.end(), c.devices.begin(), c.devices.end());
  }
  for (auto& [line, of] : lines) {
    std::ranges::sort(of);
    text += fmt::format("{:<23}{}", devices_text(of, 1), line);
  }
  int64_t host = 0;
  for (const Estimate::Class& c : estimate.classes) host = std::max(host, c.memory.host.total());
  if (host > 0) text += fmt::format("\nin the host's memory at most {} a device\n", bytes(host));
  if (const int64_t missing = missing_bytes(estimate, devices); missing > 0)
    text += fmt::format("\nit does not fit: {} are missing\n", bytes(missing));
  return text;
}

std::string estimate_json(const Estimate& estimate, const std::vector<DeviceSpec>& devices) {
  const auto classes = [](const MemoryClasses& m) {
    return Json{{"parameters", m.parameters}, {"gradients", m.gradients}, {"state", m.state},
                {"buffers", m.buffers},       {"copies", m.copies},       {"activations", m.activations},
                {"total", m.total()}};
  };
  Json out{{"strategy", estimate.strategy}, {"seconds", estimate.seconds}, {"classes", Json::array()}};
  for (const Estimate::Class& c : estimate.classes)
    out["classes"].push_back({{"devices", c.devices},
                              {"seconds", c.seconds},
                              {"memory", classes(c.memory.device)},
                              {"host_memory", classes(c.memory.host)},
                              {"memory_limit", least_memory(c, devices)}});
  return out.dump(2);
}

}  // namespace whale
