// One device's part of a variable, between bytes of the logical tensor and bytes of the part. Nothing is tabulated: the
// cost is that of the rows that are walked.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan/part.h"
#include "plan/plan.h"

namespace whale {

class VariablePart {
 public:
  VariablePart(Part part, const Dims& dims, int64_t element_bytes);
  const Part& part() const { return part_; }
  uint64_t bytes() const { return bytes_; }

  // body(logical offset, offset in the part, bytes) of every run of the part inside [begin, end) of the logical tensor.
  template <class Body>
  void each(uint64_t begin, uint64_t end, Body body) const {
    if (bytes_ == 0 || begin >= end) return;
    for (uint64_t row = begin / row_bytes_; row * row_bytes_ < end; ++row) {
      const int64_t local_row = find_row(row);
      if (local_row < 0) continue;
      const uint64_t at = row * row_bytes_, local = static_cast<uint64_t>(local_row) * local_row_bytes_;
      for (const Span& span : spans_) {
        const uint64_t from = std::max(at + span.begin, begin), to = std::min(at + span.end, end);
        if (from < to) body(from, local + span.local + (from - at - span.begin), to - from);
      }
    }
  }
  // The same runs by [begin, end) of the part, whose order is that of the tensor.
  template <class Body>
  void each_local(uint64_t begin, uint64_t end, Body body) const {
    if (bytes_ == 0 || begin >= end) return;
    for (uint64_t row = begin / local_row_bytes_; row * local_row_bytes_ < end; ++row) {
      const uint64_t at = logical_row(row) * row_bytes_, local = row * local_row_bytes_;
      for (const Span& span : spans_) {
        const uint64_t first = local + span.local, from = std::max(first, begin),
                       to = std::min(first + (span.end - span.begin), end);
        if (from < to) body(at + span.begin + (from - first), from, to - from);
      }
    }
  }
  // [first, second) of the logical tensor holds all of it.
  std::pair<uint64_t, uint64_t> bounds() const;

 private:
  struct Span {  // of a row, in bytes
    uint64_t begin, end, local;
  };
  int64_t find_row(uint64_t row) const;        // in the part; -1: not there
  uint64_t logical_row(uint64_t local) const;  // the other way round

  Part part_;
  uint64_t bytes_ = 0, row_bytes_ = 0, local_row_bytes_ = 0;
  std::vector<Span> spans_;
  Dims outer_, local_outer_;  // of the dimensions that number the rows
};

// A part of a variable with the devices that hold a copy of it, in the order of the plan's.
struct HeldPart {
  VariablePart part;
  std::vector<size_t> devices;
};
std::vector<HeldPart> held_parts(const Plan& plan, const PlanVariable& variable);

}  // namespace whale
