#include "base/crc32c.h"

#include <array>
#include <cstring>

namespace whale {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reversed

// Eight tables: what a byte does to the checksum when 0 to 7 bytes follow it in the same word (Kounavis and Berry,
// 2005).
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}();

#ifdef __x86_64__
__attribute__((target("sse4.2"))) uint32_t by_instruction(const unsigned char* at, size_t bytes, uint32_t before) {
  uint64_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    crc = __builtin_ia32_crc32di(crc, word);
  }
  auto tail = static_cast<uint32_t>(crc);
  for (; bytes > 0; --bytes, ++at) tail = __builtin_ia32_crc32qi(tail, *at);
  return ~tail;
}
#endif

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before) {
  const auto* at = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint32_t next = 0;
    for (size_t k = 0; k < 4; ++k) {
      next ^= kTables[7 - k][(crc >> 8 * k & 255) ^ at[k]];
      next ^= kTables[3 - k][at[4 + k]];
    }
    crc = next;
  }
  for (; bytes > 0; --bytes, ++at) crc = crc >> 8 ^ kTables[0][(crc & 255) ^ *at];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
#ifdef __x86_64__
  static const bool instruction = __builtin_cpu_supports("sse4.2");
  if (instruction) return by_instruction(static_cast<const unsigned char*>(data), bytes, before);
#endif
  return crc32c_by_tables(data, bytes, before);
}

}  // namespace whale
