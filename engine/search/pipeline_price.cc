#include "search/pipeline_price.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>

#include "base/error.h"

namespace whale {

double BandwidthCurve::seconds(double bytes) const {
  if (bytes <= 0) return 0;
  const double log2_mb = std::log2(bytes / 1e6);
  double gigabytes_per_second = 0;
  for (const double c : coefficients) gigabytes_per_second = gigabytes_per_second * log2_mb + c;
  return bytes / 1e9 / gigabytes_per_second;
}

int ClusterProblem::split_index(int split) const {
  const auto at = std::ranges::find(splits, split);
  if (at == splits.end())
    throw invalid("stages are not split over {} devices; known are {}", split, fmt::join(splits, ", "));
  return static_cast<int>(at - splits.begin());
}

const BandwidthCurve& ClusterProblem::send(int from, int from_split, int to, int to_split) const {
  const int n = static_cast<int>(splits.size());
  return sends[from * n + from_split][to * n + to_split];
}

int64_t ClusterPlan::replicas() const {
  int64_t sum = 0;
  for (const ReplicaClass& c : classes) sum += c.replicas;
  return sum;
}

double stage_bytes(const ClusterProblem& problem, int begin, int end, int split_at, int64_t micro_batch, int after) {
  const auto at = static_cast<size_t>(split_at);
  double parameters = 0, activations = 0;
  for (auto l = static_cast<size_t>(begin); l < static_cast<size_t>(end); ++l) {
    parameters += problem.parameters[at][l];
    activations += problem.activations[at][l];
  }
  return problem.bytes_per_parameter * parameters +
         problem.bytes_per_activation * activations * static_cast<double>(micro_batch) * (after + 1) +
         problem.reserved_bytes[at];
}

double ring_seconds(const ClusterProblem& problem, double bytes, int64_t replicas, const BandwidthCurve& curve) {
  if (replicas <= 1) return 0;
  const auto n = static_cast<double>(replicas);
  const auto ring = [&](double part) { return 2 * (n - 1) * curve.seconds(part / n); };
  const double whole = std::floor(bytes / problem.bucket_bytes);
  return whole * ring(problem.bucket_bytes) + ring(bytes - whole * problem.bucket_bytes);
}

namespace {

const LayerTimes& times_of(const ClusterProblem& problem, const StagePlace& place, int64_t micro_batch) {
  for (const LayerTimes& t : problem.times)
    if (t.type == place.type && t.split == place.split && t.micro_batch == micro_batch) return t;
  throw invalid("nothing is known of {} split over {} with micro-batches of {}", problem.types[place.type].name,
                place.split, micro_batch);
}

// Of a type's nodes, groups of equal powers of two within a node: the largest first always succeeds if anything does.
void verify_devices(const ClusterProblem& problem, const ClusterPlan& plan) {
  for (size_t t = 0; t < problem.types.size(); ++t) {
    std::map<int, int64_t, std::greater<>> groups;
    for (const ReplicaClass& c : plan.classes)
      for (const StagePlace& place : c.stages)
        if (place.type == static_cast<int>(t)) groups[place.split] += c.replicas;
    std::vector<int> left = problem.types[t].nodes;
    for (auto [split, count] : groups)
      for (int& node : left) {
        const int64_t here = std::min<int64_t>(count, node / split);
        node -= static_cast<int>(here) * split;
        groups[split] -= here;
        count -= here;
      }
    for (const auto& [split, count] : groups)
      if (count > 0)
        throw invalid("the plan has {} groups of {} devices of {} more than its nodes hold", count, split,
                      problem.types[t].name);
  }
}

void verify_shape(const ClusterProblem& problem, const ClusterPlan& plan) {
  const std::vector<int>& cuts = plan.cuts;
  if (cuts.size() < 2 || cuts.front() != 0 || cuts.back() != problem.layers ||
      std::ranges::adjacent_find(cuts, std::greater_equal<>()) != cuts.end())
    throw invalid("cuts {} are none of {} layers, expected ascending ones from 0 to {}", fmt::join(cuts, ","),
                  problem.layers, problem.layers);
  int64_t samples = 0;
  for (const ReplicaClass& c : plan.classes) {
    if (static_cast<int>(c.stages.size()) != plan.stages())
      throw invalid("a class of replicas has {} stages, the cuts have {}", c.stages.size(), plan.stages());
    for (const StagePlace& place : c.stages)
      if (place.type < 0 || place.type >= static_cast<int>(problem.types.size()))
        throw invalid("a stage has devices of type {}, there are {} types", place.type, problem.types.size());
    if (c.replicas < 1 || c.micro_batches < 1 || c.micro_batch < 1)
      throw invalid("a class has {} replicas of {} micro-batches of {} samples, expected each at least 1", c.replicas,
                    c.micro_batches, c.micro_batch);
    samples += c.replicas * c.micro_batches * c.micro_batch;
  }
  if (samples < problem.batch)
    throw invalid("the plan has {} samples a step, expected at least {}", samples, problem.batch);
}

double class_seconds(const ClusterProblem& problem, const std::vector<int>& cuts, const ReplicaClass& c, double& peak) {
  const int stages = static_cast<int>(cuts.size()) - 1;
  const auto b = static_cast<double>(c.micro_batch);
  double sum = 0, slowest = 0, update = 0;
  for (int i = 0; i < stages; ++i) {
    const StagePlace& place = c.stages[i];
    const int begin = cuts[i], end = cuts[static_cast<size_t>(i) + 1];
    const int at = problem.split_index(place.split);
    const ClusterDevices& type = problem.types[place.type];
    const LayerTimes& times = times_of(problem, place, c.micro_batch);
    const double bytes = stage_bytes(problem, begin, end, at, c.micro_batch, stages - 1 - i);
    if (bytes > type.memory_bytes)
      throw invalid("stage {} (layers {} to {}) needs {:.2f} GB of each {}, which has {:.2f}", i, begin, end - 1,
                    bytes / 1e9, type.name, type.memory_bytes / 1e9);
    peak = std::max(peak, bytes);
    const double compute =
        type.slower * std::accumulate(times.seconds.begin() + begin, times.seconds.begin() + end, 0.0);
    update = std::max(update, type.slower * times.update_seconds[begin]);
    const auto seconds = [&](int layer, int neighbour) {
      const StagePlace& to = c.stages[neighbour];
      return problem.send(place.type, at, to.type, problem.split_index(to.split))
          .seconds(problem.output_bytes[layer] * b);
    };
    const double forward = i + 1 < stages ? seconds(end - 1, i + 1) : 0;
    const double back = i > 0 ? seconds(begin, i - 1) : 0;
    double sends = forward + back;
    if (i + 1 == stages)
      sends = 2 * back;
    else if (i == 0)
      sends = stages <= 3 ? forward : 2 * forward;
    sum += compute + sends;
    slowest = std::max(slowest, compute + sends);
  }
  return static_cast<double>(c.micro_batches - 1) * slowest + sum + update;
}

}  // namespace

ClusterPrice price(const ClusterProblem& problem, const ClusterPlan& plan) {
  verify_shape(problem, plan);
  verify_devices(problem, plan);
  ClusterPrice out;
  for (const ReplicaClass& c : plan.classes) {
    double peak = 0;
    out.class_seconds.push_back(class_seconds(problem, plan.cuts, c, peak));
    out.peak_bytes.push_back(peak);
  }
  const int64_t replicas = plan.replicas();
  for (int i = 0; i < plan.stages(); ++i) {
    double bytes = 0;
    for (int l = plan.cuts[i]; l < plan.cuts[static_cast<size_t>(i) + 1]; ++l) bytes += problem.weight_bytes[l];
    // Neighbours along the ring of this stage's replicas, class after class.
    std::vector<int> ring;
    int split = problem.splits.back();
    for (const ReplicaClass& c : plan.classes) {
      const StagePlace& place = c.stages[i];
      split = std::min(split, place.split);
      ring.insert(ring.end(), c.replicas > 1 ? 2 : 1, place.type);
    }
    for (size_t j = 1; j < ring.size(); ++j)
      out.sync_seconds = std::max(
          out.sync_seconds, ring_seconds(problem, bytes / split, replicas, problem.send(ring[j - 1], 0, ring[j], 0)));
  }
  out.step_seconds = *std::ranges::max_element(out.class_seconds) + out.sync_seconds;
  return out;
}

void verify(const ClusterProblem& problem) {
  const auto layers = static_cast<size_t>(problem.layers);
  if (problem.layers < 1 || problem.batch < 1)
    throw invalid("a model of {} layers and a batch of {}, expected each at least 1", problem.layers, problem.batch);
  if (problem.types.empty()) throw invalid("the cluster has no devices");
  if (problem.splits.empty() || problem.splits.front() != 1)
    throw invalid("degrees of splits are {}, expected powers of two from 1", fmt::join(problem.splits, ","));
  for (const int d : problem.splits)
    if (d < 1 || (d & (d - 1)) != 0) throw invalid("stages split over {} devices, expected a power of two", d);
  const size_t degrees = problem.splits.size(), places = problem.types.size() * degrees;
  const auto table = [&](const char* what, size_t got, size_t want) {
    if (got != want) throw invalid("{} has {} entries, expected {}", what, got, want);
  };
  table("parameters by split", problem.parameters.size(), degrees);
  table("activations by split", problem.activations.size(), degrees);
  table("reserved bytes by split", problem.reserved_bytes.size(), degrees);
  table("bandwidths by sender", problem.sends.size(), places);
  table("bytes of outputs by layer", problem.output_bytes.size(), layers);
  table("bytes of weights by layer", problem.weight_bytes.size(), layers);
  const auto sound = [](const char* what, const std::vector<double>& list) {
    for (const double x : list)
      if (!std::isfinite(x) || x < 0) throw invalid("{} has {}, expected numbers from 0", what, x);
  };
  sound("bytes of outputs by layer", problem.output_bytes);
  sound("bytes of weights by layer", problem.weight_bytes);
  for (size_t d = 0; d < degrees; ++d) {
    table("parameters by layer", problem.parameters[d].size(), layers);
    table("activations by layer", problem.activations[d].size(), layers);
    sound("parameters by layer", problem.parameters[d]);
    sound("activations by layer", problem.activations[d]);
  }
  for (const auto& row : problem.sends) {
    table("bandwidths by receiver", row.size(), places);
    for (const BandwidthCurve& curve : row)
      if (!(curve.seconds(1e6) > 0)) throw invalid("a bandwidth at 1 MB is not above 0");
  }
  for (const ClusterDevices& type : problem.types) {
    if (!(type.slower > 0) || !std::isfinite(type.slower))
      throw invalid("{} takes {} times as long, expected a number above 0", type.name, type.slower);
    for (const int n : type.nodes)
      if (n < 0) throw invalid("{} has a node of {} devices", type.name, n);
  }
  for (const LayerTimes& t : problem.times) {
    if (t.type < 0 || static_cast<size_t>(t.type) >= problem.types.size())
      throw invalid("times of type {}, there are {} types", t.type, problem.types.size());
    problem.split_index(t.split);
    if (t.micro_batch < 1) throw invalid("times of micro-batches of {} samples", t.micro_batch);
    table("seconds by layer", t.seconds.size(), layers);
    table("update seconds by layer", t.update_seconds.size(), layers);
    sound("seconds by layer", t.seconds);
    sound("update seconds by layer", t.update_seconds);
  }
}

}  // namespace whale
