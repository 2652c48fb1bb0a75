#include "report/page.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "cluster/devices.h"
#include "plan/figures.h"
#include "report/device_classes.h"
#include "report/measured.h"
#include "report/predicted_trace.h"
#include "report/step_timeline.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

// What a page holds at most, so that it stays small whatever the plan is.
constexpr size_t kMostNodes = 128;  // kinds of nodes
constexpr size_t kMostReshards = 100;
constexpr size_t kMostWays = 4;
constexpr size_t kMostNotes = 40;
constexpr size_t kTimelineBytes = 600'000;
constexpr size_t kMostDevicesDrawn = 96;  // one by one
constexpr double kTicks = 1 << 24;        // of the longest step: times are whole numbers of them

Json json_of(const MemoryClasses& m) {
  return {{"parameters", m.parameters},   {"gradients", m.gradients}, {"state", m.state},
          {"activations", m.activations}, {"buffers", m.buffers},     {"copies", m.copies}};
}

class PageData {
 public:
  PageData(const Plan& plan, const std::vector<std::string>& traces) : plan_(plan) {
    if (plan.entries.empty())
      throw error(Code::kFailedPrecondition, "plan '{}' has no entries: there is nothing to show", plan.model);
    if (!traces.empty()) measured_ = measured_of(plan, traces);
    if (is_of_null_devices(plan)) measured_.reset();  // it is the prediction
    entry_ = &plan.entries[0];
    if (measured_ && !measured_->entry.empty()) {
      if (const Entry* same = plan.find_entry(measured_->entry, measured_->batch))
        entry_ = same;
      else
        remarks_.push_back(
            fmt::format("the measured timeline is of {} with batch {}, which the plan does not hold: "
                        "beside it stands {} with batch {}",
                        measured_->entry, measured_->batch, entry_->name, entry_->batch));
    }
    times_ = times_of(plan, *entry_, kMostSimulated);
    if (times_)
      predicted_ = timeline_of(plan, *entry_, *times_);
    else
      remarks_.push_back("a step of this plan is too long to be simulated for a page: no prediction is drawn");
    classes_ = classes_of(plan, *entry_, times_ ? &*times_ : nullptr);
  }

  Json made(const std::vector<ReshardRow>& reshards) {
    Json out = head();
    out["classes"] = Json::array();
    for (const DeviceClass& c : classes_) {
      if (out["classes"].size() == kMostClasses) break;
      out["classes"].push_back(class_json(c));
    }
    out["classes_left_out"] = classes_.size() - out["classes"].size();
    out["nodes"] = nodes();
    out["activities"] = kActivityNames;
    Json queues = Json::array();
    for (const QueueDef& queue : kQueueDefs) queues.push_back(queue.name);
    out["queues"] = std::move(queues);
    out["predicted"] = times_ ? timeline(*predicted_, false) : Json();
    out["measured"] = measured_ ? timeline(measured_->timeline, true) : Json();
    out["reshards"] = Json::array();
    for (const ReshardRow& row : reshards) {
      if (out["reshards"].size() == kMostReshards) break;
      out["reshards"].push_back(reshard(row));
    }
    out["reshards_left_out"] = reshards.size() - out["reshards"].size();
    out["notes"] = Json::array();
    for (const auto& list : {remarks_, plan_.notes})
      for (const std::string& note : list)
        if (out["notes"].size() < kMostNotes) out["notes"].push_back(note);
    return out;
  }

 private:
  Json head() const {
    return {{"format", 1},
            {"model", plan_.model},
            {"strategy", plan_.strategy},
            {"entry", entry_->name},
            {"batch", entry_->batch},
            {"micro_batches", plan_.micro_batches},
            {"precision", kPrecisions[static_cast<size_t>(plan_.precision)]},
            {"zero", plan_.options.zero},
            {"devices", plan_.devices.size()},
            {"stages", plan_.meshes.size()}};
  }

  const QueueTrack* track(const StepTimeline& timeline, int32_t device, Queue queue) const {
    for (const QueueTrack& t : timeline.tracks)
      if (t.device == device && t.queue == queue) return &t;
    return nullptr;
  }
  // The device whose events stand for this one's.
  int32_t walker(int32_t device) const {
    const std::vector<int32_t>& all = times_->classes;
    return static_cast<int32_t>(std::find(all.begin(), all.end(), all[device]) - all.begin());
  }

