// What is estimated without lowering against what the lowered plan says.
#include <cmath>

#include "golden.h"

using namespace whale;
using namespace whale::golden;

TEST_CASE("an estimate's variables are exact, its memory is the plan's within 2 %") {
  Gpt s;
  s.batch = 16, s.layers = 8, s.dim = 1024, s.heads = 16, s.seq = 512;
  double worst = 0;
  for (const auto& [devices, strategy, micro_batches] :
       {std::tuple{8, "split(8)", 1},
        {8, "pipeline(4, micro_batches=8) > split(2)", 8},
        {16, "replica(2) > pipeline(4, micro_batches=8) > split(2)", 8},
        {4, "pipeline(4, micro_batches=16)", 16},
        {4, "replica(4)", 1},
        {8, "replica(2) > split(4)", 1}})
    for (const int zero : {0, 1}) {
      CompileOptions options{.strategy = strategy};
      options.zero = zero;
      const Graph graph = graph_of(s);
      const std::vector<DeviceSpec> all = parse_devices(fmt::format("null:{}", devices));
      const Plan plan = compile(graph, all, options);
      const Estimate e = estimate(graph, all, options);
      for (const Estimate::Class& c : e.classes)
        for (const int32_t device : c.devices) {
          const MemoryClasses &got = c.memory.device, want = memory(plan, device);
          const double off = static_cast<double>(got.total()) / static_cast<double>(want.total()) - 1;
          CAPTURE(strategy);
          CAPTURE(zero);
          CAPTURE(device);
          CHECK(got.parameters == want.parameters);
          CHECK(got.state == want.state);
          CHECK(got.buffers == want.buffers);
          CHECK(std::abs(off) < 0.02);
          worst = std::max(worst, std::abs(off));
        }
      CHECK(e.seconds > 0);
    }
  std::printf("estimate: at most %.2f %% off\n", 100 * worst);
}
