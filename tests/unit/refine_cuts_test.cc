#include "task/refine_cuts.h"

#include <doctest/doctest.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace whale {
namespace {

// Stages of random speeds over places of random work and traffic.
struct Problem {
  std::vector<double> work, traffic, speed, link;
  PipelineOfCuts pipeline;

  Problem(uint64_t seed, size_t places, size_t stages, int micro_batches) {
    std::mt19937_64 random(seed);
    const auto draw = [&](double least, double most) {
      return std::uniform_real_distribution<double>(least, most)(random);
    };
    for (size_t k = 0; k < places; ++k) work.push_back(draw(0.5, 2));
    for (size_t k = 0; k <= places; ++k) traffic.push_back(draw(0, 1) < 0.5 ? draw(0.2, 1) : draw(2, 5));
    for (size_t s = 0; s < stages; ++s) speed.push_back(draw(1, 4)), link.push_back(draw(0.5, 4));
    pipeline = {.places = places,
                .micro_batches = micro_batches,
                .warmups = {usual_warmup(static_cast<int>(stages), micro_batches)},
                .times =
                    [this](size_t begin, size_t end, size_t s) {
                      double sum = 0;
                      for (size_t k = begin; k < end; ++k) sum += work[k];
                      return StageTimes{.forward = sum / speed[s], .backward = 2 * sum / speed[s], .weight = 0};
                    },
                .sends =
                    [this](size_t place, size_t s) {
                      return LinkTimes{traffic[place] / link[s], traffic[place] / link[s]};
                    }};
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  double best_of_all(std::vector<size_t> begins) const {
    if (begins.size() == speed.size()) return seconds_of_cuts(pipeline, begins);
    double best = std::numeric_limits<double>::infinity();
    for (size_t at = begins.back() + 1; at + speed.size() - begins.size() <= pipeline.places; ++at) {
      std::vector<size_t> more = begins;
      more.push_back(at);
      best = std::min(best, best_of_all(std::move(more)));
    }
    return best;
  }
};

}  // namespace

TEST_CASE("cuts made better by the clock, beside all cuts there are") {
  double product = 1;
  int problems = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed)
    for (const size_t stages : {size_t{2}, size_t{3}, size_t{4}}) {
      const Problem problem(seed, 12, stages, 6);
      std::vector<size_t> even;
      for (size_t s = 0; s < stages; ++s) even.push_back(12 * s / stages);
      const std::vector<size_t> found = refined_cuts(problem.pipeline, {even}, false);
      const double seconds = seconds_of_cuts(problem.pipeline, found);
      const double best = problem.best_of_all({0});
      CHECK(found[0] == 0);
      CHECK(std::ranges::is_sorted(found));
      CHECK(seconds >= best * (1 - 1e-9));
      CHECK(seconds <= seconds_of_cuts(problem.pipeline, even));
      CHECK_MESSAGE(seconds <= 1.15 * best, "seed " << seed << ", " << stages << " stages");
      product *= seconds / best, ++problems;
    }
  CHECK(std::pow(product, 1.0 / problems) < 1.01);
}

TEST_CASE("a step of few micro-batches, by hand: work moves from the end of a slow link's stage") {
  // Two stages of speeds 1 and 1; place 2 halves the work and is dear to cross, place 3 is not.
  PipelineOfCuts pipeline{.places = 4,
                          .micro_batches = 2,
                          .warmups = {{2, 1}},
                          .times =
                              [](size_t begin, size_t end, size_t) {
                                return StageTimes{.forward = static_cast<double>(end - begin),
                                                  .backward = static_cast<double>(end - begin),
                                                  .weight = 0};
                              },
                          .sends =
                              [](size_t place, size_t) {
                                return place == 3 ? LinkTimes{0, 0} : LinkTimes{10, 10};
                              }};
  CHECK(refined_cuts(pipeline, {{0, 2}}, false) == std::vector<size_t>{0, 3});
  pipeline.sends = [](size_t, size_t) { return LinkTimes{0, 0}; };
  CHECK(refined_cuts(pipeline, {{0, 2}}, false) == std::vector<size_t>{0, 2});
}

}  // namespace whale
