// The counter-based generator of every random number in libwhale: Philox4x32-10 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC'11). A number depends on (seed, key, iteration, index) only, so no plan can change
// it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace whale {

using PhiloxBlock = std::array<uint32_t, 4>;

inline PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

inline uint64_t mix64(uint64_t x) {  // splitmix64's finalizer
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline uint64_t hash_name(std::string_view name) {  // FNV-1a, 64 bit
  uint64_t h = 0xCBF29CE484222325ull;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
  return h;
}

// A stream of random words: word i belongs to element i. Four neighbouring elements share one block.
struct RandomStream {
  uint32_t key0, key1;
  uint64_t iteration;
  RandomStream(uint64_t seed, uint64_t key, uint64_t iteration_) : iteration(iteration_) {
    const uint64_t k = mix64(seed + mix64(key));
    key0 = static_cast<uint32_t>(k);
    key1 = static_cast<uint32_t>(k >> 32);
  }
  PhiloxBlock block(uint64_t index) const {  // words of elements 4 index .. 4 index + 3
    return philox4x32({static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                       static_cast<uint32_t>(iteration), static_cast<uint32_t>(iteration >> 32)},
                      key0, key1);
  }
  uint32_t word(uint64_t element) const { return block(element / 4)[element % 4]; }
};

// Dropout: element i is kept when word(i) >= drop_threshold(rate).
inline uint32_t drop_threshold(double rate) {
  const double t = rate * 4294967296.0;
  return t <= 0 ? 0u : t >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(t);
}

}  // namespace whale
