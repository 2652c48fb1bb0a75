#include "search/deal_axes.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <tuple>

#include "cluster/shares.h"
#include "cost/measured_layers.h"
#include "ops/op.h"
#include "plan/figures.h"
#include "search/balance.h"
#include "shard/sub_axes.h"

namespace whale {
namespace {

// Of a stage's ops for the whole batch: what a device of some rates takes for all of it is linear in its share, unless
// a profile says what it takes by size.
// Ops that take the same on every device: those of layers that are alike.
struct OpsAlike {
  OpCost cost;
  OpShape shape;  // where there is a profile
  std::optional<Product> product;
  int64_t extent = 1;  // the coarsest that a split may cut; 1: none
  double count = 0;
  auto key() const {
    const Product p = product.value_or(Product{.batch = 0});
    return std::make_tuple(cost.flops, cost.bytes, shape.key, shape.numbers, p.batch, p.m, p.n, p.k, p.bytes_an_element,
                           p.row, extent);
  }
};

struct StageWork {
  std::vector<OpsAlike> ops;
  std::map<decltype(OpsAlike().key()), size_t> known = {};  // to the ops
  double parameters = 0;                                    // bytes that are trained, whatever the batch
  void add(OpsAlike op) {
    const auto [at, fresh] = known.try_emplace(op.key(), ops.size());
    if (fresh) ops.push_back(std::move(op));
    ++ops[at->second].count;
  }
};

// Seconds of the work by the part of it, as measured or by a device's curve.
class WorkByPart {
 public:
  // of(part): seconds; asked at each octave once.
  template <class Of>
  explicit WorkByPart(Of of) {
    for (int k = 0; k <= kOctaves; ++k) seconds_.push_back(of(std::exp2(-k)));
    for (int k = kOctaves - 1; k >= 0; --k) seconds_[k] = std::max(at_octave(k), at_octave(k + 1));
  }
  double at(double part) const {
    if (part <= 0) return 0;
    const double x = -std::log2(part);
    if (x <= 0) return at_octave(0) * part;
    if (x >= kOctaves) return at_octave(kOctaves) * part * std::exp2(kOctaves);
    const int k = std::min(static_cast<int>(x), kOctaves - 1);
    return at_octave(k) + (x - k) * (at_octave(k + 1) - at_octave(k));
  }