  // What the compute queue does besides waiting for others.
  static double computing(const StepTimeline& timeline, const QueueTrack& track) {
    const std::array<double, kActivities> of = busy_of(timeline, track);
    return std::accumulate(of.begin(), of.end(), 0.0) - of[static_cast<size_t>(Activity::kCommunication)];
  }

  // Seconds by activity, of all queues; and those in which the compute queue works.
  static Json busy(const StepTimeline& timeline, int32_t device) {
    std::array<double, kActivities> all{};
    double compute = 0;
    for (const QueueTrack& t : timeline.tracks) {
      if (t.device != device) continue;
      const std::array<double, kActivities> of = busy_of(timeline, t);
      for (size_t a = 0; a < kActivities; ++a) all[a] += of[a];
      if (t.queue == Queue::kCompute) compute = computing(timeline, t);
    }
    Json activities = Json::object();
    for (size_t a = 0; a < kActivities; ++a)
      if (all[a] > 0) activities[kActivityNames[a]] = all[a];
    return {{"compute", compute}, {"activities", std::move(activities)}};
  }

  // Mean over the devices of a class that were measured.
  Json measured_busy(const DeviceClass& c) const {
    double compute = 0, least = INFINITY, most = 0;
    int64_t devices = 0;
    for (const QueueTrack& t : measured_->timeline.tracks) {
      if (t.queue != Queue::kCompute || !std::binary_search(c.devices.begin(), c.devices.end(), t.device)) continue;
      const double seconds = computing(measured_->timeline, t);
      compute += seconds, ++devices;
      least = std::min(least, seconds), most = std::max(most, seconds);
    }
    if (devices == 0) return nullptr;
    return {
        {"devices", devices}, {"compute", compute / static_cast<double>(devices)}, {"least", least}, {"most", most}};
  }

  Json class_json(const DeviceClass& c) {
    const auto first = static_cast<size_t>(c.first);
    const DeviceRow& row = entry_->rows[first];
    const DeviceSpec& spec = plan_.devices[first];
    const Program& p = entry_->programs[c.program];
    const auto [known, fresh] = memory_.try_emplace(c.program);
    if (fresh) known->second = memory_of(plan_, *entry_, static_cast<size_t>(c.program));
    MemoryClasses memory = known->second.device;
    const MemoryClasses own = variables_of_device(plan_, c.first);
    memory.parameters = own.parameters, memory.state = own.state, memory.buffers = own.buffers;
    std::vector<int32_t> nodes;
    for (const int32_t d : c.devices) nodes.push_back(plan_.devices[d].node);
    std::sort(nodes.begin(), nodes.end());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    const StepFigures figures = step_of(p);
    Json out = {{"devices", devices_text(c.devices, 6)},
                {"count", c.devices.size()},
                {"first", c.first},
                {"kind", kind_text(spec)},
                {"name", c.devices.size() == 1 ? to_string(spec) : kind_text(spec)},
                {"nodes", devices_text(nodes, 6)},
                {"stage", row.mesh},
                {"samples", samples_of(*entry_, row)},
                {"flops", figures.flops},
                {"collectives", figures.collectives},
                {"communicated", figures.communicated},
                {"messages", figures.messages},
                {"memory", json_of(memory)},
                {"memory_total", memory.total()},
                {"memory_bytes", spec.memory_bytes},
                {"host_memory", known->second.host.total()},
                {"parts", parts_of(plan_, *entry_, c)},
                {"predicted", times_ ? busy(*predicted_, walker(c.first)) : Json()},
                {"measured", measured_ ? measured_busy(c) : Json()},
                {"why", why(c, figures, memory, spec)}};
    return out;
  }

