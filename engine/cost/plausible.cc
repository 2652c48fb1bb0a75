#include "cost/plausible.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cost/cost.h"

namespace whale {
namespace {

// By what factor something is off: from `doubt` on it is told, from `refused` on it is an error. Of profiles that were
// measured here and of tables of others, the sum over all ops is 0.2 to 4 times the roofline, the largest contradiction
// of times of a millisecond 3.
struct Limit {
  double doubt, refused;
};
constexpr Limit kSameSize{1.25, 2};      // two times of one size
constexpr Limit kLargerSize{4, 50};      // a larger size that takes less
constexpr Limit kLargerStep{2, 20};      // the same of steps, and of all layers
constexpr Limit kParts{3, 30};           // parts of a step that take longer than it
constexpr Limit kTooFast{20, 100};       // beside the roofline of the device
constexpr Limit kTooSlow{50, 300};       // the same
constexpr Limit kSlowLayers{300, 5000};  // the same, of models that are small beside the start of a kernel
constexpr double kUnknown = 10;          // times as wide where nobody knows what the device can do
constexpr double kNoise = 20e-6;         // seconds: shorter times are of a clock's and a scheduler's making
constexpr double kCertain = 1e-3;        // from so many seconds on no accident makes them
constexpr size_t kMostPairs = 4'000'000;
constexpr size_t kMostDoubts = 3;

class Checker {
 public:
  Checker(std::string who, std::vector<std::string>& doubts) : who_(std::move(who)), doubts_(doubts) {}

  void judge(double factor, const Limit& limit, bool may_refuse, const std::string& what, const std::string& advice) {
    if (!(factor > limit.doubt)) return;
    const std::string said = fmt::format("{} {}: {}", who_, what, advice);
    if (may_refuse && factor > limit.refused) throw invalid("{}", said);
    doubts_.push_back(said);
  }