 private:
  static constexpr int kOctaves = 16;
  double at_octave(int k) const { return seconds_[k]; }
  std::vector<double> seconds_;
};

struct Timed {
  double start = 0, all = 0;                       // seconds: of all instructions' starts and the update; of the work
  std::shared_ptr<const WorkByPart> by_part = {};  // in place of all * part
  double seconds(double part) const { return start + (by_part ? by_part->at(part) : all * part); }
};

bool is_split(const MeshAxis& axis) { return axis.name == "split"; }

// A device's part of its stage's work along all axes but `a`; or along those of splits.
double part_of(const Mesh& mesh, const Ints& at, size_t a, bool splits_alone = false) {
  double part = 1;
  for (size_t b = 0; b < mesh.axes.size(); ++b) {
    const MeshAxis& axis = mesh.axes[b];
    if (splits_alone && !is_split(axis)) continue;
    if (axis.only >= 0)  // of unlike replicas
      part *= axis.shares[axis.only] / std::accumulate(axis.shares.begin(), axis.shares.end(), 0.0);
    if (b == a || axis.size == 1) continue;
    if (axis.shares.empty()) {
      part /= static_cast<double>(axis.size);
      continue;
    }
    const int64_t row = axis.ragged() ? row_of(mesh.axes, b, at) : 0;
    double sum = 0;
    for (int64_t k = 0; k < axis.size; ++k) sum += std::max(0.0, axis.shares[row * axis.size + k]);
    part *= std::max(0.0, axis.shares[row * axis.size + at[b]]) / sum;
  }
  return part;
}

class Dealer {
 public:
  Dealer(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options, TaskGraphs& tasks)
      : devices_(devices),
        options_(options),
        tasks_(tasks),
        stages_(stage_bytes_of_devices(tasks, devices.size())),
        work_(tasks.meshes.size()) {
    std::set<TensorId> trained;
    for (const Variable& v : graph.variables)
      if (v.role == Role::kParameter && v.trainable) trained.insert(v.tensor);
    OpFactors factors(graph);
    const std::vector<OpCut> samples = follow_samples(graph, factors);
    for (size_t i = 0; i < graph.ops.size(); ++i) {
      const Op& op = graph.ops[i];
      const auto scope = static_cast<size_t>(op.scope);
      const int32_t stage = scope < tasks.stage_of_scope.size() ? std::max(0, tasks.stage_of_scope[scope]) : 0;
      StageWork& mine = work_[tasks.mesh_of_stage[stage]];
      const OpView view = view_of(graph, op);
      OpsAlike ops{.cost = cost_of(view), .shape = {}, .product = {}};
      ops.product = product_of(view, ops.cost);
      if (tasks.cost.measured) ops.shape = shape_of(view, ops.cost);
      int64_t coarsest = 0;
      const std::vector<Factor>& list = factors.of(op).list;
      for (size_t f = 0; f < list.size(); ++f) {
        if (static_cast<int>(f) == samples[i].factor || list[f].unit < 1) continue;
        const int64_t extent = list[f].extent / list[f].unit;
        if (extent > 1 && (coarsest == 0 || extent < coarsest)) coarsest = extent;
      }
      ops.extent = std::max<int64_t>(1, coarsest);
      mine.add(std::move(ops));
      for (const TensorId t : op.inputs)
        if (t != kNone && trained.erase(t) > 0) {
          const Tensor& tensor = graph.tensor(t);
          mine.parameters += static_cast<double>(element_count(tensor.dims) * size_of(tensor.dtype));
        }
    }
  }

  void run() {
    size_t axes = 0;
    for (const Mesh& mesh : tasks_.meshes) axes = std::max(axes, mesh.axes.size());
    for (size_t a = axes; a-- > 0;) deal(a);
  }

 private:
  // `splits`: of an axis of a split, whose parts are of the parameters too.
  const Timed& timed(size_t mesh, const DeviceSpec& device, bool splits) const {
    const DeviceRates rates = tasks_.cost.rates_of(device, options_.half);
    for (const auto& [m, s, known, time] : timed_)
      if (m == mesh && s == splits && known == rates) return time;
    return std::get<Timed>(timed_.emplace_back(mesh, splits, rates, timed_by(mesh, rates, splits)));
  }

  Timed timed_by(size_t mesh, const DeviceRates& rates, bool splits) const {
    Timed out;
    if (rates.measured != nullptr || rates.curve != nullptr)
      out.by_part = std::make_shared<WorkByPart>([&](double part) {
        if (rates.measured != nullptr && !rates.measured->layers.empty()) return layer_seconds(mesh, rates, part);
        double all = 0;
        for (size_t i = 0; i < work_[mesh].ops.size(); ++i) all += seconds_of(mesh, i, rates, part);
        return all;
      });
    for (const OpsAlike& ops : work_[mesh].ops) {
      out.start += ops.count * rates.seconds_per_op;
      out.all += ops.count * (op_seconds(ops.cost, rates) - rates.seconds_per_op);
    }
    out.start *= tasks_.cost.passes * static_cast<double>(options_.micro_batches);
    out.all *= tasks_.cost.passes;
    if (out.by_part) out.start = 0, out.all = out.by_part->at(1);
    double ways = 1;
    for (const MeshAxis& axis : tasks_.meshes[mesh].axes)
      if (is_split(axis)) ways *= static_cast<double>(axis.size);
    if (splits)
      out.all += pass_seconds(tasks_.cost.update_passes * work_[mesh].parameters, rates);  // not of what was measured
    else
      out.start += pass_seconds(tasks_.cost.update_passes * work_[mesh].parameters / ways, rates);
    return out;
  }

