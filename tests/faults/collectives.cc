// Sums, gathers and their groups.
#include <algorithm>

#include "fault.h"

namespace whale::test {
namespace {

bool is_reduce(const Spot& s) { return s.at().op() == OpCode::k_all_reduce; }
bool is_collective(const Spot& s) { return s.at().kind() == InstructionKind::kCollective; }
work::Collective& of(const Spot& s) { return *s.at().as<work::Collective>(); }
bool has_cuts(const Spot& s) { return is_collective(s) && !of(s).cuts.empty(); }

bool drop_reduce(const Spot& s, Dice&) {
  for (size_t n = 0; n < s.at().out.size(); ++n) read_instead(*s.program, s.at().out[n], s.at().in[n]);
  erase_instruction(s);
  return true;
}

bool drop_member(const Spot& s, Dice& dice) {
  if (s.at().in.size() < 2) return false;
  const auto n = dice.below(std::ssize(s.at().in));
  read_instead(*s.program, s.at().out[n], s.at().in[n]);
  s.at().in.erase(s.at().in.begin() + n), s.at().out.erase(s.at().out.begin() + n);
  return true;
}

bool double_reduce(const Spot& s, Dice&) {
  Instruction again = s.at();
  again.name += ".again";
  again.in = again.out;
  again.waits = {{again.queue, static_cast<int32_t>(s.index)}};
  for (BufferId& b : again.out) {
    const BufferId more = add_alias(*s.program, b);
    read_instead(*s.program, b, more);
    b = more;
  }
  insert_instruction(s, s.index + 1, std::move(again));
  // What waited for the first one waits for both: they follow each other on one queue.
  for (size_t k = s.index + 2; k < s.segment->instructions.size(); ++k)
    for (Wait& w : s.segment->instructions[k].waits)
      if (w.index == static_cast<int32_t>(s.index)) ++w.index;
  return true;
}

// Operands n and m of the same type, in this program alone or in the place of one another.
bool swap_members(const Spot& s, Dice& dice, bool results) {
  BufferIds &in = s.at().in, &out = s.at().out;
  for (int tries = 0; tries < 8 && in.size() > 1 && in.size() == out.size(); ++tries) {
    const auto a = static_cast<size_t>(dice.below(std::ssize(in))), b = static_cast<size_t>(dice.below(std::ssize(in)));
    if (a == b || !same_type(s.buffer(in[a]), s.buffer(in[b])) || !same_type(s.buffer(out[a]), s.buffer(out[b])))
      continue;
    std::swap(in[a], in[b]);
    if (results) std::swap(out[a], out[b]);
    return true;
  }
  return false;
}

bool other_combine(const Spot& s, Dice& dice) {
  work::Collective& c = of(s);
  if (c.op != OpCode::k_all_reduce && c.op != OpCode::k_reduce_scatter) return false;
  c.combine = c.combine == Combine::kMax ? Combine::kSum : dice.coin() ? Combine::kMax : Combine::kMin;
  return true;
}

bool move_cut(const Spot& s, Dice& dice) {
  std::vector<std::pair<Interval*, Interval*>> neighbours;
  for (SubAxisCuts& each : of(s).cuts)
    for (size_t k = 0; k + 1 < each.cuts.size(); ++k)
      if (each.cuts[k].size() > 0) neighbours.emplace_back(&each.cuts[k], &each.cuts[k + 1]);
  if (neighbours.empty()) return false;
  const auto& [left, right] = neighbours[dice.below(std::ssize(neighbours))];
  --left->end, --right->begin;
  return true;
}

bool swap_cuts(const Spot& s, Dice& dice) {
  std::vector<Interval>& cuts = of(s).cuts[0].cuts;
  if (cuts.size() < 2) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(cuts) - 1));
  if (cuts[a].begin == cuts[a + 1].begin) return false;
  std::swap(cuts[a], cuts[a + 1]);
  return true;
}

bool other_sub_axis(const Spot& s, Dice& dice) {
  std::vector<SubAxisCuts>& cuts = of(s).cuts;
  const auto k = static_cast<size_t>(dice.below(std::ssize(cuts)));
  SubAxis& sub_axis = cuts[k].sub_axis;
  const auto rank = static_cast<int>(s.buffer(s.at().in[k]).dims.size());
  if (rank > 1 && dice.coin()) return sub_axis.dim = (sub_axis.dim + 1) % rank, true;
  if (sub_axis.outer == sub_axis.inner) return false;
  std::swap(sub_axis.outer, sub_axis.inner);
  return true;
}