  // One sentence for each reason that is known.
  Json why(const DeviceClass& c, const StepFigures& figures, const MemoryClasses& memory, const DeviceSpec& spec) {
    Json out = Json::array();
    const DeviceRow& row = entry_->rows[c.first];
    if (plan_.meshes.size() > 1) {
      const double all = total_flops();
      const double stage = stage_flops(row.mesh);
      out.push_back(fmt::format("stage {} of {}{}", row.mesh, plan_.meshes.size(),
                                all > 0 ? fmt::format(": {:.0f} % of the step's FLOPs", 100 * stage / all) : ""));
    }
    if (figures.kernels == 0) out.push_back("computes nothing");
    if (times_ && times_->seconds > 0) {
      const double load = compute_seconds(c) / times_->seconds;
      double most = 0;
      for (const DeviceClass& other : classes_) most = std::max(most, compute_seconds(other) / times_->seconds);
      if (classes_.size() > 1 && load >= most * (1 - 1e-9) && load > 0)
        out.push_back(fmt::format("the busiest, at work for {:.0f} % of the step: the others wait for it", 100 * load));
      else
        out.push_back(fmt::format("at work for {:.0f} % of the step", 100 * load));
    }
    if (plan_.options.zero > 0 && memory.state > 0)
      out.push_back(fmt::format("ZeRO {} cuts what it keeps", plan_.options.zero));
    if (spec.memory_bytes > 0)
      out.push_back(fmt::format("{} of its {}: {:.0f} %", bytes_text(static_cast<double>(memory.total())),
                                bytes_text(static_cast<double>(spec.memory_bytes)),
                                100 * static_cast<double>(memory.total()) / static_cast<double>(spec.memory_bytes)));
    return out;
  }

  double compute_seconds(const DeviceClass& c) {
    const auto [known, fresh] = compute_.try_emplace(c.first);
    if (!fresh) return known->second;
    const QueueTrack* t = track(*predicted_, walker(c.first), Queue::kCompute);
    if (t == nullptr) return 0;
    return known->second = computing(*predicted_, *t);
  }
  double stage_flops(int32_t mesh) {
    if (flops_.empty()) {
      flops_.resize(plan_.meshes.size());
      std::vector<double> of_program;
      for (const Program& p : entry_->programs) of_program.push_back(step_of(p).flops);
      for (const DeviceRow& row : entry_->rows) flops_[row.mesh] += of_program[row.program];
    }
    return flops_[mesh];
  }
  double total_flops() {
    stage_flops(0);
    return std::accumulate(flops_.begin(), flops_.end(), 0.0);
  }

  // Nodes with the same devices in the same order are one, and of many devices those of a class in a node.
  Json nodes() const {
    std::vector<size_t> class_of(plan_.devices.size());
    for (size_t c = 0; c < classes_.size(); ++c)
      for (const int32_t d : classes_[c].devices) class_of[d] = c;
    std::map<int, std::vector<int32_t>> by_node;
    for (size_t d = 0; d < plan_.devices.size(); ++d) by_node[plan_.devices[d].node].push_back(static_cast<int32_t>(d));
    const bool each = plan_.devices.size() <= kMostDevicesDrawn;
    struct Alike {
      std::vector<int32_t> nodes, devices;
      Json slots;
    };
    std::map<std::vector<size_t>, size_t> numbers;
    std::vector<Alike> kinds;
    for (const auto& [node, devices] : by_node) {
      std::vector<size_t> key;
      for (const int32_t d : devices) key.push_back(class_of[d]);
      if (each) key.push_back(classes_.size() + static_cast<size_t>(node));  // nothing is folded
      const auto [at, fresh] = numbers.try_emplace(key, kinds.size());
      if (fresh) {
        Json slots = Json::array();
        std::map<size_t, size_t> slot_of;  // by class
        for (const int32_t d : devices) {
          const size_t c = class_of[d];
          const auto [slot, first] = slot_of.try_emplace(c, slots.size());
          if (!each && !first)
            slots[slot->second]["count"] = slots[slot->second]["count"].get<size_t>() + 1;
          else
            slots.push_back({{"class", c}, {"device", d}, {"count", 1}});
        }
        if (slots.size() > kMostDevicesDrawn) slots.erase(slots.begin() + kMostDevicesDrawn, slots.end());
        kinds.push_back({{}, devices, std::move(slots)});
      }
      kinds[at->second].nodes.push_back(node);
    }
    Json list = Json::array();
    for (const Alike& kind : kinds) {
      if (list.size() == kMostNodes) break;
      list.push_back({{"nodes", devices_text(kind.nodes, 6)},
                      {"count", kind.nodes.size()},
                      {"devices", kind.devices.size()},
                      {"slots", kind.slots}});
    }
    return {{"list", list}, {"left_out", kinds.size() - list.size()}, {"each", each}};
  }