  // Of a mesh's part of all layers, by the rates.
  double layer_seconds(size_t mesh, const DeviceRates& rates, double part) const {
    const auto by_rates = [&](const StageWork& work) {
      double all = 0;
      for (const OpsAlike& ops : work.ops) all += ops.count * op_seconds(ops.cost, rates);
      return all;
    };
    double all = 0;
    for (const StageWork& work : work_) all += by_rates(work);
    const auto micro_batches = static_cast<double>(std::max<int64_t>(1, options_.micro_batches));
    double seconds = 0;
    for (const MeasuredLayer& layer :
         layers_at(*rates.measured, 1, part * static_cast<double>(options_.batch) / micro_batches))
      seconds += layer.forward + layer.backward;
    return all > 0 ? seconds * micro_batches * by_rates(work_[mesh]) / all : 0;
  }

  // Forward and backward of ops that are alike, of a part of the whole batch's work.
  double seconds_of(size_t mesh, size_t i, const DeviceRates& rates, double part) const {
    const OpsAlike& ops = work_[mesh].ops[i];
    if (rates.measured != nullptr) {
      const auto micro_batches = static_cast<double>(std::max<int64_t>(1, options_.micro_batches));
      const double passes = rates.measured->passes(part * static_cast<double>(options_.batch) / micro_batches);
      auto& known = times_[{rates.measured, mesh}];
      if (known.empty()) known.resize(work_[mesh].ops.size());
      if (!known[i])
        known[i] = std::make_shared<std::optional<MeasuredTimes>>(
            rates.measured->of(ops.shape, rates.flops_per_second, rates.bytes_per_second));
      if (*known[i])
        return ops.count * (passes > 0 ? passes : tasks_.cost.passes) * micro_batches *
               (*known[i])->at(part / micro_batches);
    }
    const auto micro_batches = static_cast<double>(std::max<int64_t>(1, options_.micro_batches));
    return ops.count * tasks_.cost.passes * micro_batches *
           op_seconds(ops.cost, ops.product, rates, part / micro_batches);
  }

  bool may_deal(size_t m, size_t a) const {
    const Mesh& mesh = tasks_.meshes[m];
    return a < mesh.axes.size() && mesh.axes[a].size > 1 && mesh.axes[a].shares.empty();
  }

  // Meshes that cut at this axis alike are dealt together: samples stay with their replica from stage to stage.
  void deal(size_t a) {
    for (size_t m = 0; m < tasks_.meshes.size(); ++m) {
      if (!may_deal(m, a)) continue;
      const MeshAxis& axis = tasks_.meshes[m].axes[a];
      std::vector<size_t> together;
      const bool samples = axis.name == "replica";
      for (size_t n = m; n < tasks_.meshes.size(); ++n)
        if (n == m || (samples && may_deal(n, a) && tasks_.meshes[n].axes[a].size == axis.size &&
                       tasks_.meshes[n].axes[a].name == axis.name))
          together.push_back(n);
      const std::vector<double> shares = samples ? of_samples(together, a) : of_parts(m, a);
      if (shares.empty()) continue;
      for (const size_t n : together) tasks_.meshes[n].axes[a].shares = shares;
    }
  }

  // What a device holds by its shares along an axis: fixed, and with each part of the axis.
  struct Held {
    double fixed = 0, whole = 0;
  };
  Held held_by(size_t m, int32_t d, const Ints& at, size_t a) const {
    const Mesh& mesh = tasks_.meshes[m];
    const auto device = static_cast<size_t>(d);
    const Room& room = options_.rooms[device];
    const StageBytes& stage = stages_[device];
    const double ways = room.parameters.whole * stage.parameters * part_of(mesh, at, a, true);
    const double samples = room.values.whole * stage.values * part_of(mesh, at, a);
    const bool splits = is_split(mesh.axes[a]);
    return {room.parameters.fixed * stage.parameters + room.values.fixed * stage.values + (splits ? 0 : ways),
            samples + (splits ? ways : 0)};
  }
  bool limited(int32_t d) const { return !options_.rooms.empty() && devices_[d].memory_bytes > 0; }

