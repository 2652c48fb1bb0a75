#include "search/stage_cuts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace whale {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

std::vector<double> sums_of(const std::vector<double>& list) {
  std::vector<double> sums{0};
  for (const double x : list) sums.push_back(sums.back() + x);
  return sums;
}

size_t layers_of(const StageCutsProblem& problem) { return problem.output_bytes.size(); }

void verify(const StageCutsProblem& problem) {
  const size_t layers = layers_of(problem), types = problem.types.size();
  const auto table = [](const char* what, const std::vector<double>& list, size_t want) {
    if (list.size() != want) throw invalid("{} has {} entries, expected {}", what, list.size(), want);
    for (const double x : list)
      if (!std::isfinite(x) || x < 0) throw invalid("{} has {}, expected numbers from 0", what, x);
  };
  if (layers == 0 || types == 0)
    throw invalid("{} layers and {} types of devices, expected some of both", layers, types);
  table("bytes of state by layer", problem.state_bytes, layers);
  table("bytes of activations by layer", problem.activation_bytes, layers);
  table("bytes of outputs by layer", problem.output_bytes, layers);
  if (problem.latency_seconds.size() != types || problem.seconds_per_byte.size() != types)
    throw invalid("links of {} types, expected {}", problem.latency_seconds.size(), types);
  for (size_t t = 0; t < types; ++t) {
    table("seconds by layer", problem.types[t].seconds, layers);
    table("latencies by type", problem.latency_seconds[t], types);
    table("seconds per byte by type", problem.seconds_per_byte[t], types);
    if (problem.types[t].count < 0) throw invalid("{} devices of type {}", problem.types[t].count, t);
  }
  if (problem.micro_batches < 1) throw invalid("{} micro-batches, expected at least 1", problem.micro_batches);
  for (const int t : problem.order)
    if (t < 0 || static_cast<size_t>(t) >= types) throw invalid("the order names type {}, there are {}", t, types);
}

// What both stages of a border spend on it: the activation one way, its gradient the other.
double border_seconds(const StageCutsProblem& problem, size_t layer, size_t from, size_t to) {
  const double bytes = problem.output_bytes[layer];
  return problem.latency_seconds[from][to] + bytes * problem.seconds_per_byte[from][to] +
         problem.latency_seconds[to][from] + bytes * problem.seconds_per_byte[to][from];
}

// From the last stage to the first, since what a stage keeps depends on how many come after it. Of all suffixes that
// use the same devices, begin at one layer and have no stage above a bound, the one whose first stage is shortest
// serves any stage before it best.
class Cutter {
 public:
  explicit Cutter(const StageCutsProblem& problem)
      : problem_(problem), layers_(layers_of(problem)), types_(problem.types.size()) {
    for (const StageDevices& type : problem.types) seconds_.push_back(sums_of(type.seconds));
    state_ = sums_of(problem.state_bytes);
    activations_ = sums_of(problem.activation_bytes);
    sizes_ = 1;
    if (!problem.order.empty()) {
      sizes_ = problem.order.size() + 1;
      return;
    }
    for (const StageDevices& type : problem.types) {
      // More stages than layers cannot be.
      counts_.push_back(std::min<size_t>(static_cast<size_t>(type.count), layers_));
      strides_.push_back(sizes_);
      sizes_ *= counts_.back() + 1;
      if (sizes_ > 50'000'000 / (types_ * layers_))
        throw invalid("{} types of devices are too many to place one by one; group them", types_);
    }
  }

  // The best of those without a stage of `bound` or more.
  StageCuts below(double bound) {
    suffixes_.assign(sizes_ * types_ * layers_, {});
    StageCuts best;
    best.slowest_seconds = kNever;
    for (size_t used = 0; used < sizes_; ++used)
      for (size_t type = 0; type < types_; ++type) {
        if (!may(used, type)) continue;
        const size_t after = without(used, type);
        const size_t in_flight = std::min<size_t>(stages(used), static_cast<size_t>(problem_.micro_batches));
        if (stages(used) == 1)
          extend(used, type, layers_, types_, 0, 0, in_flight, bound);
        else
          for (size_t next = 0; next < types_; ++next)
            for (size_t end = 1; end < layers_; ++end) {
              const Suffix& suffix = at(after, next, end);
              if (suffix.open >= kNever) continue;
              const double border = border_seconds(problem_, end - 1, type, next);
              if (suffix.open + border >= bound) continue;
              extend(used, type, end, next, std::max(suffix.closed, suffix.open + border), border, in_flight, bound);
            }
        const Suffix& whole = at(used, type, 0);
        if (whole.open < kNever && std::max(whole.open, whole.closed) < best.slowest_seconds) best = walk(used, type);
      }
    return best;
  }

 private:
  struct Suffix {
    double open = kNever;  // its first stage, without what comes before it
    double closed = 0;     // the slowest of the others
    size_t end = 0, next = 0;
  };
  Suffix& at(size_t used, size_t type, size_t begin) { return suffixes_[(used * types_ + type) * layers_ + begin]; }
  size_t count(size_t used, size_t type) const { return used / strides_[type] % (counts_[type] + 1); }
  size_t stages(size_t used) const {
    if (!problem_.order.empty()) return used;
    size_t sum = 0;
    for (size_t t = 0; t < types_; ++t) sum += count(used, t);
    return sum;
  }
  // Whether the first stage of a suffix on so many devices may be of this type.
  bool may(size_t used, size_t type) const {
    if (problem_.order.empty()) return count(used, type) > 0;
    return used > 0 && problem_.order[problem_.order.size() - used] == static_cast<int>(type);
  }
  size_t without(size_t used, size_t type) const { return problem_.order.empty() ? used - strides_[type] : used - 1; }

