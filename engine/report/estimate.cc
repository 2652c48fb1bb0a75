#include "report/estimate.h"

#include <algorithm>
#include <map>

#include "base/watch.h"
#include "lower/localise.h"
#include "plan/groups.h"
#include "plan/lives.h"
#include "rewrite/order.h"
#include "schedule/timing.h"
#include "schedule/verify.h"

namespace whale {
namespace {

constexpr int32_t kPrologue = -1, kEpilogue = 1 << 30;

class Estimator {
 public:
  Estimator(const LayoutGraph& lg, bool overlap)
      : lg_(lg), g_(lg.graph), overlap_(overlap), local_(lg), bytes_(g_.tensors.size(), -1), home_(g_.tensors.size()) {
    for (size_t m = 0; m < lg.tasks.meshes.size(); ++m)
      places_.push_back({static_cast<int32_t>(m), std::vector<int64_t>(lg.tasks.meshes[m].axes.size()), 0});
    if (!lg.tasks.schedule.empty() && lg.micro_batches > 1)
      schedule_ = make_schedule(lg.tasks.schedule, static_cast<int>(lg.tasks.meshes.size()),
                                static_cast<int>(lg.micro_batches), static_cast<int>(lg.tasks.chunks));
    if (schedule_) peaks_ = live_peaks(*schedule_);
    out_.meshes.resize(places_.size());
  }

  Estimate run() {
    for (const Variable& v : g_.variables) {
      MemoryClasses& m = out_.meshes[mesh_of(v.tensor)].memory;
      (v.role == Role::kParameter ? m.parameters : v.role == Role::kState ? m.state : m.buffers) += bytes(v.tensor);
    }
    std::vector<std::vector<OpId>> ops(places_.size());
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      const Op& op = g_.ops[i];
      if (is_view(op.code)) continue;
      const size_t mesh = mesh_of_stage(op.stage);
      ops[mesh].push_back(static_cast<OpId>(i));
      if (op.code == OpCode::k_transfer && mesh_of(op.inputs[0]) != mesh)
        ops[mesh_of(op.inputs[0])].push_back(static_cast<OpId>(i));
    }
    share_storages();
    std::vector<StageTimes> times(lg_.tasks.stages());
    double whole = 0;  // outside the body
    for (size_t m = 0; m < ops.size(); ++m) {
      std::stable_sort(ops[m].begin(), ops[m].end(),
                       [&](OpId a, OpId b) { return segment_of(g_.op(a)) < segment_of(g_.op(b)); });
      add_arena(m, ops[m]);
      whole = std::max(whole, add_seconds(m, ops[m], times));
    }
    for (const Estimate::Mesh& m : out_.meshes) out_.seconds = std::max(out_.seconds, m.seconds);
    if (schedule_) out_.seconds = whole + run_clock(*schedule_, times).makespan;
    return std::move(out_);
  }

 private:
  struct Storage {
    int64_t bytes = 0, first = -1, last = -1;
    int32_t first_segment = 0, last_segment = 0;
    bool gradient = false;
  };
  static size_t at(TensorId id) { return static_cast<size_t>(id); }
  size_t mesh_of_stage(int32_t s) const { return static_cast<size_t>(lg_.tasks.mesh_of_stage[static_cast<size_t>(s)]); }
  size_t mesh_of(TensorId id) const { return mesh_of_stage(lg_.stage(id)); }

  // Of the first device of its mesh, in one micro-batch.
  int64_t bytes(TensorId id) {
    int64_t& known = bytes_[at(id)];
    if (known < 0) known = element_count(local_.dims(id, places_[mesh_of(id)])) * size_of(g_.tensor(id).dtype);
    return known;
  }