bool other_slice(const Spot& s, Dice& dice) {
  if (s.at().op() != OpCode::k_local_slice) return false;
  Attrs& attrs = s.attrs();
  const int64_t begin = attr_int(attrs, "begin"), end = attr_int(attrs, "end");
  const int64_t by = dice.coin() ? 1 : begin >= end - begin ? begin - end : -1;
  if (begin == end || begin + by < 0) return false;
  attrs["begin"] = begin + by, attrs["end"] = end + by;
  return true;
}

// ---- groups -------------------------------------------------------------------------------------------------------
using Parts = std::vector<std::vector<int32_t>>;

bool in_use(Plan& plan, const Group& g) {
  const auto number = static_cast<int32_t>(&g - plan.groups.data());
  for (const Program& p : train_of(plan).programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        if (i.group() == number) return true;
  return false;
}

bool change_group(Plan& plan, Dice& dice, const std::function<bool(Parts&, Dice&)>& change) {
  Group* g = choose(plan.groups, dice, [&](const Group& each) { return in_use(plan, each); });
  return g != nullptr && change(g->parts, dice);
}

bool swap_devices(Parts& parts, Dice& dice) {
  if (parts.size() < 2) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(parts))), b = (a + 1) % parts.size();
  std::swap(parts[a][dice.below(std::ssize(parts[a]))], parts[b][dice.below(std::ssize(parts[b]))]);
  return true;
}
bool swap_order(Parts& parts, Dice& dice) {
  std::vector<int32_t>* part = choose(parts, dice, [](const auto& p) { return p.size() > 1; });
  if (!part) return false;
  const auto a = static_cast<size_t>(dice.below(std::ssize(*part) - 1));
  std::swap((*part)[a], (*part)[a + 1]);
  return true;
}
bool join_parts(Parts& parts, Dice&) {
  if (parts.size() < 2) return false;
  parts[0].insert(parts[0].end(), parts.back().begin(), parts.back().end());
  parts.pop_back();
  return true;
}
bool lose_member(Parts& parts, Dice& dice) {
  std::vector<int32_t>* part = choose(parts, dice, [](const auto& p) { return p.size() > 1; });
  if (!part) return false;
  part->erase(part->begin() + dice.below(std::ssize(*part)));
  return true;
}

std::function<bool(Plan&, Dice&)> of_group(bool (*change)(Parts&, Dice&)) {
  return [change](Plan& plan, Dice& dice) { return change_group(plan, dice, change); };
}
std::function<bool(Plan&, Dice&)> at(Reach reach, Wanted wanted, Change change) {
  return [=](Plan& plan, Dice& dice) { return damage(plan, dice, reach, wanted, change); };
}

bool other_group(Plan& plan, Dice& dice) {
  const std::ptrdiff_t groups = std::ssize(plan.groups);
  return groups > 1 && damage(plan, dice, Reach::kEverywhere, is_collective, [&](const Spot& s, Dice& d) {
           of(s).group = static_cast<int32_t>((of(s).group + 1 + d.below(groups - 1)) % groups);
           return true;
         });
}

}  // namespace

std::vector<Fault> faults_of_collectives() {
  using enum Reach;
  const auto either = Catcher::kEither, verifier = Catcher::kVerifier;
  return {
      {"a reduce dropped", either, at(kEverywhere, is_reduce, drop_reduce)},
      {"a reduce dropped on some devices", either, at(kOne, is_reduce, drop_reduce)},
      {"a reduce of a bucket dropped", either, at(kEverywhere, is_reduce, drop_member)},
      {"a reduce doubled", either, at(kEverywhere, is_reduce, double_reduce)},
      {"a reduce doubled on some devices", either, at(kOne, is_reduce, double_reduce)},
      {"another combine of a reduce", either, at(kEverywhere, is_collective, other_combine)},
      {"a bucket's order", verifier,
       at(kOne, is_collective, [](const Spot& s, Dice& d) { return swap_members(s, d, true); })},
      {"a bucket's operands for one another", either,
       at(kEverywhere, is_collective, [](const Spot& s, Dice& d) { return swap_members(s, d, false); })},
      {"a boundary of a collective's cuts", either, at(kEverywhere, has_cuts, move_cut)},
      {"the order of a collective's cuts", either, at(kAny, has_cuts, swap_cuts)},
      {"the sub-axis of a collective", either, at(kEverywhere, has_cuts, other_sub_axis)},
      {"the offset of a slice", either,
       at(
           kAny, [](const Spot&) { return true; }, other_slice)},
      {"another group", either, other_group},
      {"a group's devices exchanged", verifier, of_group(swap_devices)},
      {"a group's order", verifier, of_group(swap_order)},
      {"two groups made one", verifier, of_group(join_parts)},
      {"a group without a member", verifier, of_group(lose_member)},
  };
}

}  // namespace whale::test
