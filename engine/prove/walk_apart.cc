// Where an instruction may write, beside what it reads.
#include <algorithm>
#include <set>

#include "base/watch.h"
#include "prove/walk.h"

namespace whale::proof {

// A kernel that writes where it reads does so as its op declares it: on the whole of that operand.
void Walk::check_in_place(const Device& d, const Instruction& i, const work::Kernel& k) const {
  OpView view{k.op, &k.attrs, {}, {}, {}};
  const auto type = [&](BufferId id) {
    return id == kNone ? TensorType{} : TensorType{buffer(d, id).dtype, buffer(d, id).dims};
  };
  for (const BufferId id : i.in) view.present.push_back(id != kNone), view.inputs.push_back(type(id));
  for (const BufferId id : i.out) view.outputs.push_back(type(id));
  std::set<std::pair<size_t, size_t>> aliases;  // of a result and an operand
  for (const Alias& a : aliases_of(view)) {
    const auto o = static_cast<size_t>(a.output), n = static_cast<size_t>(a.input);
    if (o >= i.out.size() || n >= i.in.size()) continue;
    aliases.emplace(o, n);
    if (a.must && is_there(d, i.out[o]) && is_there(d, i.in[n]) && place(d, i.out[o]) != place(d, i.in[n]))
      refuse("it works in place, and '{}' lies elsewhere than '{}'", buffer(d, i.out[o]).name, buffer(d, i.in[n]).name);
  }
  check_writes(d, i, i.in.size(), [&](size_t o, size_t n) {
    return aliases.contains({o, n}) && place(d, i.out[o]) == place(d, i.in[n]);
  });
}

// What all operands hold is read before, or while, results are written: they lie elsewhere, but for a sum that is made
// in place, and what is gathered within the whole (check_gathered).
void Walk::check_apart(const Device& d, const Instruction& i, bool in_place, bool gathers) const {
  for (size_t o = 0; o < i.out.size() && in_place; ++o)
    if (is_there(d, i.out[o]) && is_there(d, i.in.at(o)) && place(d, i.out[o]) != place(d, i.in[o]))
      refuse("it works in place, and '{}' lies elsewhere than '{}'", buffer(d, i.out[o]).name, buffer(d, i.in[o]).name);
  // A copy has its place as another operand.
  check_writes(d, i, std::min(i.in.size(), i.out.size()), [&](size_t o, size_t n) {
    return n == o && (gathers || (in_place && place(d, i.out[o]) == place(d, i.in[n])));
  });
}

void Walk::check_writes(const Device& d, const Instruction& i, size_t operands,
                        const std::function<bool(size_t result, size_t operand)>& may_meet) const {
  struct Range {
    Place at;
    bool written;
    size_t number;
    int64_t end() const { return at.begin + at.bytes; }
  };
  std::vector<Range> ranges;
  for (size_t o = 0; o < i.out.size(); ++o)
    if (is_there(d, i.out[o])) ranges.push_back({place(d, i.out[o]), true, o});
  for (size_t n = 0; n < operands; ++n)
    if (is_there(d, i.in[n])) ranges.push_back({place(d, i.in[n]), false, n});
  std::ranges::sort(ranges, {}, [](const Range& r) { return std::pair(r.at.space, r.at.begin); });
  std::vector<Range> written, read;  // that reach to the range at hand
  for (const Range& r : ranges) {
    Watch::look();
    const auto is_behind = [&](const Range& x) { return x.at.space != r.at.space || x.end() <= r.at.begin; };
    std::erase_if(written, is_behind);
    std::erase_if(read, is_behind);
    for (const Range& w : written) {
      const auto [o, n] = std::pair(w.number, r.number);
      if (r.written)
        refuse("it writes '{}' and '{}' to the same place", buffer(d, i.out[o]).name, buffer(d, i.out[n]).name);
      if (!may_meet(o, n))
        refuse("it writes '{}' where it reads '{}'", buffer(d, i.out[o]).name, buffer(d, i.in[n]).name);
    }
    for (const Range& x : read)
      if (r.written && !may_meet(r.number, x.number))
        refuse("it writes '{}' where it reads '{}'", buffer(d, i.out[r.number]).name, buffer(d, i.in[x.number]).name);
    (r.written ? written : read).push_back(r);
  }
}

}  // namespace whale::proof
