#include "data/variable_part.h"

#include "base/error.h"

namespace whale {

VariablePart::VariablePart(Part part, const Dims& dims, int64_t element_bytes) : part_(std::move(part)) {
  const Dims local = part_.extents();
  bytes_ = static_cast<uint64_t>(element_count(local) * element_bytes);
  if (bytes_ == 0) return;
  if (dims.empty()) {
    row_bytes_ = local_row_bytes_ = bytes_;
    spans_ = {{0, bytes_, 0}};
    return;
  }
  size_t last = dims.size() - 1;  // what lies behind it is whole
  int64_t unit = element_bytes;
  while (last > 0 && local[last] == dims[last]) unit *= dims[last--];
  row_bytes_ = static_cast<uint64_t>(dims[last] * unit);
  local_row_bytes_ = static_cast<uint64_t>(local[last] * unit);
  uint64_t at = 0;
  for (const Interval& i : part_.dims[last]) {
    spans_.push_back({static_cast<uint64_t>(i.begin * unit), static_cast<uint64_t>(i.end * unit), at});
    at += static_cast<uint64_t>(i.size() * unit);
  }
  outer_.assign(dims.begin(), dims.begin() + static_cast<ptrdiff_t>(last));
  local_outer_.assign(local.begin(), local.begin() + static_cast<ptrdiff_t>(last));
}

int64_t VariablePart::find_row(uint64_t row) const {
  int64_t found = 0, stride = 1, rest = static_cast<int64_t>(row);
  for (size_t d = outer_.size(); d-- > 0;) {
    const int64_t at = rest % outer_[d];
    rest /= outer_[d];
    const std::vector<Interval>& list = part_.dims[d];
    int64_t local = 0;
    size_t i = 0;
    for (; i < list.size() && list[i].end <= at; ++i) local += list[i].size();
    if (i == list.size() || at < list[i].begin) return -1;
    found += (local + at - list[i].begin) * stride;
    stride *= local_outer_[d];
  }
  return found;
}

uint64_t VariablePart::logical_row(uint64_t local) const {
  int64_t found = 0, stride = 1, rest = static_cast<int64_t>(local);
  for (size_t d = outer_.size(); d-- > 0;) {
    int64_t at = rest % local_outer_[d];
    rest /= local_outer_[d];
    size_t i = 0;
    for (const std::vector<Interval>& list = part_.dims[d]; at >= list[i].size(); ++i) at -= list[i].size();
    found += (part_.dims[d][i].begin + at) * stride;
    stride *= outer_[d];
  }
  return static_cast<uint64_t>(found);
}

std::pair<uint64_t, uint64_t> VariablePart::bounds() const {
  if (bytes_ == 0) return {0, 0};
  const uint64_t last = bytes_ / local_row_bytes_ - 1;
  return {logical_row(0) * row_bytes_ + spans_.front().begin, logical_row(last) * row_bytes_ + spans_.back().end};
}

std::vector<HeldPart> held_parts(const Plan& plan, const PlanVariable& variable) {
  std::vector<HeldPart> all;
  for (const DeviceRow& row : plan.entries[0].rows) {
    if (row.mesh != variable.mesh) continue;
    Part part = part_of(variable.dims, variable.storage_sharding, plan.meshes.at(static_cast<size_t>(row.mesh)).axes,
                        row.coordinates);
    auto at = std::find_if(all.begin(), all.end(), [&](const HeldPart& known) { return known.part.part() == part; });
    if (at == all.end())
      at = all.insert(at, {VariablePart(std::move(part), variable.dims, size_of(variable.dtype)), {}});
    at->devices.push_back(static_cast<size_t>(row.device));
  }
  if (all.empty()) throw internal("variable '{}' lives on mesh {}, which has no device", variable.name, variable.mesh);
  return all;
}

}  // namespace whale
