// The few questions every bind asks of its operands.
#pragma once

#include <vector>

#include "base/error.h"
#include "device/cpu/device.h"
#include "device/cpu/function_kernel.h"

namespace whale::cpu {

inline int64_t count(const Operand& x) { return element_count(x.dims); }
inline int64_t last_dim(const Operand& x) { return x.dims.empty() ? 1 : x.dims.back(); }
inline int64_t rows(const Operand& x) { return last_dim(x) == 0 ? 0 : count(x) / last_dim(x); }
inline bool has(const std::vector<Operand>& list, size_t i) { return i < list.size() && list[i].present(); }
inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Dimensions before, at and after `axis`.
struct AxisView {
  int64_t outer = 1, extent = 1, inner = 1;
};
inline AxisView view_axis(const Dims& dims, int64_t axis) {
  const auto rank = static_cast<int64_t>(dims.size());
  if (axis < 0) axis += rank;
  if (axis < 0 || axis >= rank) throw invalid("axis {} of a tensor of shape {}", axis, to_string(dims));
  AxisView v;
  for (int64_t i = 0; i < rank; ++i) {
    int64_t& part = i < axis ? v.outer : i == axis ? v.extent : v.inner;
    part *= dims[i];
  }
  return v;
}

// Optional results stand in order behind the first ones, with or without gaps: takes the next one that is there.
class Results {
 public:
  explicit Results(const KernelSpec& spec, size_t first = 0) : spec_(spec), next_(first) {}
  Operand take(bool wanted = true) {
    if (!wanted) return {};
    while (next_ < spec_.out.size() && !spec_.out[next_].present()) ++next_;
    if (next_ == spec_.out.size()) throw internal("op '{}' is bound with too few results", spec_.name);
    return spec_.out[next_++];
  }

 private:
  const KernelSpec& spec_;
  size_t next_;
};

}  // namespace whale::cpu
