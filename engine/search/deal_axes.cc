#include "search/deal_axes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>

#include "ops/op.h"
#include "plan/figures.h"
#include "search/balance.h"
#include "shard/sub_axes.h"
#include "task/shares.h"

namespace whale {
namespace {

// Of a stage's ops for the whole batch: what a device of some rates takes for all of it is linear in its share.
struct StageWork {
  std::vector<OpCost> costs;
  std::vector<int64_t> extents;  // the coarsest that a split may cut, of each op; 1: none
  double parameters = 0;         // bytes that are trained, whatever the batch
};

struct Timed {
  double start = 0, all = 0;  // seconds: of all instructions' starts and the update; of the work
};

// A device's part of its stage's work along all axes but `a`.
double part_of(const Mesh& mesh, const Ints& at, size_t a) {
  double part = 1;
  for (size_t b = 0; b < mesh.axes.size(); ++b) {
    const MeshAxis& axis = mesh.axes[b];
    if (axis.only >= 0)  // of unlike replicas
      part *=
          axis.shares[static_cast<size_t>(axis.only)] / std::accumulate(axis.shares.begin(), axis.shares.end(), 0.0);
    if (b == a || axis.size == 1) continue;
    if (axis.shares.empty()) {
      part /= static_cast<double>(axis.size);
      continue;
    }
    const int64_t row = axis.ragged() ? row_of(mesh.axes, b, at) : 0;
    double sum = 0;
    for (int64_t k = 0; k < axis.size; ++k) sum += std::max(0.0, axis.shares[static_cast<size_t>(row * axis.size + k)]);
    part *= std::max(0.0, axis.shares[static_cast<size_t>(row * axis.size + at[b])]) / sum;
  }
  return part;
}

class Dealer {
 public:
  Dealer(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options, TaskGraphs& tasks)
      : devices_(devices), options_(options), tasks_(tasks), work_(tasks.meshes.size()) {
    std::set<TensorId> trained;
    for (const Variable& v : graph.variables)
      if (v.role == Role::kParameter && v.trainable) trained.insert(v.tensor);
    OpFactors factors(graph);
    const std::vector<OpCut> samples = follow_samples(graph, factors);
    for (size_t i = 0; i < graph.ops.size(); ++i) {
      const Op& op = graph.ops[i];
      const auto scope = static_cast<size_t>(op.scope);
      const int32_t stage = scope < tasks.stage_of_scope.size() ? std::max(0, tasks.stage_of_scope[scope]) : 0;
      StageWork& mine = work_[static_cast<size_t>(tasks.mesh_of_stage[static_cast<size_t>(stage)])];
      mine.costs.push_back(cost_of(view_of(graph, op)));
      int64_t coarsest = 0;
      const std::vector<Factor>& list = factors.of(op).list;
      for (size_t f = 0; f < list.size(); ++f) {
        if (static_cast<int>(f) == samples[i].factor || list[f].unit < 1) continue;
        const int64_t extent = list[f].extent / list[f].unit;
        if (extent > 1 && (coarsest == 0 || extent < coarsest)) coarsest = extent;
      }
      mine.extents.push_back(std::max<int64_t>(1, coarsest));
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
  Timed timed(size_t mesh, const DeviceSpec& device, bool splits) const {
    const DeviceRates rates = tasks_.cost.rates_of(device, options_.half);
    Timed out;
    for (const OpCost& cost : work_[mesh].costs) {
      out.start += rates.seconds_per_op;
      out.all += op_seconds(cost, rates) - rates.seconds_per_op;
    }
    out.start *= tasks_.cost.passes * static_cast<double>(options_.micro_batches);
    out.all *= tasks_.cost.passes;
    double ways = 1;
    for (const MeshAxis& axis : tasks_.meshes[mesh].axes)
      if (axis.name == "split") ways *= static_cast<double>(axis.size);
    if (splits)
      out.all += pass_seconds(tasks_.cost.update_passes * work_[mesh].parameters, rates);
    else
      out.start += pass_seconds(tasks_.cost.update_passes * work_[mesh].parameters / ways, rates);
    return out;
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

  struct Found {
    std::vector<Worker> kinds;
    std::vector<int32_t> workers;
  };
  // Who works at each position of the axis; like positions are of one kind. Nothing: all are alike.
  Found workers_along(const std::vector<size_t>& meshes, size_t a, int64_t units) const {
    Found out;
    std::map<std::vector<std::pair<double, std::pair<double, std::string>>>, int32_t> known;
    const int64_t size = tasks_.meshes[meshes[0]].axes[a].size;
    for (int64_t p = 0; p < size; ++p) {
      std::vector<std::pair<double, std::pair<double, std::string>>> key;
      Worker worker;
      for (const size_t m : meshes) {
        const Mesh& mesh = tasks_.meshes[m];
        for (size_t k = 0; k < mesh.devices.size(); ++k) {
          const int32_t d = mesh.devices[k];
          const Ints at = mesh.coordinates(static_cast<int64_t>(k));
          if (d < 0 || at[a] != p) continue;
          add_member(m, d, part_of(mesh, at, a) / static_cast<double>(units), mesh.axes[a].name == "split", worker,
                     key);
        }
      }
      const auto [at, fresh] = known.try_emplace(std::move(key), static_cast<int32_t>(out.kinds.size()));
      if (fresh) out.kinds.push_back(std::move(worker));
      out.workers.push_back(at->second);
    }
    return out;
  }

  template <class Key>
  void add_member(size_t m, int32_t d, double each, bool splits, Worker& worker, Key& key) const {
    const DeviceSpec& device = devices_[static_cast<size_t>(d)];
    const Timed t = timed(m, device, splits);
    const Room room = options_.rooms.empty() ? Room{} : options_.rooms[static_cast<size_t>(d)];
    std::pair<double, std::pair<double, std::string>> mine{
        t.all * each, {room.fixed, fmt::format("{} {} {} {}", m, t.start, room.whole * each, to_key(device))}};
    if (std::ranges::find(key, mine) != key.end()) return;  // like one that is there
    key.push_back(std::move(mine));
    worker.name = device.type.empty() ? fmt::format("device {}", d) : device.type;
    Member member{.name = fmt::format("device {}", d),
                  .seconds = [t, each](int64_t u) { return t.start + t.all * each * static_cast<double>(u); }};
    if (!options_.rooms.empty() && device.memory_bytes > 0) {
      member.bytes = [room, each](int64_t u) { return room.fixed + room.whole * each * static_cast<double>(u); };
      member.memory = device.memory_bytes;
    }
    worker.members.push_back(std::move(member));
  }
  static std::string to_key(const DeviceSpec& d) { return fmt::format("{} {}", d.type, d.memory_bytes); }

  std::vector<double> of_samples(const std::vector<size_t>& meshes, size_t a) {
    const bool whole = a < tasks_.by_micro_batch.size() && tasks_.by_micro_batch[a] != 0;
    int64_t units = whole ? options_.micro_batches : options_.batch / std::max<int64_t>(1, options_.micro_batches);
    const Mesh& mesh = tasks_.meshes[meshes[0]];
    for (size_t b = 0; b < a; ++b)
      if (mesh.axes[b].name == "replica") units /= mesh.axes[b].size;
    return balanced(meshes, a, units, "samples of a micro-batch");
  }

  std::vector<double> balanced(const std::vector<size_t>& meshes, size_t a, int64_t units, const char* of) {
    const MeshAxis& axis = tasks_.meshes[meshes[0]].axes[a];
    if (units < 1) return {};
    Found found = workers_along(meshes, a, units);
    if (found.kinds.size() < 2) return {};
    BalanceRequest request{.units = units, .kinds = std::move(found.kinds), .workers = std::move(found.workers)};
    std::optional<Balance> best = balance_if_fits(request);
    if (!best) {  // what does not fit is told where a plan is checked
      for (Worker& kind : request.kinds)
        for (Member& member : kind.members) member.bytes = {}, member.memory = Member::kNoLimit;
      best = balance_if_fits(request);
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
      const DeviceRates rates = tasks_.cost.rates_of(devices_[static_cast<size_t>(mesh.devices[k])], options_.half);
      const double part = part_of(mesh, at, a);
      double seconds = 0;
      for (size_t i = 0; i < work_[m].costs.size(); ++i) {
        const int64_t extent = std::max(work_[m].extents[i], mesh.axes[a].size);
        Ints& shares = rounded[extent];
        if (shares.empty()) shares = round_shares(extent, weights);
        const double mine =
            part * static_cast<double>(shares[static_cast<size_t>(at[a])]) / static_cast<double>(extent);
        const OpCost& cost = work_[m].costs[i];
        seconds += tasks_.cost.passes * op_seconds({cost.flops * mine, cost.bytes * mine}, rates);
      }
      const Ints& finest = rounded[kFine];
      const double share = static_cast<double>(finest[static_cast<size_t>(at[a])]) / static_cast<double>(kFine);
      seconds += pass_seconds(tasks_.cost.update_passes * work_[m].parameters * part * share, rates);
      slowest = std::max(slowest, seconds);
    }
    return slowest;
  }

  // The parts of a split: in the coarsest units that divide its ops best, or by speed alone.
  std::vector<double> of_parts(size_t m, size_t a) {
    const MeshAxis& axis = tasks_.meshes[m].axes[a];
    std::vector<int64_t> extents = work_[m].extents;
    std::ranges::sort(extents);
    extents.erase(std::unique(extents.begin(), extents.end()), extents.end());
    std::erase_if(extents, [&](int64_t e) { return e < axis.size; });
    if (extents.empty()) return {};
    constexpr size_t kTried = 4;
    if (extents.size() > kTried) extents.erase(extents.begin() + kTried - 1, extents.end() - 1);
    std::vector<double> best;
    double least = slowest_part(m, a, std::vector<double>(static_cast<size_t>(axis.size), 1));
    const size_t notes = tasks_.notes.size();
    for (const int64_t units : extents) {
      std::vector<std::string> before = tasks_.notes;
      std::vector<double> shares = balanced({m}, a, units, "parts of what is cut most coarsely");
      const double seconds = shares.empty() ? least : slowest_part(m, a, shares);
      if (seconds < least * (1 - 1e-9))
        least = seconds, best = std::move(shares);
      else
        tasks_.notes = std::move(before);
      if (tasks_.notes.size() > notes + 1) tasks_.notes.erase(tasks_.notes.end() - 2);
    }
    return best;
  }

  const std::vector<DeviceSpec>& devices_;
  const DealOptions& options_;
  TaskGraphs& tasks_;
  std::vector<StageWork> work_;  // by mesh
};

}  // namespace

std::vector<double> parts_of_work(const std::vector<Mesh>& meshes, size_t devices) {
  std::vector<double> out(devices, 1);
  for (const Mesh& mesh : meshes)
    for (size_t k = 0; k < mesh.devices.size(); ++k)
      if (mesh.devices[k] >= 0)
        out[static_cast<size_t>(mesh.devices[k])] =
            part_of(mesh, mesh.coordinates(static_cast<int64_t>(k)), mesh.axes.size());
  return out;
}

bool are_unlike(const std::vector<DeviceSpec>& devices) {
  const auto rates = [](const DeviceSpec& d) {
    DeviceFigures f = d.figures;
    f.network = f.inside = f.host = {}, f.price_per_hour = 0;
    return f;
  };
  return std::ranges::any_of(devices, [&](const DeviceSpec& d) {
    return rates(d) != rates(devices[0]) || d.memory_bytes != devices[0].memory_bytes;
  });
}

void deal_axes(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options,
               TaskGraphs& tasks) {
  if (are_unlike(devices)) Dealer(graph, devices, options, tasks).run();
}

}  // namespace whale
