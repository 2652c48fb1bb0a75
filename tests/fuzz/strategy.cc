// Parser of strategies. What it accepts prints to text that means the same.
#include <cstdlib>

#include "base/error.h"
#include "fuzz.h"
#include "task/strategy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const std::string printed = whale::to_string(whale::parse_strategy(text));
    if (whale::to_string(whale::parse_strategy(printed)) != printed) std::abort();
  } catch (const whale::Error&) {
  }
  return 0;
}

namespace whale::fuzz {

std::vector<Bytes> seeds() {
  return {bytes("replica"),
          bytes("replica(3, shares=[3,2,1])"),
          bytes("replica(2) > pipeline(4, micro_batches=8, schedule=1f1b) > split(2)"),
          bytes("split(ways=2, factor=heads)"),
          bytes("replica([pipeline(3, micro_batches=4), split(2) > replica(2)], shares=[3,5])"),
          bytes("stage(devices=2)"),
          bytes("cluster(device_order=average(2)) > replica")};
}

std::vector<std::string> tokens() {
  return {"replica",
          "split",
          "stage",
          "pipeline",
          "cluster",
          "(",
          ")",
          "[",
          "]",
          ",",
          "=",
          ">",
          " ",
          "shares",
          "count",
          "1e308",
          "-1",
          "nan",
          "99999999999999999999",
          "0",
          "1f1b",
          "micro_batches"};
}

}  // namespace whale::fuzz
