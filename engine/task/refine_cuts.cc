#include "task/refine_cuts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "base/watch.h"

namespace whale {

namespace {

// Of stages that begin at these places; nothing: one may not be so.
struct CutTimes {
  std::vector<StageTimes> stages = {};
  std::vector<LinkTimes> links = {};
};
std::optional<CutTimes> times_of_cuts(const PipelineOfCuts& pipeline, const std::vector<size_t>& begins) {
  CutTimes out;
  for (size_t s = 0; s < begins.size(); ++s) {
    const size_t end = s + 1 < begins.size() ? begins[s + 1] : pipeline.places;
    out.stages.push_back(pipeline.times(begins[s], end, s));
    if (!std::isfinite(out.stages.back().forward)) return std::nullopt;
    if (s + 1 < begins.size()) out.links.push_back(pipeline.sends(end, s));
  }
  return out;
}

}  // namespace

double seconds_of_cuts(const PipelineOfCuts& pipeline, const std::vector<size_t>& begins) {
  double best = std::numeric_limits<double>::infinity();
  if (const std::optional<CutTimes> times = times_of_cuts(pipeline, begins))
    for (const std::vector<int>& warmup : pipeline.warmups)
      best = std::min(best, seconds_of_1f1b(pipeline.micro_batches, times->stages, times->links, warmup));
  return best;
}

namespace {

std::vector<size_t> climbed(const PipelineOfCuts& pipeline, std::vector<size_t> begins) {
  constexpr int64_t kMostPasses = 60'000;  // that are walked
  constexpr double kGain = 1 - 1e-4;
  constexpr int64_t kFar = 48;  // places
  const size_t stages = begins.size();
  const int64_t passes = 2 * static_cast<int64_t>(stages * pipeline.warmups.size()) * pipeline.micro_batches;
  int64_t walked = passes;
  double best = seconds_of_cuts(pipeline, begins);
  const double at_first = best;
  const std::vector<size_t> start = begins;
  const auto moved = [&](size_t first, size_t last, int64_t by) {
    std::vector<size_t> out = begins;
    for (size_t s = first; s <= last; ++s) {
      const int64_t at = static_cast<int64_t>(begins[s]) + by;
      if (at <= static_cast<int64_t>(out[s - 1]) || at >= static_cast<int64_t>(pipeline.places)) return begins;
      out[s] = static_cast<size_t>(at);
    }
    return last + 1 < stages && out[last] >= out[last + 1] ? begins : out;
  };
  // Borders `first` to `first + run - 1` by this many places; whether that is better.
  const auto gains = [&](size_t first, size_t run, int64_t by) {
    std::vector<size_t> other = moved(first, first + run - 1, by);
    if (other == begins || walked + passes > kMostPasses) return false;
    Watch::look();
    walked += passes;
    const double seconds = seconds_of_cuts(pipeline, other);
    if (seconds >= best * kGain) return false;
    best = seconds, begins = std::move(other);
    return true;
  };
  const auto sweep = [&](const std::vector<int64_t>& distances) {
    bool better = false;
    for (const int64_t by : distances)
      for (size_t run = 1; run < stages; ++run)
        for (size_t first = 1; first + run <= stages; ++first)
          better |= gains(first, run, by) || gains(first, run, -by);
    return better;
  };
  // Few distances first; where those gain nothing, all: places of little traffic lie apart.
  std::vector<int64_t> all(kFar);
  std::iota(all.begin(), all.end(), int64_t{1});
  while (sweep({16, 8, 4, 2, 1}) || sweep(all)) {
  }
  return best > kWorthOtherCuts * at_first ? start : begins;
}

}  // namespace

std::vector<size_t> refined_cuts(PipelineOfCuts pipeline, const std::vector<std::vector<size_t>>& starts,
                                 bool finds_warmup) {
  constexpr int kRounds = 3;
  const std::vector<int> most(starts[0].size(), pipeline.micro_batches);
  std::vector<size_t> best;
  double least = std::numeric_limits<double>::infinity();
  const auto see = [&](const std::vector<size_t>& begins, double seconds) {
    if (best.empty() || seconds < least) least = seconds, best = begins;
  };
  const std::vector<std::vector<int>> given = pipeline.warmups;
  for (const std::vector<size_t>& start : starts) {
    pipeline.warmups = given;
    std::vector<size_t> begins = climbed(pipeline, start);
    see(begins, seconds_of_cuts(pipeline, begins));
    for (int round = 0; round < kRounds && finds_warmup; ++round) {
      const std::optional<CutTimes> times = times_of_cuts(pipeline, begins);
      if (!times) break;
      Warmup found = find_warmup(pipeline.micro_batches, times->stages, times->links, most);
      see(begins, found.seconds);
      if (std::ranges::find(pipeline.warmups, found.depths) != pipeline.warmups.end()) break;
      pipeline.warmups = {std::move(found.depths)};
      begins = climbed(pipeline, std::move(begins));
      see(begins, seconds_of_cuts(pipeline, begins));
    }
  }
  return best;
}

}  // namespace whale