  void extend(size_t used, size_t type, size_t end, size_t next, double closed, double border, size_t in_flight,
              double bound) {
    for (size_t begin = end; begin-- > 0;) {
      const double open = seconds_[type][end] - seconds_[type][begin] + border;
      const double bytes =
          state_[end] - state_[begin] + (activations_[end] - activations_[begin]) * static_cast<double>(in_flight);
      if (open >= bound || bytes > problem_.types[type].memory_bytes * (1 + 1e-12)) break;
      Suffix& here = at(used, type, begin);
      if (open < here.open || (open == here.open && closed < here.closed)) here = {open, closed, end, next};
    }
  }

  StageCuts walk(size_t used, size_t type) {
    StageCuts out;
    out.cuts = {0};
    const Suffix& whole = at(used, type, 0);
    out.slowest_seconds = std::max(whole.open, whole.closed);
    for (size_t begin = 0; begin < layers_;) {
      const Suffix& here = at(used, type, begin);
      out.cuts.push_back(static_cast<int>(here.end));
      out.types.push_back(static_cast<int>(type));
      begin = here.end;
      used = without(used, type);
      type = here.next;
    }
    return out;
  }

  const StageCutsProblem& problem_;
  size_t layers_, types_, sizes_ = 1;
  std::vector<size_t> counts_, strides_;
  std::vector<std::vector<double>> seconds_;
  std::vector<double> state_, activations_;
  std::vector<Suffix> suffixes_;
};

}  // namespace

double slowest_stage_seconds(const StageCutsProblem& problem, const std::vector<int>& cuts,
                             const std::vector<int>& types) {
  const size_t stages = types.size();
  std::vector<int> used(problem.types.size(), 0);
  double slowest = 0;
  for (size_t i = 0; i < stages; ++i) {
    const auto type = static_cast<size_t>(types[i]), begin = static_cast<size_t>(cuts[i]),
               end = static_cast<size_t>(cuts[i + 1]);
    const StageDevices& devices = problem.types[type];
    if (problem.order.empty()) {
      if (++used[type] > devices.count) return kNever;
    } else if (stages > problem.order.size() || problem.order[problem.order.size() - stages + i] != types[i]) {
      return kNever;
    }
    double seconds = 0, state = 0, activations = 0;
    for (size_t l = begin; l < end; ++l) {
      seconds += devices.seconds[l];
      state += problem.state_bytes[l];
      activations += problem.activation_bytes[l];
    }
    const size_t in_flight = std::min<size_t>(stages - i, static_cast<size_t>(problem.micro_batches));
    if (state + activations * static_cast<double>(in_flight) > devices.memory_bytes * (1 + 1e-12)) return kNever;
    if (i > 0) seconds += border_seconds(problem, begin - 1, static_cast<size_t>(types[i - 1]), type);
    if (i + 1 < stages) seconds += border_seconds(problem, end - 1, type, static_cast<size_t>(types[i + 1]));
    slowest = std::max(slowest, seconds);
  }
  return slowest;
}

StageCuts cut_stages(const StageCutsProblem& problem) {
  verify(problem);
  Cutter cutter(problem);
  // No stage is faster than the layer that takes longest, nor all of them than their share of all layers.
  double none = 0, sum = 0, all = 0;
  for (size_t l = 0; l < layers_of(problem); ++l) {
    double fastest = kNever, slowest = 0;
    for (const StageDevices& type : problem.types) {
      fastest = std::min(fastest, type.seconds[l]);
      slowest = std::max(slowest, type.seconds[l]);
    }
    none = std::max(none, fastest);
    sum += fastest;
    all += slowest;
  }
  int devices = 0;
  for (const StageDevices& type : problem.types) devices += type.count;
  if (problem.order.empty() && devices > 0) none = std::max(none, sum / devices);
  none *= 1 - 1e-12;
  // A bound that is too low is soon refuted.
  StageCuts best;
  best.slowest_seconds = kNever;
  for (double bound = std::max(none * 1.1, all * 1e-3); bound < all && best.slowest_seconds == kNever; bound *= 1.3) {
    best = cutter.below(bound);
    if (best.slowest_seconds == kNever) none = bound;
  }
  if (best.slowest_seconds == kNever) best = cutter.below(kNever);
  if (best.slowest_seconds == kNever) {
    size_t most = 0;
    double room = 0;
    for (size_t l = 0; l < layers_of(problem); ++l)
      if (problem.state_bytes[l] + problem.activation_bytes[l] >
          problem.state_bytes[most] + problem.activation_bytes[most])
        most = l;
    for (const StageDevices& type : problem.types)
      if (type.count > 0) room = std::max(room, type.memory_bytes);
    throw invalid(
        "no cuts of {} layers fit these devices; layer {} alone needs {:.2f} GB, the largest device has {:.2f}",
        layers_of(problem), most, (problem.state_bytes[most] + problem.activation_bytes[most]) / 1e9, room / 1e9);
  }
  // What is found below a bound lowers it; half of what is left is tried first.
  while (best.slowest_seconds - none > 1e-12 * best.slowest_seconds) {
    const double middle = (best.slowest_seconds + none) / 2;
    StageCuts better = cutter.below(middle);
    if (better.slowest_seconds < kNever)
      best = std::move(better);
    else
      none = middle;
  }
  return best;
}

}  // namespace whale
