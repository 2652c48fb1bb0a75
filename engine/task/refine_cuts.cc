#include "task/refine_cuts.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/watch.h"

namespace whale {

double seconds_of_cuts(const PipelineOfCuts& pipeline, const std::vector<size_t>& begins) {
  std::vector<StageTimes> times;
  std::vector<LinkTimes> links;
  for (size_t s = 0; s < begins.size(); ++s) {
    const size_t end = s + 1 < begins.size() ? begins[s + 1] : pipeline.places;
    times.push_back(pipeline.times(begins[s], end, s));
    if (!std::isfinite(times.back().forward)) return std::numeric_limits<double>::infinity();
    if (s + 1 < begins.size()) links.push_back(pipeline.sends(end, s));
  }
  double best = std::numeric_limits<double>::infinity();
  for (const std::vector<int>& warmup : pipeline.warmups)
    best = std::min(best, seconds_of_1f1b(pipeline.micro_batches, times, links, warmup));
  return best;
}

std::vector<size_t> refined_cuts(const PipelineOfCuts& pipeline, std::vector<size_t> begins) {
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

}  // namespace whale
