// Which replicas, and how many of each kind: devices of several types are shared out so that enough samples are done by
// a deadline. A small integer program: as many rows as there are types of devices.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace whale {

// The last row counts replicas.
constexpr size_t kShareRows = 12;
using ShareRow = std::array<int32_t, kShareRows>;

struct ShareKind {
  ShareRow use{};      // of each row, by one replica
  double samples = 0;  // that one replica does by the deadline
};

// Samples by the deadline if replicas could be fractions; `price` (optional) is what one more of each row is worth.
double share_bound(std::span<const ShareKind> kinds, const ShareRow& have, size_t rows,
                   std::array<double, kShareRows>* price = nullptr, std::vector<double>* counts = nullptr);

// How many of each kind so that no row is exceeded and the samples reach `want`; nothing where no such numbers are
// found. Exact up to `most_steps` of its search.
std::optional<std::vector<int64_t>> share_out(std::span<const ShareKind> kinds, const ShareRow& have, size_t rows,
                                              double want, int most_steps = 4000);

}  // namespace whale
