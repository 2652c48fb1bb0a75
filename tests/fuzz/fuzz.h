// A fuzz target: one function that any bytes may be given to, and the inputs that mutation starts from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Must not crash, hang, or throw anything but what the reader promises (whale::Error, caught inside).
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace whale::fuzz {

using Bytes = std::vector<uint8_t>;
inline Bytes bytes(const std::string& s) { return Bytes(s.begin(), s.end()); }

std::vector<Bytes> seeds();         // honest inputs, generated
std::vector<std::string> tokens();  // what splices insert, may be empty

}  // namespace whale::fuzz
