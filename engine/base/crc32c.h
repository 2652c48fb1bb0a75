// CRC-32C (Castagnoli; RFC 3720, section 12.1), the checksum of iSCSI, ext4 and Btrfs: any change of up to 32 bits in a
// row is noticed with certainty. By the processor's instruction where it has one, by tables elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace whale {

// Of `bytes` bytes, after bytes whose checksum is `before` (0: none), so that a stream is summed piece by piece.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);
uint32_t crc32c_by_tables(const void* data, size_t bytes, uint32_t before = 0);  // the same, on any processor

}  // namespace whale
