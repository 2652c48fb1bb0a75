// The checksum in a model or a plan file. Bytes 0 to 8 are FlatBuffers' root offset and identifier; behind them stand,
// little endian: the mark, the CRC-32C of all but itself, and how many bytes the file has.
#include <algorithm>
#include <cstring>

#include "base/crc32c.h"
#include "base/error.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

using Mark = char[4];
constexpr Mark kMark = {'W', 'H', 'C', '2'}, kMarkAtEnd = {'W', 'H', 'C', '1'};  // at the end: versions before
constexpr size_t kMarkAt = 8, kSumAt = 12, kSizeAt = 16, kRestAt = 24;
constexpr size_t kHeaderBytes = kRestAt - kMarkAt;  // what is behind keeps its alignment
constexpr size_t kEndBytes = sizeof(Mark) + sizeof(uint32_t);

uint64_t read(const uint8_t* at, size_t bytes) {
  uint64_t value = 0;
  while (bytes-- > 0) value = value << 8 | at[bytes];
  return value;
}
void write(uint8_t* at, size_t bytes, uint64_t value) {
  for (size_t i = 0; i < bytes; ++i) at[i] = static_cast<uint8_t>(value >> (8 * i));
}

bool marked(const uint8_t* data, size_t size) {
  return size >= kRestAt && std::memcmp(data + kMarkAt, kMark, sizeof kMark) == 0;
}
bool marked_at_end(const uint8_t* data, size_t size) {
  return size >= kEndBytes && std::memcmp(data + size - kEndBytes, kMarkAtEnd, sizeof kMarkAtEnd) == 0;
}
uint32_t sum_of(const uint8_t* data, size_t size) {
  return crc32c(data + kSizeAt, size - kSizeAt, crc32c(data, kSumAt));
}

constexpr const char* kAgain = "Take another copy, or write it again";

}  // namespace

std::vector<uint8_t> with_checksum(std::vector<uint8_t> bytes) {
  bytes.insert(bytes.begin() + kMarkAt, kHeaderBytes, 0);
  write(bytes.data(), 4, read(bytes.data(), 4) + kHeaderBytes);
  std::copy(std::begin(kMark), std::end(kMark), bytes.begin() + kMarkAt);
  write(bytes.data() + kSizeAt, 8, bytes.size());
  write(bytes.data() + kSumAt, 4, sum_of(bytes.data(), bytes.size()));
  return bytes;
}

bool has_checksum(const uint8_t* data, size_t size) { return marked(data, size) || marked_at_end(data, size); }

size_t checked_size(const uint8_t* data, size_t size, std::string_view what) {
  if (marked(data, size) && read(data + kSizeAt, 8) != size)
    throw error(Code::kDataLoss, "{} is damaged: it has {} bytes, and was written with {}. {}", what, size,
                read(data + kSizeAt, 8), kAgain);
  // A FlatBuffer without a checksum has no such number there; zeros for the mark say that there is none.
  if (!marked(data, size) && size >= kRestAt && read(data + kMarkAt, 4) != 0 && read(data + kSizeAt, 8) == size)
    throw error(Code::kDataLoss, "{} is damaged: the mark of its checksum changed since it was written. {}", what,
                kAgain);
  const bool at_end = !marked(data, size) && marked_at_end(data, size);
  const size_t rest = at_end ? size - kEndBytes : size;
  const bool right = at_end               ? read(data + size - 4, 4) == crc32c(data, rest)
                     : marked(data, size) ? read(data + kSumAt, 4) == sum_of(data, size)
                                          : true;
  if (!right)
    throw error(Code::kDataLoss,
                "{} is damaged: its checksum is not that of its {} bytes, so some changed since it was written. {}",
                what, rest, kAgain);
  return rest;
}

}  // namespace whale