  struct Found {
    std::vector<Worker> kinds;
    std::vector<int32_t> workers;
  };
  // Who works at each position of the axis; like positions are of one kind. Nothing: all are alike.
  Found workers_along(const std::vector<size_t>& meshes, size_t a, int64_t units) const {
    Found out;
    std::map<Key, int32_t> known;
    const int64_t size = tasks_.meshes[meshes[0]].axes[a].size;
    for (int64_t p = 0; p < size; ++p) {
      Key key;
      Worker worker;
      for (const size_t m : meshes) {
        const Mesh& mesh = tasks_.meshes[m];
        for (size_t k = 0; k < mesh.devices.size(); ++k) {
          const int32_t d = mesh.devices[k];
          const Ints at = mesh.coordinates(static_cast<int64_t>(k));
          if (d >= 0 && at[a] == p) add_member(m, d, at, a, units, worker, key);
        }
      }
      const auto [at, fresh] = known.try_emplace(std::move(key), static_cast<int32_t>(out.kinds.size()));
      if (fresh) out.kinds.push_back(std::move(worker));
      out.workers.push_back(at->second);
    }
    return out;
  }

  // Of a worker: its members' seconds, bytes and names, as far as they differ.
  using Key = std::vector<std::tuple<size_t, double, double, double, double, std::string>>;
  void add_member(size_t m, int32_t d, const Ints& at, size_t a, int64_t units, Worker& worker, Key& key) const {
    const Mesh& mesh = tasks_.meshes[m];
    const DeviceSpec& device = devices_[d];
    const double each = part_of(mesh, at, a) / static_cast<double>(units);
    const Timed t = timed(m, device, is_split(mesh.axes[a]));
    const Held held = limited(d) ? held_by(m, d, at, a) : Held{};
    const double unit = held.whole / static_cast<double>(units);
    std::tuple mine{m, t.all * each, t.start, held.fixed, unit, fmt::format("{} {}", device.type, device.memory_bytes)};
    if (std::ranges::find(key, mine) != key.end()) return;  // like one that is there
    key.push_back(std::move(mine));
    worker.name = device.type.empty() ? fmt::format("device {}", d) : device.type;
    Member member{.name = fmt::format("device {}", d),
                  .seconds = [t, each](int64_t u) { return t.seconds(each * static_cast<double>(u)); }};
    if (limited(d)) {
      member.bytes = [held, unit](int64_t u) { return held.fixed + unit * static_cast<double>(u); };
      member.memory = device.memory_bytes;
    }
    worker.members.push_back(std::move(member));
  }

  std::vector<double> of_samples(const std::vector<size_t>& meshes, size_t a) {
    const bool whole = a < tasks_.by_micro_batch.size() && tasks_.by_micro_batch[a] != 0;
    int64_t units = whole ? options_.micro_batches : options_.batch / std::max<int64_t>(1, options_.micro_batches);
    const Mesh& mesh = tasks_.meshes[meshes[0]];
    for (size_t b = 0; b < a; ++b)
      if (mesh.axes[b].name == "replica") units /= mesh.axes[b].size;
    return balanced(meshes, a, units, whole ? "micro-batches" : "samples of a micro-batch");
  }

  std::vector<double> balanced(const std::vector<size_t>& meshes, size_t a, int64_t units, const char* of) {
    const MeshAxis& axis = tasks_.meshes[meshes[0]].axes[a];
    if (units < 1) return {};
    Found found = workers_along(meshes, a, units);
    if (found.kinds.size() < 2) return {};
    BalanceRequest request{.units = units, .kinds = std::move(found.kinds), .workers = std::move(found.workers)};
    std::optional<Balance> best = balance_if_fits(request);
    if (!best) {  // the fullest device as full as it must be; what does not fit is told where a plan is checked
      BalanceRequest by_room = request;
      for (Worker& kind : by_room.kinds)
        for (Member& member : kind.members) {
          const auto memory = static_cast<double>(member.memory);
          member.seconds = [bytes = member.bytes, memory](int64_t u) { return bytes ? bytes(u) / memory : 0; };
          member.bytes = {}, member.memory = Member::kNoLimit;
        }
      best = balance_if_fits(by_room);
    }
    if (!best) return {};
    tell(axis, request, *best, of);
    return {best->units.begin(), best->units.end()};
  }

