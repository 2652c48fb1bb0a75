// Memory whose parts have unlike terms of one sum: rows of their own, not parts of one value.
#include "prove/walk.h"

#include <algorithm>

namespace whale::proof {

// Are there terms of one sum that others beside them do not have, or all of them beside zeros? They are rows of their
// own, not parts of one value.
bool Walk::are_rows(const std::vector<Held>& values) const {
  const auto zero = [&](const Held& v) { return ref_.constant(v->tensor) != nullptr; };
  const auto partial = std::find_if(values.begin(), values.end(), [](const Held& v) { return !v->terms.whole(); });
  if (partial == values.end()) {
    const auto some = std::find_if_not(values.begin(), values.end(), zero);
    return some != values.end() && std::any_of(values.begin(), values.end(), zero) &&
           std::all_of(some, values.end(), [&](const Held& v) { return zero(v) || v->tensor == (*some)->tensor; });
  }
  const bool counted = values.size() > 1 && (*partial)->terms.counted();
  return (counted ||
          std::any_of(values.begin(), values.end(), [&](const Held& v) { return !(v->terms == (*partial)->terms); })) &&
         std::all_of(values.begin(), values.end(),
                     [&](const Held& v) { return zero(v) || (v->tensor == (*partial)->tensor && !v->terms.whole()); });
}

// What lies in a buffer, as rows; empty: it is one value.
std::vector<Memory::Part> Walk::rows_of(Device& d, BufferId id) {
  const Buffer& b = buffer(d, id);
  if (b.kind == BufferKind::kStep || b.bytes == 0) return {};
  std::vector<Memory::Part> parts = d.memory.parts(readable(d, id));
  std::vector<Held> values;
  for (const Memory::Part& p : parts) values.push_back(p.value);
  return are_rows(values) ? parts : std::vector<Memory::Part>{};
}

void Walk::write_rows(Device& d, BufferId id, const std::vector<Memory::Part>& rows) {
  const Buffer& b = buffer(d, id);
  check_decided(d, b);
  Place at = place_of(d.program, id, now(d).version);
  const int64_t end = at.begin + at.bytes;
  for (const Memory::Part& p : rows) {
    if (p.value->dtype != b.dtype || p.value->region.size() * static_cast<int64_t>(size_of(b.dtype)) != p.bytes ||
        at.begin + p.bytes > end)
      refuse("{} is put in the place of {} bytes of {}", describe(ref_, *p.value), p.bytes, b.name);
    at.bytes = p.bytes;
    sums_ = std::make_shared<const std::vector<Held>>(1, p.value);
    put(d, at, *p.value);
    at.begin += p.bytes;
  }
  sums_ = nullptr;
  if (at.begin != end) refuse("rows leave {} bytes of {} as they were", end - at.begin, b.name);
}

// It may be the program's own concat, of which this device has zeros in the place of an operand.
bool Walk::may_be_own_concat(const Instruction& i) const {
  const auto fits = [&](OpId id) { return ref_.graph().op(id).inputs.size() == i.in.size(); };
  return std::ranges::any_of(ref_.ops_of(OpCode::k_concat), fits);
}

// A slice of whole rows is the bytes that they are: the rows may be terms of one sum, which are no part of one value.
bool Walk::rows(Device& d, const Instruction& i, const work::Kernel& k) {
  if (k.op == OpCode::k_concat && attr_int(k.attrs, "axis") == 0) {
    std::vector<Held> values;
    for (const BufferId id : i.in) values.push_back(read(d, id));
    if (!are_rows(values)) {
      reads_.clear();
      return false;
    }
    std::vector<Memory::Part> parts;
    for (size_t n = 0; n < values.size(); ++n) parts.push_back({buffer(d, i.in[n]).bytes, values[n]});
    write_rows(d, i.out.at(0), parts);
    return true;
  }
  if (k.op != OpCode::k_local_slice && k.op != OpCode::k_part_view) return false;
  const Ints& s = attr_ints(k.attrs, "sub_axis");
  const Buffer& x = buffer(d, i.in.at(0));
  if (s.at(0) != 0 || s.at(1) != 1 || x.dims.empty() || element_count(x.dims) == 0) return false;
  const int64_t row = x.bytes / x.dims[0] * s.at(2);
  const int64_t begin = attr_int(k.attrs, "begin"), n = attr_int(k.attrs, "end") - begin;
  Place at = readable(d, i.in[0]);
  at.begin += begin * row, at.bytes = n * row;
  const Held value = n > 0 ? d.memory.read(ref_, at, x.dtype) : nullptr;
  if (!value) return false;
  reads_.push_back(value);
  write(d, i.out.at(0), *value);
  return true;
}

}  // namespace whale::proof
