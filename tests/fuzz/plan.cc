// Reader of plans. What it accepts must print, and survive being written and read again.
#include <cstdlib>

#include "base/error.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "compile/source_check.h"
#include "fuzz.h"
#include "sample.h"
#include "schema/graph_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const whale::Plan plan = whale::deserialize(data, size);
    (void)whale::print(plan);
    (void)whale::summary(plan);
    try {
      whale::verify_source(plan);
    } catch (const whale::Error&) {  // a plan all the same, of another model than it says
    }
    const std::vector<uint8_t> written = whale::serialize(plan);
    if (whale::serialize(whale::deserialize(written.data(), written.size())) != written) std::abort();
  } catch (const whale::Error&) {
  }
  return 0;
}

namespace whale::fuzz {

std::vector<Bytes> seeds() {
  const Graph graph = sample_graph();
  Graph alone = graph;
  for (Op& op : alone.ops) op.scope = 0;
  alone.default_strategy.clear();
  Graph unlike = alone;
  alone.training.loss = kNone;
  CompileOptions nests;
  nests.strategy = "replica([split(2), replica(1)], shares=[3,1])";
  CompileOptions placed;  // rows fill holes
  placed.zero = 1;
  return {serialize(compile(graph, parse_devices("ref:2"))), serialize(compile(graph, parse_devices("ref:2"), placed)),
          serialize(compile(alone, parse_devices("cpu@0,null:1"))), serialize(compile(alone, parse_devices("ref:1"))),
          serialize(compile(unlike, parse_devices("ref:3"), nests))};
}

std::vector<std::string> tokens() { return {"WHG1", "WHP1", std::string(8, '\0'), std::string(8, '\xff')}; }

}  // namespace whale::fuzz
