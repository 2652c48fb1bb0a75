#include "search/replica_kinds.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace whale {
namespace {

std::vector<double> sums_of(const std::vector<double>& list, double times = 1) {
  std::vector<double> sums{0};
  for (const double x : list) sums.push_back(sums.back() + x * times);
  return sums;
}

}  // namespace

int64_t ReplicaKind::micro_batches_by(double deadline) const {
  const double left = deadline - fill;
  return left < peak ? 0 : static_cast<int64_t>(left / peak + 1e-9);
}

KindTables::KindTables(const ClusterProblem& problem) : problem_(&problem) {
  const size_t degrees = problem.splits.size();
  size_t row = 0;
  for (size_t t = 0; t < problem.types.size(); ++t) {
    std::vector<std::pair<int, size_t>> row_of;  // by degree
    int64_t last = -1;
    for (size_t d = degrees; d-- > 0;) {
      int64_t have = 0;
      for (const int node : problem.types[t].nodes) have += node / problem.splits[d] * problem.splits[d];
      if (have == last) {
        row_of.back().first = problem.splits[d];
        continue;
      }
      last = have;
      if (row + 1 >= kShareRows)
        throw invalid("{} types of devices in nodes of unlike sizes are more than are planned for (about {})",
                      problem.types.size(), (kShareRows - 1) / degrees);
      have_[row] = static_cast<int32_t>(have);
      row_of.emplace_back(problem.splits[d], row++);
    }
    for (size_t d = 0; d < degrees; ++d) {
      Place place{.type = static_cast<int>(t), .split_at = static_cast<int>(d), .use = {}};
      for (const auto& [from, r] : row_of)
        if (problem.splits[d] >= from) place.use[r] = problem.splits[d];
      places_.push_back(place);
    }
  }
  rows_ = row + 1;
  have_[row] = INT32_MAX;
  for (Place& place : places_) place.use[row] = 0;
  for (const LayerTimes& t : problem.times)
    if (std::ranges::find(micro_batches_, t.micro_batch) == micro_batches_.end())
      micro_batches_.push_back(t.micro_batch);
  std::ranges::sort(micro_batches_);
  sums_.resize(micro_batches_.size() * places_.size());
  times_.resize(sums_.size());
  for (const LayerTimes& t : problem.times) {
    const auto b = static_cast<size_t>(std::ranges::find(micro_batches_, t.micro_batch) - micro_batches_.begin());
    const size_t place = static_cast<size_t>(t.type) * degrees + static_cast<size_t>(problem.split_index(t.split));
    sums_[b * places_.size() + place] = sums_of(t.seconds, problem.types[t.type].slower);
    times_[b * places_.size() + place] = &t;
  }
  for (const int64_t b : micro_batches_)
    for (const double bytes : problem.output_bytes)
      for (const Place& from : places_)
        for (const Place& to : places_)
          sends_.push_back(
              problem.send(from.type, from.split_at, to.type, to.split_at).seconds(bytes * static_cast<double>(b)));
  for (size_t d = 0; d < degrees; ++d) {
    parameters_.push_back(sums_of(problem.parameters[d], problem.bytes_per_parameter));
    activations_.push_back(sums_of(problem.activations[d], problem.bytes_per_activation));
  }
}

bool KindTables::fits(size_t micro_batch_at, size_t place, int begin, int end, int after) const {
  const auto d = static_cast<size_t>(places_[place].split_at), from = static_cast<size_t>(begin),
             to = static_cast<size_t>(end);
  const double bytes = parameters_[d][to] - parameters_[d][from] +
                       (activations_[d][to] - activations_[d][from]) *
                           static_cast<double>(micro_batches_[micro_batch_at]) * (after + 1) +
                       problem_->reserved_bytes[d];
  // Sums of prefixes round otherwise than the price's sums.
  return bytes * (1 + 1e-12) <= problem_->types[places_[place].type].memory_bytes;
}

double KindTables::fastest(std::span<const int> cuts, std::span<const int> least) const {
  double best = 0;
  for (size_t b = 0; b < micro_batches_.size(); ++b) {
    double slowest = 1e-12;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      double here = kNever;
      for (size_t p = 0; p < places_.size(); ++p)
        if (places_[p].split_at >= least[i * problem_->types.size() + static_cast<size_t>(places_[p].type)] &&
            fits(b, p, cuts[i], cuts[i + 1], static_cast<int>(cuts.size()) - 2 - static_cast<int>(i)))
          here = std::min(here, stage_seconds(b, p, cuts[i], cuts[i + 1]));
      slowest = std::max(slowest, here);
    }
    best = std::max(best, static_cast<double>(micro_batches_[b]) / slowest);
  }
  return best;
}