  // Tracks of the classes that are drawn. Spans are flat: label, start, length, micro-batch; times in ticks.
  Json timeline(const StepTimeline& whole, bool measured) const {
    StepTimeline drawn;
    drawn.seconds = whole.seconds;
    std::vector<std::pair<size_t, int32_t>> of;  // class, device
    for (size_t c = 0; c < std::min(classes_.size(), kMostClasses); ++c) {
      const std::optional<int32_t> device =
          measured ? first_measured(classes_[c]) : std::optional(walker(classes_[c].first));
      if (!device) continue;
      for (const QueueTrack& t : whole.tracks) {
        if (t.device != *device) continue;
        QueueTrack& to = drawn.tracks.emplace_back(QueueTrack{t.device, t.queue, {}});
        for (LabelledSpan s : t.spans) {
          s.label = drawn.label_of(whole.labels[s.label]);
          to.spans.push_back(s);
        }
        of.emplace_back(c, t.device);
      }
    }
    const StepTimeline shown = folded(drawn, kTimelineBytes);
    const double tick = shown.seconds > 0 ? shown.seconds / kTicks : 1;
    const auto ticks = [&](double seconds) { return static_cast<int64_t>(std::llround(seconds / tick)); };
    Json labels = Json::array(), tracks = Json::array();
    for (const SpanLabel& l : shown.labels)
      labels.push_back(
          Json::array({l.name, l.op, l.scope, static_cast<int>(l.activity), l.count, json_value(l.flops)}));
    for (size_t t = 0; t < shown.tracks.size(); ++t) {
      Json spans = Json::array();
      for (const LabelledSpan& s : shown.tracks[t].spans) {
        const int64_t begin = ticks(s.start);
        spans.insert(spans.end(), {s.label, begin, std::max<int64_t>(0, ticks(s.end) - begin), s.micro_batch});
      }
      tracks.push_back({{"class", of[t].first},
                        {"device", of[t].second},
                        {"queue", static_cast<int>(shown.tracks[t].queue)},
                        {"spans", std::move(spans)}});
    }
    const size_t before = spans_in(drawn), after = spans_in(shown);
    return {{"seconds", shown.seconds}, {"tick", tick},     {"instructions", before},
            {"spans", after},           {"labels", labels}, {"tracks", tracks}};
  }
  static size_t spans_in(const StepTimeline& timeline) {
    size_t n = 0;
    for (const QueueTrack& t : timeline.tracks) n += t.spans.size();
    return n;
  }
  std::optional<int32_t> first_measured(const DeviceClass& c) const {
    for (const QueueTrack& t : measured_->timeline.tracks)
      if (std::binary_search(c.devices.begin(), c.devices.end(), t.device)) return t.device;
    return std::nullopt;
  }

  static Json reshard(const ReshardRow& row) {
    Json ways = Json::array();
    // The cheapest ones say most about the choice.
    for (size_t w = row.alternatives.size(); w-- > 0 && ways.size() < kMostWays;) {
      const ReshardWay& way = row.alternatives[w];
      ways.push_back({{"name", way.name}, {"bytes", json_value(way.bytes)}, {"seconds", json_value(way.seconds)}});
    }
    return {{"tensor", brief(row.tensor)},
            {"dtype", name_of(row.dtype)},
            {"dims", row.dims},
            {"axis", row.axis},
            {"devices", row.devices},
            {"from", row.from},
            {"to", row.to},
            {"phase", name_of(row.phase)},
            {"way", row.way.name},
            {"times", row.count * row.runs},
            {"bytes", json_value(row.bytes())},
            {"seconds", json_value(row.seconds())},
            {"alternatives", std::move(ways)}};
  }

  const Plan& plan_;
  const Entry* entry_ = nullptr;
  std::vector<std::string> remarks_;
  std::optional<StepTimes> times_;
  std::optional<StepTimeline> predicted_;
  std::optional<Measured> measured_;
  std::vector<DeviceClass> classes_;
  std::map<int32_t, MemoryFigures> memory_;
  std::map<int32_t, double> compute_;
  std::vector<double> flops_;  // by mesh
};

}  // namespace

Json page_data(const Plan& plan, const std::vector<ReshardRow>& reshards, const std::vector<std::string>& traces) {
  return PageData(plan, traces).made(reshards);
}

}  // namespace whale