  // Those that lowering makes: prologue, forward and backward of each stage, epilogue.
  int32_t segment_of(const Op& op) const {
    if (op.region != Region::kBody) return op.region == Region::kPrologue ? kPrologue : kEpilogue;
    if (!schedule_) return 0;
    return op.stage + (op.phase == Phase::kForward ? 0 : static_cast<int32_t>(lg_.tasks.stages()));
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
                          lg_.time_varies(in) == lg_.time_varies(y) && bytes(in) == bytes(y);
        if (a.must || dies) home_[at(y)] = home_[at(in)], placed[to] = taken[from] = 1;
      }
    }
    for (size_t t = 0; t < home_.size(); ++t) home_[t] = home_[at(root[t])];
  }

  bool of_gradients(const Op& op) const {
    if (has_flag(op.code, kUpdateOp)) return true;
    if (op.phase == Phase::kForward) return false;
    if (op.code == OpCode::k_accumulate) return true;
    const auto group = op.attrs.find("group");
    return group != op.attrs.end() &&
           has_replicas(lg_.axis_name(static_cast<size_t>(std::get<int64_t>(group->second)) + 1));
  }

  void add_arena(size_t mesh, const std::vector<OpId>& ops) {
    std::map<TensorId, Storage> storages;
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
          Storage& s = storages[home];
          if (s.first < 0) s = {slot_stride({.bytes = bytes(home)}), position, position, segment, segment, false};
          s.last = position, s.last_segment = segment, s.gradient |= gradient;
        }
    }
    if (overlap_) hold_while_sent(ops, storages);
    const int64_t alive = schedule_ ? peaks_[mesh].activations : 1;
    std::map<int64_t, int64_t> change;
    for (auto& [id, s] : storages) {
      if (s.first_segment != s.last_segment) {
        // The body runs many times.
        if (s.first_segment != kPrologue) s.first = std::min(s.first, begin);
        if (s.last_segment != kEpilogue) s.last = std::max(s.last, end - 1);
        if (s.first_segment != kPrologue && s.last_segment != kEpilogue && lg_.time_varies(id)) s.bytes *= alive;
      }
      change[s.first] += s.bytes, change[s.last + 1] -= s.bytes;
    }
    int64_t now = 0, most = 0, when = 0;
    for (const auto& [position, bytes] : change)
      if ((now += bytes) > most) most = now, when = position;
    MemoryClasses& m = out_.meshes[mesh].memory;
    for (const auto& [id, s] : storages)
      if (s.gradient && s.first <= when && when <= s.last) m.gradients += s.bytes;
    m.activations = most - m.gradients;
  }

  // What a collective beside the computation works on is free when the computation has waited for it, or for a later
  // one: for the first that is read, or at the end of the segment.
  void hold_while_sent(const std::vector<OpId>& ops, std::map<TensorId, Storage>& storages) {
    const auto collective = [&](size_t k) { return g_.op(ops[k]).attrs.contains("group"); };
    std::vector<int64_t> read(ops.size(), -1);
    std::map<TensorId, size_t> under_way;  // by storage
    for (size_t k = 0; k < ops.size(); ++k) {
      const Op& op = g_.op(ops[k]);
      if (!collective(k)) {
        for (const TensorId id : op.inputs)
          if (const auto c = id == kNone ? under_way.end() : under_way.find(home_[at(id)]); c != under_way.end()) {
            if (read[c->second] < 0) read[c->second] = static_cast<int64_t>(k);
            under_way.erase(c);
          }
        continue;
      }
      for (const TensorId id : op.outputs)
        if (id != kNone) under_way[home_[at(id)]] = k;
    }
    int64_t free = std::ssize(ops) - 1;
    for (size_t k = ops.size(); k-- > 0;) {
      const Op& op = g_.op(ops[k]);
      if (k + 1 < ops.size() && segment_of(op) != segment_of(g_.op(ops[k + 1]))) free = static_cast<int64_t>(k);
      if (!collective(k)) continue;
      if (read[k] >= 0) free = std::min(free, read[k]);
      for (const auto* list : {&op.inputs, &op.outputs})
        for (const TensorId id : *list)
          if (const auto s = id == kNone ? storages.end() : storages.find(home_[at(id)]); s != storages.end())
            s->second.last = std::max(s->second.last, free);
    }
  }

  // Of one run on the first device: all of its operands' bytes, and the smallest part of any of them of the arithmetic.
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

  // What is done once a step, and of the body each stage's times for one micro-batch.
  double add_seconds(size_t mesh, const std::vector<OpId>& ops, std::vector<StageTimes>& times) {
    double once = 0, body = 0;
    for (const OpId i : ops) {
      const Op& op = g_.op(i);
      if (mesh_of_stage(op.stage) != mesh) continue;
      const double seconds = seconds_of(op);
      StageTimes& stage = times[static_cast<size_t>(op.stage)];
      if (op.region == Region::kBody)
        body += seconds, (op.phase == Phase::kForward ? stage.forward : stage.backward) += seconds;
      else
        once += seconds;
    }
    out_.meshes[mesh].seconds = once + body * static_cast<double>(lg_.micro_batches);
    return once;
  }

  const LayoutGraph& lg_;
  const Graph& g_;
  bool overlap_;
  Localiser local_;
  std::vector<Place> places_;  // per mesh
  std::optional<PipelineSchedule> schedule_;
  std::vector<LivePeak> peaks_;
  std::vector<int64_t> bytes_;  // per tensor; -1: not known yet
  std::vector<TensorId> home_;  // per tensor: whose storage it is in
  Estimate out_;
};

}  // namespace

Estimate estimate_of(const LayoutGraph& graph, bool overlap) { return Estimator(graph, overlap).run(); }

}  // namespace whale
