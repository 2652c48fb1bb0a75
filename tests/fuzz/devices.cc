// Parser of device lists. What it accepts prints to text that means the same, but that cores which were dealt are named
// in it.
#include <cstdlib>

#include "base/error.h"
#include "cluster/devices.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
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
  return {bytes("cpu:4"),           bytes("cpu@0,cpu@1*2"), bytes("ref:3"), bytes("null:8"),
          bytes("cpu@0-1*2,ref:1"), bytes("cuda:2"),        bytes("cuda@0")};
}

std::vector<std::string> tokens() {
  return {"cpu", "ref", "null", "cuda", ":", "@", "*", ",", "-", "0", "1", "65536", "99999999999999999999", "-1", " "};
}

}  // namespace whale::fuzz
