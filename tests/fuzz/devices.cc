// Parsers of device lists and of cluster files. What the first accepts prints to text that means the same, but that
// cores which were dealt are named in it.
#include <cstdlib>

#include "base/error.h"
#include "cluster/cluster_file.h"
#include "cluster/devices.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    if (whale::is_cluster_json(text)) {
      (void)whale::devices_of_json(text);
      return 0;
    }
    const std::vector<int> cores = {0, 1, 2, 3};
    auto devices = whale::parse_devices(text, cores);
    for (whale::DeviceSpec& device : devices) device.named = !device.cores.empty();
    if (whale::parse_devices(whale::to_string(devices), cores) != devices) std::abort();
  } catch (const whale::Error&) {
  }
  return 0;
}

namespace whale::fuzz {

std::vector<Bytes> seeds() {
  return {bytes("cpu:4"),
          bytes("cpu@0,cpu@1*2"),
          bytes("ref:3"),
          bytes("null:8"),
          bytes("cpu@0-1*2,ref:1"),
          bytes("cuda:2"),
          bytes("cuda@0"),
          bytes("8xV100-32GB + 8xP100-16GB, 50Gb/s@20us"),
          bytes("2xT4:4~50Gb/s@20us~6GB/s|null-80GB:2~1e9B/s"),
          bytes(R"({"nodes": [{"count": 2, "devices": [{"type": "T4", "count": 2, "flops_per_second": {"f32": 5e12}}],
                    "network": "25Gb/s@20us", "inside": {"bytes_per_second": 1e10, "latency_seconds": 1e-6}}]})"),
          bytes(R"({"probe": 1, "devices": [{"device_text": "cpu@0", "bytes_per_second": 1e10,
                    "flops_per_second": {"f32": {"128": 1e11}}}], "gather": {"bytes_per_second": 1e9}})")};
}

std::vector<std::string> tokens() {
  return {"cpu",
          "ref",
          "null",
          "cuda",
          ":",
          "@",
          "*",
          ",",
          "-",
          "0",
          "1",
          "65536",
          "99999999999999999999",
          "-1",
          " ",
          "~",
          "x",
          "+",
          "|",
          "T4",
          "V100-32GB",
          "nodes of",
          "Gb/s",
          "us",
          "1e999",
          "nan",
          "{",
          "}",
          "null",
          "count"};
}

}  // namespace whale::fuzz
