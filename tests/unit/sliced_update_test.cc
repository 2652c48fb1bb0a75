// Forms of one update (CoCoNeT; Jangda et al., 2022): all-reduce and update on all devices, or reduce-scatter, update
// of the slice that a device keeps, all-gather. No bit differs.
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

// The table is looked up and multiplied with; in a pipeline in the first and in the last stage.
TEST_CASE("ZeRO 2 and 3: gradients that are made in pieces are the whole ones") {
  const small::Model models[] = {small::gpt(8, OptimizerKind::kSgd), small::gpt(8, OptimizerKind::kAdamW)};
  for (const small::Model& m : models) {
    const small::Trained one = small::train(m, "ref:1", {});
    for (const char* strategy :
         {"replica(2)", "replica(4)", "replica(2) > pipeline(2, micro_batches=4)", "replica(2) > replica(2)"})
      for (const int zero : {2, 3})
        for (const bool narrow : {false, true}) {
          CAPTURE(strategy);
          CAPTURE(zero);
          CAPTURE(narrow);
          CompileOptions options;
          options.strategy = strategy, options.zero = zero, options.bucket_bytes = 256;
          options.profile.product_rows = 1;
          if (narrow) options.gradient_dtype = DType::kBF16;
          if (!std::string_view(strategy).ends_with("micro_batches=4)")) options.accumulation = 4;
          const Plan plan =
              compile(m.g, parse_devices(strategy == std::string_view("replica(2)") ? "ref:2" : "ref:4", {0, 1, 2, 3}),
                      options);
          int joined = 0, wide = 0;
          for (const Program& p : plan.entries[0].programs)
            for (const Segment& s : p.segments)
              for (const Instruction& i : s.instructions) {
                joined += i.op() == OpCode::k_concat && i.phase == Phase::kBackward;
                for (const BufferId b : i.in)
                  wide +=
                      i.op() == OpCode::k_reduce_scatter && p.buffers[b].dtype != (narrow ? DType::kBF16 : DType::kF32);
              }
          CHECK(joined >= 5);
          CHECK(wide == 0);
          CHECK(distance(small::train(plan), one) <= (narrow ? 2e-2 : 1e-5));
        }
  }
}

}  // namespace
}  // namespace whale
