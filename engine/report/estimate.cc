#include "report/estimate.h"

#include <algorithm>
#include <map>
#include <set>
#include <nlohmann/json.hpp>

#include "base/watch.h"
#include "lower/localise.h"
#include "plan/groups.h"
#include "plan/lives.h"
#include "rewrite/offload.h"
#include "rewrite/order.h"
#include "schedule/timing.h"
#include "schedule/verify.h"
#include "shard/digits.h"

namespace whale {
namespace {

constexpr int32_t kPrologue = -1, kEpilogue = 1 << 30;

enum class Holds : uint8_t { kActivation, kGradient, kCopy };

// Where a tensor's bytes are kept, from when to when on one class of devices.
struct Storage {
  int64_t bytes = 0, first = -1, last = -1;
  int32_t first_segment = 0, last_segment = 0;
  Holds holds = Holds::kActivation;
};

class Estimator {
 public:
  Estimator(const LayoutGraph& lg, bool overlap)
      : lg_(lg), g_(lg.graph), overlap_(overlap), local_(lg), bytes_(g_.tensors.size(), -1), home_(g_.tensors.size()) {
    if (!lg.tasks.schedule.empty() && lg.micro_batches > 1)
      schedule_ = make_schedule(lg.tasks.schedule, static_cast<int>(lg.tasks.meshes.size()),
                                static_cast<int>(lg.micro_batches), static_cast<int>(lg.tasks.chunks));
    if (schedule_) peaks_ = live_peaks(*schedule_);
    out_.strategy = lg.tasks.strategy;
  }

  Estimate run() {
    const std::vector<std::vector<OpId>> ops = ops_of_meshes();
    std::vector<StageTimes> times(lg_.tasks.stages());
    double whole = 0;  // outside the body
    for (size_t m = 0; m < ops.size(); ++m) {
      auto classes = classes_of(m);
      bool first = true;
      for (auto& [place, devices] : classes) {
        place_ = place;
        std::fill(bytes_.begin(), bytes_.end(), -1);
        if (first && m == 0) share_storages();
        first = false;
        out_.classes.push_back({std::move(devices), {}, 0});
        add_variables(m);
        add_arena(m, ops[m]);
        whole = std::max(whole, add_seconds(m, ops[m], times));
      }
    }
    for (const Estimate::Class& c : out_.classes) out_.seconds = std::max(out_.seconds, c.seconds);
    if (schedule_) out_.seconds = whole + run_clock(*schedule_, times).makespan;
    return std::move(out_);
  }

 private:
  static size_t at(TensorId id) { return static_cast<size_t>(id); }
  size_t mesh_of_stage(int32_t s) const { return static_cast<size_t>(lg_.tasks.mesh_of_stage[static_cast<size_t>(s)]); }
  size_t mesh_of(TensorId id) const { return mesh_of_stage(lg_.stage(id)); }
  MemoryFigures& memory() { return out_.classes.back().memory; }

  // Of a device of the class, in its largest micro-batch.
  int64_t bytes(TensorId id) {
    int64_t& known = bytes_[at(id)];
    if (known < 0) known = element_count(local_.dims(id, place_)) * size_of(g_.tensor(id).dtype);
    return known;
  }

  // Those that lowering makes: prologue, forward and backward of each stage, epilogue.
  int32_t segment_of(const Op& op) const {
    if (op.region != Region::kBody) return op.region == Region::kPrologue ? kPrologue : kEpilogue;
    if (!schedule_) return 0;
    return op.stage + (op.phase == Phase::kForward ? 0 : static_cast<int32_t>(lg_.tasks.stages()));
  }

  // What the devices of each mesh run, send or receive, segment by segment.
  std::vector<std::vector<OpId>> ops_of_meshes() const {
    std::vector<std::vector<OpId>> ops(lg_.tasks.meshes.size());
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Op& op = g_.ops[i];
      if (is_view(op.code)) continue;
      const size_t mesh = mesh_of_stage(op.stage);
      ops[mesh].push_back(static_cast<OpId>(i));
      if (op.code == OpCode::k_transfer && mesh_of(op.inputs[0]) != mesh)
        ops[mesh_of(op.inputs[0])].push_back(static_cast<OpId>(i));
    }
    for (auto& mine : ops)
      std::stable_sort(mine.begin(), mine.end(),
                       [&](OpId a, OpId b) { return segment_of(g_.op(a)) < segment_of(g_.op(b)); });
    return ops;
  }