 private:
  std::string who_;
  std::vector<std::string>& doubts_;
};

constexpr const char* kAgain = "measure again, on a quiet machine";
constexpr const char* kOneOf = "one of them is wrong, measure again";
constexpr const char* kUnits = "times are in seconds; are these in milliseconds or microseconds?";

std::string at_size(const std::vector<int64_t>& numbers) {
  constexpr size_t kMost = 12;
  return fmt::format("[{}{}]", fmt::join(numbers.begin(), numbers.begin() + std::min(kMost, numbers.size()), ", "),
                     numbers.size() > kMost ? ", ..." : "");
}

bool all_of_it(const MeasuredPoint& small, const MeasuredPoint& large) {
  return small.numbers.size() == large.numbers.size() && small.cost.flops <= large.cost.flops &&
         small.cost.bytes <= large.cost.bytes &&
         std::ranges::equal(small.numbers, large.numbers, [](int64_t a, int64_t b) { return a <= b; });
}

void compare_points(const std::string& key, const std::vector<MeasuredPoint>& points, Checker& checker) {
  std::vector<const MeasuredPoint*> order;
  for (const MeasuredPoint& p : points) order.push_back(&p);
  const auto work = [](const MeasuredPoint* p) { return std::tuple(p->cost.flops, p->cost.bytes, p->numbers); };
  std::ranges::sort(order, {}, work);
  const size_t window = std::max<size_t>(1, kMostPairs / std::max<size_t>(1, order.size()));
  // Of each point the worst alone.
  for (size_t i = 0; i < order.size(); ++i) {
    const MeasuredPoint &small = *order[i], *worst = nullptr;
    for (size_t j = i + 1; j < order.size() && j - i <= window; ++j) {
      const MeasuredPoint& large = *order[j];
      if (small.numbers == large.numbers) {
        const auto [least, most] = std::minmax(small.seconds, large.seconds);
        checker.judge(most / least, kSameSize, true,
                      fmt::format("has two times of {} at size {}: {:g} and {:g} seconds", brief(key),
                                  at_size(small.numbers), small.seconds, large.seconds),
                      kOneOf);
      } else if (all_of_it(small, large) && (worst == nullptr || large.seconds < worst->seconds)) {
        worst = &large;
      }
    }
    if (worst != nullptr && small.seconds > kNoise)
      checker.judge(
          small.seconds / worst->seconds, kLargerSize, small.seconds > kCertain,
          fmt::format("says that {} takes {:g} seconds at size {} and {:g} at {}, which is more work", brief(key),
                      small.seconds, at_size(small.numbers), worst->seconds, at_size(worst->numbers)),
          kAgain);
  }
}

void compare_steps(const MeasuredDevice& device, Checker& checker) {
  std::map<int64_t, double> points;  // by local batch
  for (const auto& [_, list] : device.ops)
    for (const MeasuredPoint& p : list) points[p.samples] += p.seconds;
  std::vector<MeasuredStep> steps = device.steps;
  std::ranges::stable_sort(steps, {}, &MeasuredStep::samples);
  for (size_t i = 0; i < steps.size(); ++i) {
    const MeasuredStep& s = steps[i];
    if (i + 1 < steps.size() && steps[i + 1].samples == s.samples) {
      const auto [least, most] = std::minmax(s.step, steps[i + 1].step);
      checker.judge(
          most / least, kSameSize, true,
          fmt::format("has two steps of {} samples: {:g} and {:g} seconds", s.samples, s.step, steps[i + 1].step),
          kOneOf);
    } else if (i + 1 < steps.size()) {
      checker.judge(s.step / steps[i + 1].step, kLargerStep, true,
                    fmt::format("says that a step of {} samples takes {:g} seconds and one of {} takes {:g}", s.samples,
                                s.step, steps[i + 1].samples, steps[i + 1].step),
                    kAgain);
    }
    const double phases = s.forward + s.backward + s.update;
    checker.judge(phases / s.step, kParts, true,
                  fmt::format("says that a step of {} samples takes {:g} seconds, and its forward, backward and update "
                              "{:g} together",
                              s.samples, s.step, phases),
                  kUnits);
    checker.judge(points[s.samples] / s.step, kParts, true,
                  fmt::format("says that a step of {} samples takes {:g} seconds, and the ops of it {:g} together",
                              s.samples, s.step, points[s.samples]),
                  kUnits);
  }
}

double seconds_of(const MeasuredLayers& layers) {
  double sum = 0;
  for (const MeasuredLayer& each : layers.layers) sum += each.forward + each.backward + each.update;
  return sum;
}

void compare_layers(const MeasuredDevice& device, Checker& checker) {
  std::vector<const MeasuredLayers*> order;
  for (const MeasuredLayers& layers : device.layers) order.push_back(&layers);
  std::ranges::stable_sort(order, {}, [](const MeasuredLayers* l) { return std::pair(l->ways, l->samples); });
  for (size_t i = 0; i + 1 < order.size(); ++i) {
    const MeasuredLayers &one = *order[i], &next = *order[i + 1];
    if (one.ways != next.ways) continue;
    const double a = seconds_of(one), b = seconds_of(next);
    if (one.samples == next.samples)
      checker.judge(std::max(a / b, b / a), kSameSize, true,
                    fmt::format("has layers at {} samples and {} way(s) twice: {:g} and {:g} seconds together",
                                one.samples, one.ways, a, b),
                    kOneOf);
    else
      checker.judge(a / b, kLargerStep, true,
                    fmt::format("says that all layers take {:g} seconds at {} samples and {:g} at {} ({} way(s))", a,
                                one.samples, b, next.samples, one.ways),
                    kAgain);
  }
}

// What a device can do, about.
struct Reach {
  DeviceRates rates;  // of float32
  double most_flops;  // a second, of any type
  double width = 1;   // of the limits
};

Reach reach_of(const MeasuredKind& kind, const DeviceRates* machine) {
  if (const DeviceType* type = kind.type.empty() ? nullptr : find_device_type(kind.type)) {
    const DeviceFigures f = figures_of(*type);
    return {{f.f32_flops_per_second, f.bytes_per_second, f.seconds_per_op},
            std::max({f.f32_flops_per_second, f.half_flops_per_second, f.bf16_flops_per_second})};
  }
  if (machine != nullptr) return {*machine, machine->flops_per_second};
  return {kMachineOfCores.device, kMachineOfCores.device.flops_per_second, kUnknown};
}

Limit times(const Limit& limit, double factor) { return {limit.doubt * factor, limit.refused * factor}; }

void compare_with_device(const MeasuredDevice& device, const DeviceRates* machine, Checker& checker) {
  const Reach reach = reach_of(device.kind, machine);
  double measured = 0, roofline = 0;
  for (const auto& [key, points] : device.ops)
    for (const MeasuredPoint& p : points) {
      measured += p.seconds;
      roofline += op_seconds(p.cost, reach.rates);
      checker.judge(p.cost.flops / p.seconds / reach.most_flops, times(kTooFast, reach.width), true,
                    fmt::format("says that {} at size {} takes {:g} seconds, which is {:.3g} FLOP/s where {:.3g} are "
                                "what it reaches",
                                brief(key), at_size(p.numbers), p.seconds, p.cost.flops / p.seconds, reach.most_flops),
                    kUnits);
    }
  if (device.ops.empty()) return;
  checker.judge(roofline / measured, times(kTooFast, reach.width), true,
                fmt::format("has ops of {:g} seconds together, which by its rates take {:g}", measured, roofline),
                kUnits);
  checker.judge(measured / roofline, times(kTooSlow, reach.width), true,
                fmt::format("has ops of {:g} seconds together, which by its rates take {:g}", measured, roofline),
                kUnits);
}

}  // namespace

void check_plausible(MeasuredProfile& profile, const DeviceRates* machine) {
  std::vector<std::string> doubts;
  for (const auto& device : profile.devices) {
    Checker checker(fmt::format("the profile of {}", to_string(device->kind)), doubts);
    compare_with_device(*device, machine, checker);
    for (const auto& [key, points] : device->ops) compare_points(key, points, checker);
    compare_steps(*device, checker);
    compare_layers(*device, checker);
  }
  for (size_t k = 0; k < std::min(kMostDoubts, doubts.size()); ++k) profile.doubts.push_back(doubts[k]);
  if (doubts.size() > kMostDoubts)
    profile.doubts.push_back(fmt::format("and {} more such times in it", doubts.size() - kMostDoubts));
}

void check_layers(const MeasuredProfile& profile, double flops, double ops, std::vector<std::string>& doubts) {
  for (const auto& device : profile.devices) {
    if (device->layers.empty()) continue;
    const Reach reach = reach_of(device->kind, nullptr);
    Checker checker(fmt::format("{}, of {},", profile.name(), to_string(device->kind)), doubts);
    for (const MeasuredLayers& layers : device->layers) {
      double measured = 0;
      for (const MeasuredLayer& each : layers.layers) measured += each.forward;
      const auto samples = static_cast<double>(layers.samples), ways = static_cast<double>(layers.ways);
      const double work = flops * samples / ways;
      const double with_starts = work / reach.rates.flops_per_second + ops * reach.rates.seconds_per_op;
      const std::string what =
          fmt::format("says that forward takes {:g} seconds of {} samples in {} way(s), which by its rates takes {:g}",
                      measured, layers.samples, layers.ways, with_starts);
      const size_t before = doubts.size();
      checker.judge(work / reach.most_flops / measured, times(kTooFast, reach.width), true, what, kUnits);
      checker.judge(measured / with_starts, times(kSlowLayers, reach.width), true, what, kUnits);
      if (doubts.size() > before) break;  // one says it
    }
  }
}

}  // namespace whale
