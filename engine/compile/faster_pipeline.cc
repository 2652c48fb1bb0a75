#include "compile/faster_pipeline.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "compile/prepare.h"
#include "ops/cost.h"
#include "ops/op.h"
#include "plan/figures.h"
#include "report/fit.h"
#include "simulate/simulate.h"
#include "task/cut_places.h"

namespace whale {
namespace {

// Whether stages are cut by their work alone, and a clock of their devices may say otherwise.
bool may_be_cut_by_clock(const std::vector<DeviceSpec>& devices, const CompileOptions& options, const Ints& usual) {
  return !usual.empty() && options.stages.begins.empty() && options.stages.rooms.empty() &&
         knows_devices(devices, options.profile);
}

// Where stages begin by the clock, with the warm-up as it is (kClock), or with one found for them (kDeeperClock).
Ints begins_by_clock(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double memory_price, CutsBy by) {
  CompileOptions with = options;
  with.stages.cuts = by, with.dump = {};
  return prepare(graph, devices, with, memory_price).tasks.stage_begins;
}

// Cuts and depths of one pipeline, chosen together: each cut has its depths, and the best depths have their cut, as
// long as that gains.
class Climb {
 public:
  Climb(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options, const Plan& plan,
        const MakePlan& step)
      : graph_(graph), devices_(devices), options_(options), plan_(plan), step_(step) {
    options_.dump = {};
  }

  std::optional<Faster> run() {
    if (plan_.meshes.size() < 2 || plan_.micro_batches < 2 || plan_.entries.empty() ||
        !knows_devices(devices_, options_.profile))
      return std::nullopt;
    const std::optional<double> walked = walk(plan_);
    if (!walked) return std::nullopt;
    before_ = *walked;
    if (std::optional<Way> deeper = deepened(options_, plan_, before_)) best_ = std::move(*deeper);
    cut();
    move_depths();
    if (best_.seconds > (1 - kWorthDeeper) * before_) return std::nullopt;
    return Faster{std::move(best_.made_of), std::move(best_.plan), best_.seconds, why()};
  }

 private:
  struct Way {
    WithWarmup made_of = {};
    Plan plan = {};
    double seconds = std::numeric_limits<double>::infinity();
    std::vector<int> depths = {};  // none: the usual ones
    std::string why = {};          // DeeperWarmup's
    bool cut = false;              // elsewhere
  };

  std::string why() const {
    const std::string takes =
        fmt::format("step takes {} instead of {}.", seconds_text(best_.seconds), seconds_text(before_));
    std::string depths;
    if (!best_.depths.empty())
      depths = fmt::format(
          "The stages run [{}] forward passes before their first backward one, not [{}]: {}.",
          fmt::join(best_.depths, ","),
          fmt::join(usual_warmup(static_cast<int>(best_.depths.size()), static_cast<int>(plan_.micro_batches)), ","),
          best_.why);
    if (!best_.cut) return fmt::format("{} A {}", depths, takes);
    return fmt::format("Stages are cut by how the pipeline goes, not for even work: a {}{}{}", takes,
                       depths.empty() ? "" : " ", depths);
  }

  // With the depths that are best for how this plan, which takes so long, is cut; where those are worth it.
  std::optional<Way> deepened(const CompileOptions& options, const Plan& plan, double seconds) {
    std::optional<DeeperWarmup> found = deeper_warmup(plan);
    if (!found || !with_warmup(graph_, options, found->depths)) return std::nullopt;
    for (; found->is_deeper(); found->halve()) {
      std::optional<WithWarmup> with = with_warmup(graph_, options, found->depths);
      Plan deeper = step_(with->graph, with->options);
      if (shortage_of(deeper).bytes > 0) continue;
      const std::optional<double> walked = walk(deeper);
      if (!walked || *walked > (1 - kWorthDeeper) * seconds) break;
      return Way{std::move(*with), std::move(deeper), *walked, found->depths, std::move(found->why), false};
    }
    return std::nullopt;
  }

