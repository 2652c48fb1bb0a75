// Header of safetensors files. What it accepts lies inside the data.
#include <cstdlib>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr uint64_t kDataBytes = 4096;
  try {
    const auto tensors = whale::parse_safetensors_header("fuzz", reinterpret_cast<const char*>(data), size, kDataBytes);
    for (const whale::StoredTensor& t : tensors) {
      if (t.end > kDataBytes || t.begin > t.end) std::abort();
      if (t.bytes() != static_cast<uint64_t>(whale::element_count(t.dims) * whale::size_of(t.dtype))) std::abort();
    }
  } catch (const whale::Error&) {
  }
  return 0;
}

namespace whale::fuzz {

std::vector<Bytes> seeds() {
  return {
      bytes(R"({"w":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]}})"),
      bytes(
          R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[16],"data_offsets":[0,32]},"b":{"dtype":"I64","shape":[],"data_offsets":[32,40]}})"),
      bytes(R"({"full":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}})"), bytes("{}")};
}

std::vector<std::string> tokens() {
  return {"{",
          "}",
          "[",
          "]",
          ":",
          ",",
          "\"",
          "\\u0000",
          "\\ud800",
          "\"dtype\"",
          "\"shape\"",
          "\"data_offsets\"",
          "F32",
          "-1",
          "1e400",
          "18446744073709551615",
          "9223372036854775807",
          "null",
          "true",
          std::string(200, '[')};
}

}  // namespace whale::fuzz
