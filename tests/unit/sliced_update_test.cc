// Forms of one update (CoCoNeT; Jangda et al., 2022): all-reduce and update everywhere, or reduce-scatter, update of
// the slice that a device keeps, all-gather. No bit differs.
#include <doctest/doctest.h>

#include "trained.h"

namespace whale {
namespace {

small::Model with_momentum(small::Model m) {
  m.g.training.optimizer.momentum = 0.9;
  return m;
}

TEST_CASE("updates: all-reduce, and a slice of state between reduce-scatter and all-gather, give the same bits") {
  const small::Model models[] = {small::gpt(12, OptimizerKind::kSgd),
                                 with_momentum(small::gpt(12, OptimizerKind::kSgd)),
                                 small::gpt(12, OptimizerKind::kAdamW)};
  struct Place {
    std::string devices, strategy;
    std::vector<double> state_shares;
    int64_t accumulation = 1;
  };
  const Place places[] = {{":2", "replica(2)", {}},           {":2", "replica(2)", {3, 1}},
                          {":3", "replica(3)", {}},           {":3", "replica(3)", {1, 0, 2}, 2},
                          {":4", "replica(4)", {2, 1, 1, 3}}, {":4", "replica(2) > split(2)", {1, 2}}};
  for (const std::string kind : {"ref", "cpu"}) {
    if (kind == "cpu" && small::backends_folder().empty()) continue;
    for (const Place& place : places)
      for (const small::Model& m : models) {
        CompileOptions options;
        options.strategy = place.strategy;
        options.accumulation = place.accumulation;
        const small::Trained whole = small::train(m, kind + place.devices, options, 2, 31);
        for (const int64_t bucket : {int64_t{0}, int64_t{1}}) {
          CAPTURE(kind + place.devices);
          CAPTURE(place.strategy);
          CAPTURE(bucket);
          options.bucket_bytes = bucket;
          options.zero = 0, options.state_shares = {};
          CHECK(small::train(m, kind + place.devices, options, 2, 31) == whole);
          options.zero = 1, options.state_shares = place.state_shares;
          CHECK(small::train(m, kind + place.devices, options, 2, 31) == whole);
        }
      }
  }
}

}  // namespace
}  // namespace whale
