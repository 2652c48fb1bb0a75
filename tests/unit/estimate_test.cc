// What is estimated without making the plan against what the plan says.
#include "golden.h"
#include "report/estimate.h"

using namespace whale;
using namespace whale::golden;

namespace {

struct Row {
  const char *devices, *strategy;
  int zero = 0;
  int64_t accumulation = 0;
  Recompute recompute = Recompute::kNone;
  uint32_t offload = 0;
};

}  // namespace

TEST_CASE("an estimate's memory is the plan's, on every device") {
  Gpt s;
  s.batch = 16, s.layers = 4, s.dim = 64, s.heads = 8, s.seq = 32;
  const Graph graph = graph_of(s);
  for (const Row& row : {Row{"null:8", "split(8)"},
                         {"null:8", "pipeline(4, micro_batches=8) > split(2)", 1},
                         {"null:8", "replica(2) > pipeline(2, micro_batches=4, schedule=zb_v) > split(2)", 3},
                         {"null:4", "pipeline(2, micro_batches=4, schedule=interleaved, chunks=2) > replica(2)", 2},
                         {"null:3", "replica(3, shares=[3,2,1])", 1},
                         {"null:5", "replica(2) > split(3, shares=[[2,1,1],[1,1]])", 1, 4},
                         {"null:2", "replica(2)", 0, 2, Recompute::kFull},
                         {"null:2", "replica(2)", 1, 2, Recompute::kSelective, kOffloadAll},
                         {"null-1MB:2", "replica(2)"}}) {
    CAPTURE(row.strategy);
    CompileOptions options{.strategy = row.strategy, .accumulation = row.accumulation};
    options.zero = row.zero, options.recompute = row.recompute, options.offload = row.offload;
    const std::vector<DeviceSpec> devices = parse_devices(row.devices);
    const Estimate e = estimate(graph, devices, options);
    const bool fits = devices[0].memory_bytes == 0;
    CHECK((missing_bytes(e, devices) > 0) == !fits);
    CHECK(e.seconds > 0);
    if (!fits) {
      CHECK_THROWS(compile(graph, devices, options));
      continue;
    }
    const Plan plan = compile(graph, devices, options);
    const Entry& entry = plan.entries[0];
    size_t seen = 0;
    for (const Estimate::Class& c : e.classes)
      for (const int32_t d : c.devices) {
        CAPTURE(d);
        ++seen;
        const auto program = static_cast<size_t>(entry.rows[static_cast<size_t>(d)].program);
        const MemoryFigures want = memory_of(plan, entry, program);
        for (const auto& [mine, its] :
             {std::pair{&c.memory.device, &want.device}, std::pair{&c.memory.host, &want.host}}) {
          CHECK(mine->parameters == its->parameters);
          CHECK(mine->gradients == its->gradients);
          CHECK(mine->state == its->state);
          CHECK(mine->copies == its->copies);
          CHECK(mine->activations == its->activations);
        }
        CHECK(c.seconds > 0);
      }
    CHECK(seen == devices.size());
  }
}