// For a bound of the slowest stage, samples by the deadline fall with each second of the pipeline's fill alone, so that
// the best places are a shortest path through the stages: seconds of a stage by what a second costs, plus its devices.
double KindTables::kinds(std::span<const int> cuts, std::span<const int> least, double deadline,
                         std::span<const double> price, double step, std::vector<ReplicaKind>& out) const {
  const size_t stages = cuts.size() - 1, places = places_.size(), types = problem_->types.size();
  struct Step {
    double cost = kNever;
    double open = 0;                       // seconds of this stage up to now: compute, and its send back
    double sum = 0, peak = 0, update = 0;  // of the stages before it
    int32_t from = -1;
  };
  std::vector<double> compute(stages * places), worth(places), asked;
  std::vector<Step> steps(stages * places);
  for (size_t p = 0; p < places; ++p)
    for (size_t r = 0; r + 1 < rows_; ++r) worth[p] += price[r] * places_[p].use[r];
  double best_ratio = 0;
  for (size_t b = 0; b < micro_batches_.size(); ++b) {
    const auto samples = static_cast<double>(micro_batches_[b]);
    // No stage is faster than on its fastest place, nor slower than on its slowest.
    double lowest = 0, highest = 0;
    for (size_t i = 0; i < stages; ++i) {
      double fastest = kNever;
      for (size_t p = 0; p < places; ++p) {
        double& seconds = compute[i * places + p];
        seconds = kNever;
        if (places_[p].split_at < least[i * types + static_cast<size_t>(places_[p].type)]) continue;
        if (!fits(b, p, cuts[i], cuts[i + 1], static_cast<int>(stages - 1 - i))) continue;
        seconds = stage_seconds(b, p, cuts[i], cuts[i + 1]);
        if (seconds >= kNever) continue;
        fastest = std::min(fastest, seconds);
        highest = std::max(highest, 1.5 * seconds);
      }
      lowest = std::max(lowest, fastest);
    }
    if (lowest >= deadline) continue;
    std::vector<int32_t> before;
    for (double bound = lowest * 1.01; bound < highest * step && bound < deadline; bound *= step) {
      const double second = samples / bound;
      // Places of which there are too few for one such replica become dearer until it has others.
      asked = worth;
      for (int turn = 0; turn < 8; ++turn) {
        std::ranges::fill(steps, Step{});
        for (size_t p = 0; p < places; ++p) {
          if (compute[p] > bound) continue;
          Step& first = steps[p];
          first.open = compute[p];
          first.cost = asked[p];
          first.update = problem_->types[places_[p].type].slower * times_[b * places + p]->update_seconds[0];
        }
        for (size_t i = 1; i < stages; ++i)
          for (size_t p = 0; p < places; ++p) {
            const double here = compute[i * places + p];
            if (here > bound) continue;
            Step& best = steps[i * places + p];
            for (size_t q = 0; q < places; ++q) {
              const Step& last = steps[(i - 1) * places + q];
              if (last.cost >= kNever) continue;
              const double forward = send(b, cuts[i] - 1, q, p), back = send(b, cuts[i], p, q);
              const double whole = last.open + (i == 1 && stages > 3 ? 2 * forward : forward);
              const double open = here + (i + 1 == stages ? 2 * back : back);
              if (whole > bound || open > bound) continue;
              const double cost = last.cost + second * whole + asked[p];
              if (best.cost < kNever && cost + second * open >= best.cost + second * best.open) continue;
              best = {.cost = cost,
                      .open = open,
                      .sum = last.sum + whole,
                      .peak = std::max(last.peak, whole),
                      .update = std::max(last.update, problem_->types[places_[p].type].slower *
                                                          times_[b * places + p]->update_seconds[cuts[i]]),
                      .from = static_cast<int32_t>(q)};
            }
          }
        size_t end = places;
        for (size_t p = 0; p < places; ++p) {
          const Step& here = steps[(stages - 1) * places + p];
          if (here.cost >= kNever) continue;
          if (end == places || here.cost + second * here.open < steps[(stages - 1) * places + end].cost +
                                                                    second * steps[(stages - 1) * places + end].open)
            end = p;
        }
        if (end == places) break;
        const Step& last = steps[(stages - 1) * places + end];
        ReplicaKind kind{.use = {},
                         .micro_batch = micro_batches_[b],
                         .fill = 0,
                         .peak = std::max(last.peak, last.open),
                         .stages = {}};
        kind.fill = last.sum + last.open + last.update - kind.peak;
        if (kind.fill + kind.peak > deadline) break;
        kind.stages.resize(stages);
        double value = price[rows_ - 1];
        for (size_t i = stages, p = end; i-- > 0;) {
          kind.stages[i] = {places_[p].type, problem_->splits[places_[p].split_at]};
          for (size_t r = 0; r + 1 < rows_; ++r) kind.use[r] += places_[p].use[r];
          value += worth[p];
          p = static_cast<size_t>(steps[i * places + p].from);
        }
        kind.use[rows_ - 1] = 1;
        bool possible = true;
        for (size_t r = 0; r + 1 < rows_; ++r) {
          if (kind.use[r] <= have_[r]) continue;
          possible = false;
          for (size_t p = 0; p < places; ++p)
            if (places_[p].use[r] > 0) asked[p] = 1.7 * asked[p] + 0.01 * samples * places_[p].use[r];
        }
        if (!possible) continue;
        const double by = samples * (deadline - kind.fill) / kind.peak;
        best_ratio = std::max(best_ratio, by / std::max(value, 1e-12));
        if (by < 0.8 * value) break;
        if (std::ranges::none_of(out, [&](const ReplicaKind& k) {
              return k.micro_batch == kind.micro_batch && k.stages == kind.stages;
            }))
          out.push_back(std::move(kind));
        break;
      }
    }
  }
  return best_ratio;
}

