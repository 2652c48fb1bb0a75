// levels MODEL.whale DEVICES STRATEGY FOLDER: writes the text of the level after each pass of engine/compile/passes.cc,
// a file a pass, numbered. For docs/how-a-plan-is-made.md and for whoever changes a pass.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/error.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "schema/graph_file.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: levels MODEL.whale DEVICES STRATEGY FOLDER\n");
    return 2;
  }
  try {
    std::ifstream file(argv[1], std::ios::binary);
    const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
    const std::filesystem::path folder = argv[4];
    std::filesystem::create_directories(folder);
    int number = 0;
    whale::CompileOptions options;
    options.strategy = argv[3];
    options.dump = [&](std::string_view pass, const std::string& text) {
      std::ofstream(folder / fmt::format("{:02}.{}.txt", number++, pass)) << text;
    };
    whale::compile(whale::read_graph(bytes.data(), bytes.size()), whale::parse_devices(argv[2]), options);
    std::printf("%d levels in %s\n", number, argv[4]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "levels: %s\n", e.what());
    return 1;
  }
}