  // ---- classes
  // -------------------------------------------------------------------------------------------------------- Every way
  // in which tensors of the mesh are cut: the sizes of its parts tell one device from another.
  std::vector<TensorId> cut_ways(size_t mesh) const {
    std::set<std::vector<int64_t>> known;
    std::vector<TensorId> out;
    for (size_t t = 0; t < g_.tensors.size(); ++t) {
      const auto id = static_cast<TensorId>(t);
      if (mesh_of(id) != mesh) continue;
      std::vector<int64_t> way;
      for (size_t a = 1; a < lg_.axes(); ++a) {
        const AxisLayout& l = lg_.layouts[t].axes[a];
        if (l.placement != Placement::kShard) continue;
        const auto extent = extent_of(g_.tensors[t].dims, l.digit);
        way.insert(way.end(), {static_cast<int64_t>(a), extent, l.digit.dim, l.digit.outer, l.state, l.samples});
      }
      if (!way.empty() && known.insert(std::move(way)).second) out.push_back(id);
    }
    return out;
  }

  Place place_of(size_t mesh, size_t k) const {
    Place place{static_cast<int32_t>(mesh), lg_.tasks.meshes[mesh].coordinates(static_cast<int64_t>(k)), 0};
    place.micro_batch = std::max<int64_t>(local_.micro_batches(place).begin, 0);
    return place;
  }

  std::vector<std::pair<Place, std::vector<int32_t>>> classes_of(size_t m) const {
    const Mesh& mesh = lg_.tasks.meshes[m];
    const std::vector<TensorId> ways = cut_ways(m);
    std::map<std::vector<int64_t>, size_t> known;
    std::vector<std::pair<Place, std::vector<int32_t>>> out;
    for (size_t k = 0; k < mesh.devices.size(); ++k) {
      Watch::look();
      if (mesh.devices[k] < 0) continue;
      Place place = place_of(m, k);
      std::vector<int64_t> sizes{local_.micro_batches(place).size()};
      for (const TensorId id : ways)
        for (const int64_t d : local_.dims(id, place)) sizes.push_back(d);
      const auto [it, fresh] = known.try_emplace(std::move(sizes), out.size());
      if (fresh) out.push_back({std::move(place), {}});
      out[it->second].second.push_back(mesh.devices[k]);
    }
    return out;
  }

  // ---- memory
  // ---------------------------------------------------------------------------------------------------------
  void add_variables(size_t mesh) {
    for (const Variable& v : g_.variables) {
      if (mesh_of(v.tensor) != mesh) continue;
      MemoryClasses& m = in_host(lg_, v.tensor) ? memory().host : memory().device;
      (v.role == Role::kParameter ? m.parameters : v.role == Role::kState ? m.state : m.buffers) += bytes(v.tensor);
    }
  }

