// Reader of graphs. What it accepts must print, and survive being written and read again.
#include <cstdlib>

#include "base/error.h"
#include "fuzz.h"
#include "sample.h"
#include "schema/graph_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const whale::Graph graph = whale::read_graph(data, size);
    (void)whale::print(graph);
    const std::vector<uint8_t> written = whale::serialize(graph);
    if (whale::serialize(whale::read_graph(written.data(), written.size())) != written) std::abort();
  } catch (const whale::Error&) {
  }
  return 0;
}

namespace whale::fuzz {

std::vector<Bytes> seeds() {
  Graph small;
  small.name = "small";
  const TensorId x = add_input(small, "x", DType::kF32, {4, 3});
  small.outputs.push_back({"y", small.op(append_op(small, OpCode::k_relu, {x})).outputs[0]});
  return {serialize(sample_graph()), serialize(small), serialize(Graph{})};
}

std::vector<std::string> tokens() { return {"WHG1", "WHP1", std::string(8, '\0'), std::string(8, '\xff')}; }

}  // namespace whale::fuzz