  // The clock of one micro-batch at a time that finds depths is not the simulator's.
  void move_depths() {
    for (bool better = !best_.depths.empty(); better;) {
      better = false;
      const std::vector<int> from = best_.depths;
      for (size_t run = 1; run < from.size() && !better; ++run)
        for (const int by : {1, -1, 2}) {
          std::vector<int> depths = from;
          for (size_t s = 0; s < run; ++s) depths[s] += by;
          if (std::ranges::is_sorted(depths, std::greater{}) && look_with(depths)) {
            better = true;
            break;
          }
        }
    }
  }
  bool look_with(const std::vector<int>& depths) {
    const auto m = static_cast<int>(plan_.micro_batches);
    const std::vector<int> usual = usual_warmup(static_cast<int>(depths.size()), m);
    if (walked_ > kMostWalkedInAll || depths[0] > m || depths == usual) return false;
    for (size_t s = 0; s < depths.size(); ++s)
      if (depths[s] < usual[s]) return false;
    CompileOptions options = options_;
    options.stages.begins = best_.made_of.options.stages.begins;
    std::optional<WithWarmup> with = with_warmup(graph_, options, depths);
    if (!with) return false;
    Plan plan = step_(with->graph, with->options);
    if (shortage_of(plan).bytes > 0) return false;
    const std::optional<double> seconds = walk(plan);
    const int more =
        std::accumulate(depths.begin(), depths.end(), 0) - std::accumulate(best_.depths.begin(), best_.depths.end(), 0);
    if (!seconds || *seconds > (more > 0 ? 1 - kWorthDeeper / 2 : 1) * best_.seconds) return false;
    best_.made_of = std::move(*with), best_.plan = std::move(plan), best_.seconds = *seconds, best_.depths = depths;
    return true;
  }

  void cut() {
    Scoped prepared = prepare(graph_, devices_, options_, plan_.memory_price);
    Ints usual = prepared.tasks.stage_begins;
    if (!may_be_cut_by_clock(devices_, options_, usual)) return;
    best_begins_ = usual_begins_ = usual, usual_seconds_ = before_;
    seen_.push_back(std::move(usual));
    for (const CutsBy by : {CutsBy::kClock, CutsBy::kDeeperClock}) look_at(begins_by(graph_, options_, by));
    // The cuts that are best for the best depths, and theirs.
    constexpr int kRounds = 3;
    for (int round = 0; round < kRounds && !best_.depths.empty(); ++round) {
      const std::optional<WithWarmup> with = with_warmup(graph_, options_, best_.depths);
      if (!with || !look_at(begins_by(with->graph, with->options, CutsBy::kClock))) break;
    }
    move_borders(prepared);
  }

  Ints begins_by(const Graph& graph, const CompileOptions& options, CutsBy by) const {
    return begins_by_clock(graph, devices_, options, plan_.memory_price, by);
  }

  void move_borders(const Scoped& prepared) {
    if (best_begins_.size() + 1 != plan_.meshes.size()) return;
    const Graph source = source_of(graph_, options_);
    std::vector<OpId> ops(source.ops.size());
    std::iota(ops.begin(), ops.end(), OpId{0});
    const std::vector<CutPlace> places = cut_places(source, ops, options_.exact);
    if (places.empty()) return;
    std::vector<double> bytes;
    for (const CutPlace& p : places) bytes.push_back(p.crossing);
    const auto quarter = bytes.begin() + std::ssize(bytes) / 4;
    std::ranges::nth_element(bytes, quarter);
    const auto with_at_most = [&](double most) {
      Ints at;
      for (const CutPlace& p : places)
        if (p.crossing <= most) at.push_back(static_cast<int64_t>(p.at));
      return at;
    };
    leave_to_few(prepared, with_at_most(*quarter));
    // From the best cut, and from the best with the usual depths, which may lead elsewhere.
    for (const bool usual : {false, true}) {
      const Ints& from = usual ? usual_begins_ : best_begins_;
      double most = 0;  // that crosses a border now
      for (const CutPlace& p : places)
        if (std::ranges::find(from, static_cast<int64_t>(p.at)) != from.end()) most = std::max(most, p.crossing);
      move_borders(with_at_most(most), usual);
    }
  }
  void move_borders(const Ints& places, bool usual) {
    const auto borders = best_begins_.size();
    const auto better = [&](size_t first, size_t run, int by) {
      const Ints& from = usual ? usual_begins_ : best_begins_;
      const double before = usual ? usual_seconds_ : best_seconds();
      look_at(moved(from, places, first, run, by));
      return (usual ? usual_seconds_ : best_seconds()) < before;
    };
    for (bool again = true; again;) {
      again = false;
      for (size_t run = 1; run <= borders; ++run)
        for (size_t first = 0; first + run <= borders; ++first)
          for (const int by : {1, -1, 2, -2})
            while (better(first, run, by)) again = true;
    }
  }
  // Nearly all on some stages beside each other, which slow links may be worth, where that may be faster.
  void leave_to_few(const Scoped& prepared, const Ints& places) {
    const size_t stages = plan_.meshes.size();
    if (places.size() < stages) return;
    std::vector<double> rates;
    for (const Mesh& mesh : plan_.meshes) {
      rates.push_back(0);
      for (const int32_t d : mesh.devices)
        if (d >= 0) rates.back() += prepared.tasks.cost.rates_of(plan_.devices[d]).flops_per_second;
    }
    const PipelineTimes times = times_of_stages(plan_);
    double work = 0;  // of all, as seconds of a stage of rate 1
    for (size_t s = 0; s < stages; ++s)
      work +=
          static_cast<double>(plan_.micro_batches) * (times.stages[s].forward + times.stages[s].backward) * rates[s];
    std::vector<double> until{0};  // FLOPs of the ops before
    for (const Op& op : graph_.ops) until.push_back(until.back() + cost_of(graph_, op).flops);
    for (size_t few = 1; few < stages; ++few)
      for (size_t first = 0; first + few <= stages; ++first) {
        const auto mine = rates.begin() + static_cast<std::ptrdiff_t>(first);
        const double together = std::accumulate(mine, mine + static_cast<std::ptrdiff_t>(few), 0.0);
        if (work / together > best_seconds()) continue;
        Ints begins(places.begin(), places.begin() + static_cast<std::ptrdiff_t>(first));
        double part = 0;
        for (size_t s = first; s + 1 < first + few; ++s) {
          part += rates[s] / together;
          begins.push_back(*std::ranges::partition_point(
              places, [&](int64_t at) { return at < places.back() && until[at] < part * until.back(); }));
        }
        begins.insert(begins.end(), places.end() - static_cast<std::ptrdiff_t>(stages - first - few), places.end());
        if (std::ranges::is_sorted(begins, std::less_equal{})) look_at(std::move(begins));
      }
  }
  double best_seconds() const { return std::min(before_, best_.seconds); }

