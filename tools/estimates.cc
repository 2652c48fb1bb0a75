// estimates MODEL.whale DEVICES STRATEGY COUNT: the CPU time of an estimate, as a search for strategies makes them: of
// a graph that is known to hold, and from a few layers that nobody checks against one more (compile/estimate.h). One
// JSON line: the milliseconds of each, the first one left out.
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/heap.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "compile/estimate.h"
#include "schema/graph_file.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: estimates MODEL.whale DEVICES STRATEGY COUNT\n");
    return 2;
  }
  try {
    std::ifstream file(argv[1], std::ios::binary);
    const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
    const whale::Graph graph = whale::read_graph(bytes.data(), bytes.size());
    const std::vector<whale::DeviceSpec> devices = whale::parse_devices(argv[2]);
    whale::CompileOptions options;
    options.strategy = argv[3];
    options.verify_passes = false;
    std::vector<double> milliseconds;
    whale::keep_heap();  // as a search does
    for (int k = 0; k <= std::atoi(argv[4]); ++k) {
      const std::clock_t then = std::clock();
      whale::estimate_at(graph, devices, options, options.memory_price, whale::Care::kQuick);
      if (k > 0) milliseconds.push_back(1e3 * static_cast<double>(std::clock() - then) / CLOCKS_PER_SEC);
    }
    std::printf("%s\n", nlohmann::json(milliseconds).dump().c_str());
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "estimates: %s\n", e.what());
    return 1;
  }
}
