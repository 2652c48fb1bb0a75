// What waits in the host's memory leaves the device's, and changes no bit.
#include <doctest/doctest.h>

#include "plan/figures.h"
#include "rewrite/offload.h"
#include "trained.h"

namespace whale {
namespace {

struct Setup {
  const char* devices;
  const char* strategy;
  int64_t accumulation;
  int zero;
  Recompute recompute = Recompute::kNone;
  bool exact = false;
};

Plan plan_of(const small::Model& m, const Setup& s, uint32_t classes) {
  CompileOptions options;
  options.strategy = s.strategy;
  options.accumulation = s.accumulation;
  options.zero = s.zero;
  options.recompute = s.recompute;
  options.exact = s.exact;
  options.offload = classes;
  return compile(m.g, parse_devices(s.devices, {0, 1, 2, 3}), options);
}

int64_t moves(const Plan& plan) {
  int64_t n = 0;
  for (const Program& p : plan.entries[0].programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions) n += i.kind() == InstructionKind::kCopy;
  return n;
}

small::Model clipped(small::Model m) {
  m.g.training.clip_norm = 0.1;
  return m;
}

TEST_CASE("offload: names of classes") {
  CHECK(parse_offload("") == 0);
  CHECK(parse_offload("state") == kOffloadState);
  CHECK(parse_offload("activations, parameters") == (kOffloadActivations | kOffloadParameters));
  CHECK(parse_offload(offload_text(kOffloadAll)) == kOffloadAll);
  CHECK_THROWS_WITH_AS(parse_offload("state,weights"),
                       doctest::Contains("there are state, gradients, parameters, activations"), Error);
}

TEST_CASE("offload changes no bit, class by class and all together") {
  const small::Model adam = clipped(small::gpt(6, OptimizerKind::kAdamW, 3)),
                     plain = small::gpt(6, OptimizerKind::kAdamW, 2), resnet = small::resnet(6);
  struct Case {
    const small::Model& m;
    Setup setup;
  };
  for (const Case& c : std::vector<Case>{
           {adam, {"ref:1", "", 1, 0}},
           {plain, {"ref:1", "", 1, 0}},
           {resnet, {"ref:1", "", 1, 0}},
           {adam, {"ref:1", "", 3, 0}},
           {adam, {"ref:2", "", 2, 2}},
           {adam, {"ref:2", "", 1, 3}},
           {adam, {"ref:2", "split(2)", 1, 0}},
           {adam, {"ref:4", "replica(2) > split(2)", 3, 3}},
           {plain, {"ref:2", "pipeline(2, micro_batches=3)", 1, 0}},
           {adam, {"ref:2", "pipeline(2, micro_batches=4, schedule=zb_h1)", 1, 0}},
           {adam, {"ref:2", "pipeline(2, micro_batches=4, schedule=zb_v)", 1, 0}},
           {adam, {"ref:2", "pipeline(2, micro_batches=2, schedule=interleaved, virtual_stages=2)", 1, 0}},
           {adam, {"ref:4", "replica(2) > pipeline(2, micro_batches=3)", 1, 3, Recompute::kFull}},
           {plain, {"ref:3", "replica(3, shares=[3,2,1])", 1, 1, Recompute::kSelective}},
           {adam, {"ref:1", "", 3, 0, Recompute::kNone, true}},
           {adam, {"ref:2", "", 3, 1, Recompute::kFull, true}},
           {adam, {"ref:2", "pipeline(2, micro_batches=3)", 1, 0, Recompute::kNone, true}},
           {adam, {"cpu:1", "", 1, 0}},
           {adam, {"cpu:2", "", 2, 1}}}) {
    CAPTURE(c.setup.devices);
    CAPTURE(c.setup.strategy);
    CAPTURE(c.setup.accumulation);
    CAPTURE(c.setup.zero);
    CAPTURE(c.setup.exact);
    const int64_t vocab = &c.m == &resnet ? 5 : 32;
    const Plan none = plan_of(c.m, c.setup, 0);
    CHECK(moves(none) == 0);
    const small::Trained want = small::train(none, 2, vocab);
    for (const uint32_t classes : {1u, 2u, 4u, 8u, 15u}) {
      CAPTURE(classes);
      const Plan plan = plan_of(c.m, c.setup, classes);
      const bool idle = (classes == kOffloadGradients && plan.micro_batches == 1) ||  // updates follow at once
                        (classes == kOffloadState && &c.m == &resnet);                // SGD has none
      if (!idle) CHECK(moves(plan) > 0);
      CHECK(small::train(plan, 2, vocab) == want);
      const std::vector<uint8_t> bytes = serialize(plan);
      CHECK(print(deserialize(bytes.data(), bytes.size())) == print(plan));
    }
  }
}

TEST_CASE("offload: what waits elsewhere does not count on the device") {
  const small::Model m = small::gpt(4, OptimizerKind::kAdamW, 6, 64, 64, 64, 2);
  const auto memory = [&](uint32_t classes, int64_t accumulation) {
    const Plan plan = plan_of(m, {"ref:1", "", accumulation, 0}, classes);
    return memory_of(plan, plan.entries[0], 0);
  };
  const MemoryFigures none = memory(0, 1), state = memory(kOffloadState, 1), parameters = memory(kOffloadParameters, 1),
                      activations = memory(kOffloadActivations, 1), all = memory(kOffloadAll, 2), summed = memory(0, 2),
                      sums = memory(kOffloadGradients, 2);
  CHECK(none.host.total() == 0);
  const auto told = [](const char* name, const MemoryFigures& f) {
    MESSAGE(name, ": parameters ", f.device.parameters, ", gradients ", f.device.gradients, ", state ", f.device.state,
            ", activations ", f.device.activations, ", copies ", f.device.copies, "; on the host ", f.host.total());
  };
  told("none", none), told("state", state), told("parameters", parameters), told("activations", activations);
  told("two micro-batches", summed), told("their sums", sums), told("all", all);
  CHECK(none.device.state == 2 * none.device.parameters);
  CHECK(state.device.state == 0);
  CHECK(state.host.state == none.device.state);
  CHECK(state.device.total() < none.device.total());
  CHECK(parameters.host.parameters == none.device.parameters);
  CHECK(parameters.device.total() < none.device.total());
  CHECK(activations.device.arena() * 3 < none.device.arena() * 2);
  CHECK(activations.host.activations > 0);
  CHECK(sums.host.gradients * 10 > none.device.parameters * 9);  // small ones stay
  CHECK(sums.device.total() < summed.device.total());
  CHECK(all.device.total() * 2 < summed.device.total());
}

// A copy out is done before its source's place has another tenant: the verifier, which works from the order of the
// queues and not from the planner's lives, finds a wait that is missing.
TEST_CASE("offload: a missing wait is found") {
  const Plan plan = plan_of(small::gpt(6, OptimizerKind::kAdamW, 2), {"ref:1", "", 1, 0}, kOffloadAll);
  size_t found = 0, waits = 0;
  const Program& program = plan.entries[0].programs[0];
  for (size_t s = 0; s < program.segments.size(); ++s)
    for (size_t k = 0; k < program.segments[s].instructions.size(); ++k) {
      const Instruction& i = program.segments[s].instructions[k];
      if (i.kind() != InstructionKind::kCopy || i.waits.empty()) continue;
      ++waits;
      Plan broken = plan;
      broken.entries[0].programs[0].segments[s].instructions[k].waits.clear();
      try {
        verify(broken);
      } catch (const Error&) {
        ++found;
      }
    }
  CHECK(waits > 10);
  CHECK(found * 3 > waits);  // others are waited for by a neighbour
}

}  // namespace
}  // namespace whale