bool KindTables::all_kinds(std::span<const int> cuts, std::span<const int> least, double deadline, size_t most,
                           std::vector<ReplicaKind>& out) const {
  const size_t stages = cuts.size() - 1, places = places_.size(), types = problem_->types.size();
  size_t ways = micro_batches_.size();
  for (size_t i = 0; i < stages; ++i)
    if ((ways *= places) > most) return false;
  for (size_t way = 0; way < ways; ++way) {
    const size_t b = way % micro_batches_.size();
    ReplicaKind kind{.use = {}, .micro_batch = micro_batches_[b], .fill = 0, .peak = 0, .stages = {}};
    std::vector<size_t> at(stages);
    bool possible = true;
    double update = 0;
    for (size_t i = 0, left = way / micro_batches_.size(); i < stages && possible; ++i, left /= places) {
      const size_t p = at[i] = left % places;
      possible = places_[p].split_at >= least[i * types + static_cast<size_t>(places_[p].type)] &&
                 stage_seconds(b, p, cuts[i], cuts[i + 1]) < kNever &&
                 fits(b, p, cuts[i], cuts[i + 1], static_cast<int>(stages - 1 - i));
      if (!possible) break;
      for (size_t r = 0; r + 1 < rows_; ++r) possible &= (kind.use[r] += places_[p].use[r]) <= have_[r];
      kind.stages.push_back({places_[p].type, problem_->splits[places_[p].split_at]});
      update =
          std::max(update, problem_->types[places_[p].type].slower * times_[b * places + p]->update_seconds[cuts[i]]);
    }
    if (!possible) continue;
    double sum = 0;
    for (size_t i = 0; i < stages; ++i) {
      double here = stage_seconds(b, at[i], cuts[i], cuts[i + 1]);
      if (i + 1 == stages) {
        if (i > 0) here += 2 * send(b, cuts[i], at[i], at[i - 1]);
      } else {
        here += (i == 0 && stages > 3 ? 2 : 1) * send(b, cuts[i + 1] - 1, at[i], at[i + 1]);
        if (i > 0) here += send(b, cuts[i], at[i], at[i - 1]);
      }
      sum += here;
      kind.peak = std::max(kind.peak, here);
    }
    kind.fill = sum + update - kind.peak;
    kind.use[rows_ - 1] = 1;
    if (kind.fill + kind.peak > deadline) continue;
    if (std::ranges::none_of(
            out, [&](const ReplicaKind& k) { return k.micro_batch == kind.micro_batch && k.stages == kind.stages; }))
      out.push_back(std::move(kind));
  }
  return true;
}

}  // namespace whale