  void tell(const MeshAxis& axis, const BalanceRequest& request, const Balance& best, const char* of) {
    double equal = 0;  // seconds of equal shares
    const auto size = static_cast<int64_t>(request.workers.size());
    for (const Worker& kind : request.kinds)
      for (const Member& member : kind.members)
        equal = std::max(equal, member.seconds((request.units + size - 1) / size));
    std::vector<std::string> parts;
    for (size_t k = 0; k < request.kinds.size() && k < 4; ++k) {
      const size_t at =
          static_cast<size_t>(std::ranges::find(request.workers, static_cast<int32_t>(k)) - request.workers.begin());
      double seconds = 0;
      for (const Member& member : request.kinds[k].members) seconds = std::max(seconds, member.seconds(best.units[at]));
      parts.push_back(
          fmt::format("{} gets {}, computed in {}", request.kinds[k].name, best.units[at], seconds_text(seconds)));
    }
    tasks_.notes.push_back(fmt::format("Axis '{}': of {} {} each {}; equal shares would take {}.", axis.name,
                                       request.units, of, fmt::join(parts, ", "), seconds_text(equal)));
  }

  // What a split's device takes with these weights: each op is cut in its own units.
  double slowest_part(size_t m, size_t a, const std::vector<double>& weights) const {
    const Mesh& mesh = tasks_.meshes[m];
    double slowest = 0;
    constexpr int64_t kFine = 1 << 20;  // parameters have units enough
    std::map<int64_t, Ints> rounded{{kFine, round_shares(kFine, weights)}};
    for (size_t k = 0; k < mesh.devices.size(); ++k) {
      if (mesh.devices[k] < 0) continue;
      const Ints at = mesh.coordinates(static_cast<int64_t>(k));
      const DeviceRates rates = tasks_.cost.rates_of(devices_[mesh.devices[k]], options_.half);
      const double part = part_of(mesh, at, a);
      double seconds = 0;
      for (size_t i = 0; i < work_[m].ops.size(); ++i) {
        const int64_t extent = std::max(work_[m].ops[i].extent, mesh.axes[a].size);
        Ints& shares = rounded[extent];
        if (shares.empty()) shares = round_shares(extent, weights);
        const double mine = part * static_cast<double>(shares[at[a]]) / static_cast<double>(extent);
        seconds += seconds_of(m, i, rates, mine);
      }
      const Ints& finest = rounded[kFine];
      const double share = static_cast<double>(finest[at[a]]) / static_cast<double>(kFine);
      seconds += pass_seconds(tasks_.cost.update_passes * work_[m].parameters * part * share, rates);
      slowest = std::max(slowest, seconds);
    }
    return slowest;
  }

  // How full the fullest device is with these weights; as far as is known, all have room up to 1.
  double fullest(size_t m, size_t a, const std::vector<double>& weights) const {
    const Mesh& mesh = tasks_.meshes[m];
    const double sum = std::reduce(weights.begin(), weights.end());
    double full = 0;
    for (size_t k = 0; k < mesh.devices.size(); ++k) {
      const int32_t d = mesh.devices[k];
      if (d < 0 || !limited(d)) continue;
      const Ints at = mesh.coordinates(static_cast<int64_t>(k));
      const Held held = held_by(m, d, at, a);
      full = std::max(full,
                      (held.fixed + held.whole * weights[at[a]] / sum) / static_cast<double>(devices_[d].memory_bytes));
    }
    return full;
  }