  // Views, and what an op writes over an operand: always, or where nobody reads that again.
  void share_storages() {
    const auto end = static_cast<OpId>(g_.ops.size());
    std::vector<OpId> last(g_.tensors.size(), kNone);  // reader
    for (size_t t = 0; t < home_.size(); ++t) home_[t] = view_root(g_, static_cast<TensorId>(t));
    for (size_t i = 0; i < g_.ops.size(); ++i)
      for (const TensorId id : g_.ops[i].inputs)
        if (id != kNone && !is_view(g_.ops[i].code)) last[at(home_[at(id)])] = static_cast<OpId>(i);
    for (const NamedTensor& f : lg_.fetches) last[at(home_[at(f.tensor)])] = end;
    for (const Variable& v : g_.variables) last[at(v.tensor)] = end;
    const std::vector<TensorId> root = home_;
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Op& op = g_.ops[i];
      if (is_view(op.code)) continue;
      std::vector<Alias> all = aliases_of(g_, op);
      std::stable_sort(all.begin(), all.end(), [](const Alias& a, const Alias& b) { return a.must > b.must; });
      std::vector<char> taken(op.inputs.size()), placed(op.outputs.size());
      for (const Alias& a : all) {
        const auto from = static_cast<size_t>(a.input), to = static_cast<size_t>(a.output);
        const TensorId in = op.inputs[from], y = op.outputs[to];
        if (in == kNone || y == kNone || placed[to] || taken[from]) continue;
        const bool dies = last[at(root[at(in)])] == static_cast<OpId>(i) &&
                          g_.tensor(root[at(in)]).kind == TensorKind::kValue &&
                          lg_.time_varies(in) == lg_.time_varies(y) && same_bytes(in, y);
        if (a.must || dies) home_[at(y)] = home_[at(in)], placed[to] = taken[from] = 1;
      }
    }
    for (size_t t = 0; t < home_.size(); ++t) home_[t] = home_[at(root[t])];
  }
  bool same_bytes(TensorId a, TensorId b) const {
    const Tensor &x = g_.tensor(a), &y = g_.tensor(b);
    return lg_.stage(a) == lg_.stage(b) && bytes_of(x) == bytes_of(y) &&
           std::equal(lg_.layouts[at(a)].axes.begin(), lg_.layouts[at(a)].axes.end(), lg_.layouts[at(b)].axes.begin(),
                      [](const AxisLayout& l, const AxisLayout& r) {
                        return (l.placement == Placement::kShard) == (r.placement == Placement::kShard);
                      });
  }

  bool of_gradients(const Op& op) const {
    if (has_flag(op.code, kUpdateOp)) return true;
    if (op.phase == Phase::kForward) return false;
    if (op.code == OpCode::k_accumulate || op.code == OpCode::k_to_host) return true;
    const auto group = op.attrs.find("group");
    return group != op.attrs.end() &&
           has_replicas(lg_.axis_name(static_cast<size_t>(std::get<int64_t>(group->second)) + 1));
  }

  void add_arena(size_t mesh, const std::vector<OpId>& ops) {
    std::vector<Storage> storages(g_.tensors.size());
    std::vector<TensorId> used;
    int64_t begin = 0, end = std::ssize(ops);  // of the body
    for (size_t k = 0; k < ops.size(); ++k) {
      Watch::look();
      const Op& op = g_.op(ops[k]);
      const int32_t segment = segment_of(op);
      const auto position = static_cast<int64_t>(k);
      if (segment == kPrologue) begin = position + 1;
      if (segment == kEpilogue) end = std::min(end, position);
      const bool gradient = of_gradients(op);
      for (const auto* list : {&op.inputs, &op.outputs})
        for (const TensorId id : *list) {
          if (id == kNone || mesh_of(id) != mesh) continue;
          const TensorId home = home_[at(id)];
          if (g_.tensor(home).kind == TensorKind::kVariable) continue;
          Storage& s = storages[at(home)];
          if (s.first < 0) {
            used.push_back(home);
            s = {slot_stride({.bytes = bytes(home)}), position, position, segment, segment, Holds::kActivation};
          }
          s.last = position, s.last_segment = segment;
          if (gradient) s.holds = Holds::kGradient;
        }
      if (op.code == OpCode::k_to_device)
        for (size_t n = 0; n < op.outputs.size(); ++n)
          if (g_.tensor(home_[at(op.inputs[n])]).kind == TensorKind::kVariable)
            storages[at(home_[at(op.outputs[n])])].holds = Holds::kCopy;
    }
    if (overlap_) hold_while_sent(ops, storages);
    const int64_t alive = schedule_ ? peaks_[mesh].activations : 1;
    for (const TensorId id : used) {
      Storage& s = storages[at(id)];
      if (s.first_segment == s.last_segment) continue;
      // The body runs many times.
      if (s.first_segment != kPrologue) s.first = std::min(s.first, begin);
      if (s.last_segment != kEpilogue) s.last = std::max(s.last, end - 1);
      if (s.first_segment != kPrologue && s.last_segment != kEpilogue && lg_.time_varies(id)) s.bytes *= alive;
    }
    fullest(storages, used, ops.size(), false);
    fullest(storages, used, ops.size(), true);
  }