  // The borders first to first + run - 1 by so many of these places; none: they cannot be.
  static Ints moved(const Ints& begins, const Ints& places, size_t first, size_t run, int by) {
    Ints out = begins;
    for (size_t s = first; s < first + run; ++s) {
      const auto to = std::ranges::lower_bound(places, out[s]) - places.begin() + by;
      if (to < 0 || to >= std::ssize(places)) return {};
      out[s] = places[to];
    }
    return std::ranges::is_sorted(out, std::less_equal{}) ? out : Ints{};
  }

  // Whether stages that begin there are better than all before.
  bool look_at(Ints begins) {
    if (begins.empty() || walked_ > kMostWalkedInAll || std::ranges::find(seen_, begins) != seen_.end()) return false;
    seen_.push_back(begins);
    CompileOptions with = options_;
    with.stages.begins = begins;
    Plan plan;
    try {
      plan = step_(graph_, with);
    } catch (const Error&) {  // no cut there
      return false;
    }
    if (shortage_of(plan).bytes > 0) return false;
    const std::optional<double> seconds = walk(plan);
    if (!seconds) return false;
    if (*seconds <= kGain * usual_seconds_) usual_seconds_ = *seconds, usual_begins_ = begins;
    std::optional<Way> deeper = deepened(with, plan, *seconds);
    Way way = deeper ? std::move(*deeper) : Way{{graph_, std::move(with)}, std::move(plan), *seconds};
    way.cut = true;
    if (way.seconds > kGain * best_seconds()) return false;
    best_ = std::move(way), best_begins_ = std::move(begins);
    return true;
  }

  std::optional<double> walk(const Plan& plan) {
    const auto walked = times_of(plan, plan.entries[0]);
    if (!walked) return std::nullopt;
    walked_ += walked->events.size();
    return walked->seconds;
  }

  // About as long as making the plan takes.
  static constexpr size_t kMostWalkedInAll = 250'000;
  static constexpr double kGain = 0.998;  // of one step of the climb

  const Graph& graph_;
  const std::vector<DeviceSpec>& devices_;
  CompileOptions options_;
  const Plan& plan_;
  const MakePlan& step_;
  double before_ = 0;
  Way best_;
  Ints best_begins_, usual_begins_;
  double usual_seconds_ = 0;  // the best with the usual depths
  std::vector<Ints> seen_;    // begins
  size_t walked_ = 0;         // instructions
};

}  // namespace

bool is_cut_otherwise(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                      double memory_price, const Ints& usual) {
  if (!may_be_cut_by_clock(devices, options, usual)) return false;
  const auto differs = [&](CutsBy by) { return begins_by_clock(graph, devices, options, memory_price, by) != usual; };
  return differs(CutsBy::kClock) || differs(CutsBy::kDeeperClock);
}

std::optional<Faster> faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                      const CompileOptions& options, const Plan& plan, const MakePlan& step) {
  return Climb(graph, devices, options, plan, step).run();
}

}  // namespace whale
