#include "comm/member.h"

#include "base/error.h"

namespace whale::inproc {

GroupState::GroupState(std::vector<int32_t> members)
    : devices(std::move(members)),
      slots(new MemberSlot[devices.size()]),
      met(new uint32_t[devices.size() * 16]()),
      calls(new uint32_t[devices.size() * 16]()) {}

bool GroupState::meet(size_t member, Lookout* lookout) {
  const uint32_t target = ++met[member * 16];
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == devices.size()) {
    arrived.store(0, std::memory_order_relaxed);
    meetings.advance(1);
    return meetings.wait(target);
  }
  return meetings.wait(target, lookout);
}

void GroupState::reset() {
  arrived.store(0, std::memory_order_relaxed);
  meetings.reset();
  std::fill_n(met.get(), devices.size() * 16, 0u);
  std::fill_n(calls.get(), devices.size() * 16, 0u);
}

bool Member::begin(Lookout* lookout) {
  group_.slots[rank_].offer[half_] = &offer_;
  if (!group_.meet(rank_, lookout)) return false;
  check_peers();
  return true;
}

void Member::check_peers() const {
  const Offer& mine = offer_;
  for (size_t m = 0; m < size(); ++m) {
    const Offer& theirs = offer_of(m);
    if (theirs.op == mine.op && theirs.combine == mine.combine && theirs.dtype == mine.dtype &&
        theirs.elements == mine.elements && theirs.operands == mine.operands)
      continue;
    throw internal(
        "collective differs between members of a group: device {} runs op {} of {} elements of {}, device {} op {} of "
        "{} elements of {}",
        group_.devices[rank_], static_cast<int>(mine.op), mine.elements, name_of(mine.dtype), group_.devices[m],
        static_cast<int>(theirs.op), theirs.elements, name_of(theirs.dtype));
  }
}

Rows rows_of(const Operand& tensor, const SubAxis& sub_axis) {
  const Dims& dims = tensor.dims;
  if (!sub_axis.present() || sub_axis.dim >= static_cast<int>(dims.size()) || sub_axis.outer < 1 || sub_axis.inner < 1)
    throw internal("a collective names the sub-axis ({}, {}, {}) of a tensor {}", sub_axis.dim, sub_axis.outer,
                   sub_axis.inner, to_string(dims));
  const size_t dim = static_cast<size_t>(sub_axis.dim);
  if (dims[dim] > 0 && (sub_axis.outer > dims[dim] || sub_axis.inner > dims[dim] / sub_axis.outer ||
                        dims[dim] % (sub_axis.outer * sub_axis.inner) != 0))
    throw internal("a collective names the sub-axis ({}, {}, {}), which dimension {} of {} does not have", sub_axis.dim,
                   sub_axis.outer, sub_axis.inner, dim, to_string(dims));
  const int64_t extent = dims[dim] == 0 ? 0 : dims[dim] / (sub_axis.outer * sub_axis.inner);
  Rows r{sub_axis.outer, extent, sub_axis.inner * size_of(tensor.dtype)};
  for (size_t d = 0; d < dim; ++d) r.rows *= dims[d];
  for (size_t d = dim + 1; d < dims.size(); ++d) r.unit *= dims[d];
  return r;
}

void check_cuts(const std::vector<Interval>& cuts, size_t members, int64_t extent) {
  if (cuts.size() != members) throw internal("a collective over {} members has {} cuts", members, cuts.size());
  int64_t at = 0;
  for (const Interval& cut : cuts) {
    if (cut.begin != at || cut.end < at || cut.end > extent)
      throw internal("a collective has the cut [{}, {}) of an extent of {}", cut.begin, cut.end, extent);
    at = cut.end;
  }
  if (at != extent) throw internal("the cuts of a collective cover {} of {}", at, extent);
}

}  // namespace whale::inproc
