// Gradients that are values of a later stage's forward pass.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "plan/verify.h"
#include "prove/prove.h"
#include "trained.h"

namespace whale {
namespace {

using enum OpCode;

// The gradient of `a` for a sum of a * b is b, which the last stage makes.
small::Model product() {
  small::Model m;
  m.g.name = "product";
  const TensorId x = m.input("x", {7, 8});
  const TensorId a = m.op(k_tanh, {m.op(k_matmul, {x, m.variable("wa", {8, 8})})}, {}, "a");
  TensorId b = m.op(k_matmul, {x, m.variable("wb", {8, 8})});
  for (const char* name : {"w1", "w2", "w3", "w4"})
    b = m.op(k_sigmoid, {m.op(k_matmul, {b, m.variable(name, {8, 8})})}, {}, std::string("b.") + name);
  m.minimize(m.op(k_reduce_sum, {m.op(k_mul, {a, b})}, {}, "loss"), OptimizerKind::kSgd);
  return m;
}

Plan plan_of(const std::string& devices, const std::string& strategy, int64_t accumulation, bool overlap) {
  CompileOptions options;
  options.strategy = strategy, options.accumulation = accumulation, options.overlap = overlap;
  return compile(product().g, parse_devices(devices, {0, 1, 2, 3}), options);
}

TEST_CASE("what goes to an earlier stage goes there with the gradients") {
  for (const auto& [stages, schedule] :
       std::vector<std::pair<int, const char*>>{{2, "gpipe"}, {3, "1f1b"}, {2, "zb_h1"}, {3, "zb_v"}})
    for (const bool overlap : {true, false}) {
      CAPTURE(schedule);
      CAPTURE(overlap);
      const Plan plan =
          plan_of(fmt::format("ref:{}", stages),
                  fmt::format("pipeline({}, micro_batches=3, schedule={})", stages, schedule), 0, overlap);
      CHECK_NOTHROW(verify(plan));
      CHECK(prove(plan).verdict == ProofVerdict::kProven);
      std::set<std::string> sent;  // by backward work
      for (const Program& p : plan.entries[0].programs)
        for (const Segment& s : p.segments)
          for (const Instruction& i : s.instructions)
            if (i.kind() == InstructionKind::kSend && s.name.starts_with("backward"))
              sent.insert(p.buffers[i.in[0]].name);
      CHECK(sent.contains("b.w4") == (std::string(schedule) != "zb_v"));  // whose first and last stage are one device's
      const auto one = small::train(plan_of("ref:1", "local", 3, true));
      CHECK(small::distance(one, small::train(plan)) < 3e-6);
    }
}

}  // namespace
}  // namespace whale