  // Splits up an arena by what is alive where most is.
  void fullest(const std::vector<Storage>& storages, const std::vector<TensorId>& used, size_t ops, bool host) {
    std::vector<int64_t> change(ops + 1);
    for (const TensorId id : used)
      if (const Storage& s = storages[at(id)]; in_host(lg_, id) == host) {
        change[static_cast<size_t>(s.first)] += s.bytes;
        change[static_cast<size_t>(s.last) + 1] -= s.bytes;
      }
    int64_t now = 0, most = 0, when = 0;
    for (size_t k = 0; k < change.size(); ++k)
      if ((now += change[k]) > most) most = now, when = static_cast<int64_t>(k);
    MemoryClasses& m = host ? memory().host : memory().device;
    for (const TensorId id : used)
      if (const Storage& s = storages[at(id)]; in_host(lg_, id) == host && s.first <= when && when <= s.last) {
        if (s.holds == Holds::kGradient) m.gradients += s.bytes;
        if (s.holds == Holds::kCopy) m.copies += s.bytes;
      }
    m.activations = most - m.gradients - m.copies;
    if (!host) memory().arena = most;
  }

  // What a collective beside the computation works on is free when the computation has waited for it, or for a later
  // one: for the first that is read, or at the end of the segment.
  void hold_while_sent(const std::vector<OpId>& ops, std::vector<Storage>& storages) const {
    const auto collective = [&](const Op& op) { return op.attrs.contains("group"); };
    std::vector<int64_t> read(ops.size(), -1);
    std::vector<int64_t> under_way(g_.tensors.size(), -1);  // by storage
    for (size_t k = 0; k < ops.size(); ++k) {
      const Op& op = g_.op(ops[k]);
      if (collective(op)) {
        for (const TensorId id : op.outputs)
          if (id != kNone) under_way[at(home_[at(id)])] = static_cast<int64_t>(k);
        continue;
      }
      for (const TensorId id : op.inputs) {
        if (id == kNone) continue;
        int64_t& by = under_way[at(home_[at(id)])];
        if (by < 0) continue;
        if (int64_t& first = read[static_cast<size_t>(by)]; first < 0) first = static_cast<int64_t>(k);
        by = -1;
      }
    }
    int64_t free = std::ssize(ops) - 1;
    for (size_t k = ops.size(); k-- > 0;) {
      const Op& op = g_.op(ops[k]);
      if (k + 1 < ops.size() && segment_of(op) != segment_of(g_.op(ops[k + 1]))) free = static_cast<int64_t>(k);
      if (!collective(op)) continue;
      if (read[k] >= 0) free = std::min(free, read[k]);
      for (const auto* list : {&op.inputs, &op.outputs})
        for (const TensorId id : *list)
          if (id != kNone)
            if (Storage& s = storages[at(home_[at(id)])]; s.first >= 0) s.last = std::max(s.last, free);
    }
  }

  // ---- time
  // ----------------------------------------------------------------------------------------------------------- Of one
  // run: all of its operands' bytes, and the smallest part of any of them of the arithmetic.
  double seconds_of(const Op& op) {
    double moved = 0, part = 1;
    for (const auto* list : {&op.inputs, &op.outputs})
      for (const TensorId id : *list) {
        if (id == kNone) continue;
        const auto mine = static_cast<double>(bytes(id));
        moved += mine;
        if (const int64_t all = bytes_of(g_.tensor(id)); all > 0)
          part = std::min(part, mine / static_cast<double>(all));
      }
    const CostModel& cost = lg_.tasks.cost;
    const auto group = op.attrs.find("group");
    if (op.code == OpCode::k_transfer) return link_seconds(moved / 2, 1, cost.link);
    if (op.code == OpCode::k_to_host || op.code == OpCode::k_to_device) return link_seconds(moved / 2, 1, cost.host);
    if (group == op.attrs.end()) return op_seconds({cost_of(view_of(g_, op)).flops * part, moved}, cost.device);
    const int64_t n = lg_.size(static_cast<size_t>(std::get<int64_t>(group->second)) + 1, op.stage);
    if (op.code == OpCode::k_all_reduce || op.code == OpCode::k_adasum)
      return all_reduce_seconds(moved / 2, n, cost.link);
    return all_gather_seconds(moved * static_cast<double>(n) / static_cast<double>(n + 1), n, cost.link);
  }