  // The parts of a split: in the coarsest units that divide its ops best, or by speed alone; what fits comes first.
  std::vector<double> of_parts(size_t m, size_t a) {
    const MeshAxis& axis = tasks_.meshes[m].axes[a];
    std::vector<int64_t> extents;
    for (const OpsAlike& ops : work_[m].ops) extents.push_back(ops.extent);
    std::ranges::sort(extents);
    extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
    std::erase_if(extents, [&](int64_t e) { return e < axis.size; });
    if (extents.empty()) return {};
    constexpr size_t kTried = 4;
    if (extents.size() > kTried) extents.erase(extents.begin() + kTried - 1, extents.end() - 1);
    std::vector<double> best;
    const std::vector<double> equal(static_cast<size_t>(axis.size), 1);
    double least = slowest_part(m, a, equal), full = std::max(1.0, fullest(m, a, equal));
    const size_t notes = tasks_.notes.size();
    for (const int64_t units : extents) {
      std::vector<std::string> before = tasks_.notes;
      std::vector<double> shares = balanced({m}, a, units, "parts of what is cut most coarsely");
      const double seconds = shares.empty() ? least : slowest_part(m, a, shares);
      const double filled = shares.empty() ? full : std::max(1.0, fullest(m, a, shares));
      constexpr double kLess = 1 - 1e-9;
      if (filled < full * kLess || (filled <= full && seconds < least * kLess))
        least = seconds, full = filled, best = std::move(shares);
      else
        tasks_.notes = std::move(before);
      if (tasks_.notes.size() > notes + 1) tasks_.notes.erase(tasks_.notes.end() - 2);
    }
    return best;
  }

  const std::vector<DeviceSpec>& devices_;
  const DealOptions& options_;
  TaskGraphs& tasks_;
  std::vector<StageBytes> stages_;  // by device
  std::vector<StageWork> work_;     // by mesh
  // Of the ops of a mesh, by what the profile has of a device; made when asked for.
  mutable std::map<std::pair<const MeasuredDevice*, size_t>, std::vector<std::shared_ptr<std::optional<MeasuredTimes>>>>
      times_;
  mutable std::list<std::tuple<size_t, bool, DeviceRates, Timed>> timed_;  // by mesh, kind of axis and rates
};

}  // namespace

std::vector<double> parts_of_work(const std::vector<Mesh>& meshes, size_t devices, bool splits_alone) {
  std::vector<double> out(devices, 1);
  for (const Mesh& mesh : meshes)
    for (size_t k = 0; k < mesh.devices.size(); ++k)
      if (mesh.devices[k] >= 0)
        out[mesh.devices[k]] = part_of(mesh, mesh.coordinates(static_cast<int64_t>(k)), mesh.axes.size(), splits_alone);
  return out;
}

std::vector<StageBytes> stage_bytes_of_devices(const TaskGraphs& tasks, size_t devices) {
  std::vector<StageBytes> out(devices);
  for (size_t s = 0; s < tasks.stage_bytes.size(); ++s)
    for (const int32_t d : tasks.mesh(static_cast<int32_t>(s)).devices) {
      if (d < 0) continue;
      StageBytes& mine = out[d];
      mine.parameters += tasks.stage_bytes[s].parameters, mine.values += tasks.stage_bytes[s].values;
    }
  return out;
}

bool are_unlike(const std::vector<DeviceSpec>& devices, const CostModel& cost) {
  if (devices.empty() || are_unlike(devices)) return !devices.empty();
  const DeviceRates first = cost.rates_of(devices[0]);
  return std::ranges::any_of(devices, [&](const DeviceSpec& d) {
    const DeviceRates mine = cost.rates_of(d);
    return mine.measured != first.measured || mine.flops_per_second != first.flops_per_second;
  });
}

void deal_axes(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options,
               TaskGraphs& tasks) {
  if (are_unlike(devices, tasks.cost)) Dealer(graph, devices, options, tasks).run();
}

}  // namespace whale
