// The checksum behind the bytes of a model or a plan file.
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "schema/graph_file.h"

namespace whale {
namespace {
constexpr char kMark[] = {'W', 'H', 'C', '1'};
constexpr size_t kChecksumBytes = sizeof kMark + sizeof(uint32_t);
}  // namespace

std::vector<uint8_t> with_checksum(std::vector<uint8_t> bytes) {
  const uint32_t sum = crc32c(bytes.data(), bytes.size());
  bytes.insert(bytes.end(), std::begin(kMark), std::end(kMark));
  for (int i = 0; i < 4; ++i) bytes.push_back(static_cast<uint8_t>(sum >> (8 * i)));
  return bytes;
}

bool has_checksum(const uint8_t* data, size_t size) {
  return size >= kChecksumBytes && std::memcmp(data + size - kChecksumBytes, kMark, sizeof kMark) == 0;
}

size_t without_checksum(const uint8_t* data, size_t size) {
  if (!has_checksum(data, size)) return size;
  const size_t rest = size - kChecksumBytes;
  uint32_t sum = 0;
  for (size_t i = 4; i > 0; --i) sum = sum << 8 | data[size - 5 + i];
  if (sum != crc32c(data, rest))
    throw error(Code::kDataLoss,
                "it is damaged: its checksum is not that of its {} bytes, so some changed since it was written. Take "
                "another copy, or write it again",
                rest);
  return rest;
}

}  // namespace whale