  // What is done once a step, and of the body each stage's times for one micro-batch: the slowest class's.
  double add_seconds(size_t mesh, const std::vector<OpId>& ops, std::vector<StageTimes>& times) {
    double once = 0, body = 0;
    std::vector<StageTimes> mine(times.size());
    for (const OpId i : ops) {
      const Op& op = g_.op(i);
      if (mesh_of_stage(op.stage) != mesh) continue;
      const double seconds = seconds_of(op);
      StageTimes& stage = mine[static_cast<size_t>(op.stage)];
      if (op.region == Region::kBody)
        body += seconds, (op.phase == Phase::kForward ? stage.forward : stage.backward) += seconds;
      else
        once += seconds;
    }
    for (size_t s = 0; s < times.size(); ++s) {
      times[s].forward = std::max(times[s].forward, mine[s].forward);
      times[s].backward = std::max(times[s].backward, mine[s].backward);
    }
    out_.classes.back().seconds = once + body * static_cast<double>(local_.micro_batches(place_).size());
    return once;
  }

  const LayoutGraph& lg_;
  const Graph& g_;
  bool overlap_;
  Localiser local_;
  Place place_;  // of the class at work
  std::optional<PipelineSchedule> schedule_;
  std::vector<LivePeak> peaks_;
  std::vector<int64_t> bytes_;  // per tensor; -1: not known yet
  std::vector<TensorId> home_;  // per tensor: whose storage it is in
  Estimate out_;
};

// What each of them may take; 0: not said.
int64_t least_memory(const Estimate::Class& c, const std::vector<DeviceSpec>& devices) {
  int64_t least = 0;
  for (const int32_t d : c.devices)
    if (const int64_t has = devices[static_cast<size_t>(d)].memory_bytes; has > 0)
      least = least == 0 ? has : std::min(least, has);
  return least;
}

}  // namespace

Estimate estimate_of(const LayoutGraph& graph, bool overlap) { return Estimator(graph, overlap).run(); }

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
      "estimate of {} on {} device(s), nothing lowered: a step takes {}\n\n{:<23}{:>11}{:>11}{:>11}"
      "{:>12}{:>11}{:>11}{:>11}\n",
      estimate.strategy.empty() ? "replica" : estimate.strategy, devices.size(), seconds_text(estimate.seconds),
      "devices", "parameters", "gradients", "state", "activations", "together", "of", "own work");
  for (const Estimate::Class& c : estimate.classes) {
    const MemoryClasses& m = c.memory.device;
    const int64_t has = least_memory(c, devices);
    text += fmt::format("{:<23}{:>11}{:>11}{:>11}{:>12}{:>11}{:>11}{:>11}\n", devices_text(c.devices, 1),
                        bytes(m.parameters), bytes(m.gradients), bytes(m.state),
                        bytes(m.buffers + m.copies + m.activations), bytes(m.total()), has > 0 ? bytes(has) : "",
                        seconds_text(c.seconds));
  }
  int64_t host = 0;
  for (const Estimate::Class& c : estimate.classes) host = std::max(host, c.memory.host.total());
  if (host > 0) text += fmt::format("\nin the host's memory at most {} a device\n", bytes(host));
  if (const int64_t missing = missing_bytes(estimate, devices); missing > 0)
    text += fmt::format("\nit does not fit: {} are missing\n", bytes(missing));
  return text;
}

std::string estimate_json(const Estimate& estimate, const std::vector<DeviceSpec>& devices) {
  using Json = nlohmann::ordered_json;
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
