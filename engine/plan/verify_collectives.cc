// Collectives fit their tensors: what a device binds to them is what its group's cuts say.
#include <set>

#include "base/watch.h"
#include "plan/placed.h"
#include "plan/verify.h"

namespace whale {
namespace {

class Shapes {
 public:
  // `first`: of so many members, so that what does not ask for the rank is looked at too.
  Shapes(const VerifyContext& c, const Segment& s, size_t k, size_t rank, size_t members, bool first)
      : c_(c),
        s_(s),
        k_(k),
        i_(s.instructions[k]),
        of_(*i_.as<work::Collective>()),
        rank_(rank),
        members_(members),
        first_(first) {}

  void check() const {
    switch (of_.op) {
      case OpCode::k_all_reduce: return in_place();
      case OpCode::k_adasum:
        in_place();
        if (of_.weights.size() != members_)
          fail(fmt::format("it has {} weights for {} members", of_.weights.size(), members_));
        return;
      case OpCode::k_all_gather: return parts(i_.out, i_.in);
      case OpCode::k_reduce_scatter: return parts(i_.in, i_.out);
      case OpCode::k_all_to_all: return exchange();
      default: return;
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { c_.fail(s_, k_, what); }
  const Buffer& buffer(BufferId b) const { return c_.program.buffers[b]; }
  static int64_t elements(const Buffer& b) { return element_count(b.dims); }

  void in_place() const {
    if (i_.in.size() != i_.out.size() || i_.in.empty()) fail("a collective in place has a result for each operand");
    for (size_t n = 0; n < i_.in.size(); ++n) {
      const Buffer &x = buffer(i_.in[n]), &y = buffer(i_.out[n]);
      const auto root = [&](BufferId b) { return buffer(b).alias == kNone ? b : buffer(b).alias; };
      if (root(i_.in[n]) != root(i_.out[n]) || x.at != y.at || x.bytes != y.bytes || x.dtype != y.dtype)
        fail(fmt::format("it works in place, and '{}' lies elsewhere than '{}'", y.name, x.name));
      if (x.dtype != buffer(i_.in[0]).dtype) fail("its operands are of different types");
    }
  }

  // One behind the other, one a member.
  void check_cuts(const std::vector<Interval>& cuts, BufferId of) const {
    if (!first_) return;
    if (cuts.size() != members_)
      fail(fmt::format("it has cuts of '{}' for {} members, its group has {}", buffer(of).name, cuts.size(), members_));
    int64_t at = 0;
    for (const Interval& cut : cuts) {
      if (cut.begin != at || cut.end < at)
        fail(fmt::format("its cut [{}, {}) of '{}' for member {} should begin at {}", cut.begin, cut.end,
                         buffer(of).name, &cut - cuts.data(), at));
      at = cut.end;
    }
  }

  // Elements of a tensor at each position of the sub-axis, whose extent it is.
  int64_t unit(const Buffer& b, const SubAxis& sub_axis, int64_t extent) const {
    const auto& [dim, outer, inner] = sub_axis;
    const bool fits = dim >= 0 && dim < std::ssize(b.dims) && outer >= 1 && inner >= 1 && outer <= b.dims[dim] &&
                      inner <= b.dims[dim] / outer && outer * inner * extent == b.dims[dim];
    if (!fits)
      fail(fmt::format("'{}' of shape {} has no sub-axis ({}, {}, {}) of {}", b.name, to_string(b.dims), dim, outer,
                       inner, extent));
    return elements(b) / extent;
  }

  void parts(const BufferIds& wholes, const BufferIds& mine) const {
    if (wholes.size() != mine.size() || mine.empty()) fail("it has a result for each operand");
    if (of_.cuts.size() != mine.size()) fail("it has cuts for each operand");
    for (size_t n = 0; n < mine.size(); ++n) {
      const Buffer &whole = buffer(wholes[n]), &part = buffer(mine[n]);
      if (whole.dtype != part.dtype || whole.dtype != buffer(wholes[0]).dtype)
        fail("its operands are of different types");
      if (elements(whole) == 0) continue;
      const std::vector<Interval>& all = of_.cuts[n].cuts;
      check_cuts(all, wholes[n]);
      if (elements(part) != unit(whole, of_.cuts[n].sub_axis, all.back().end) * all[rank_].size())
        fail(fmt::format("'{}' of shape {} is not [{}, {}) of '{}' of shape {}", part.name, to_string(part.dims),
                         all[rank_].begin, all[rank_].end, whole.name, to_string(whole.dims)));
    }
  }

  // Of the operand, or the result: so much of the sub-axis that it is cut along, and the other one whole, also where it
  // has no elements.
  void check_sides(const Buffer& b, const SubAxisCuts& cut, int64_t size, const SubAxisCuts& whole,
                   int64_t extent) const {
    const auto check = [&](const SubAxis& sub_axis, int64_t n) {
      const auto& [dim, outer, inner] = sub_axis;
      if (dim < 0 || dim >= std::ssize(b.dims) || outer < 1 || inner < 1 || b.dims[dim] != outer * n * inner)
        fail(fmt::format("'{}' of shape {} does not have {} of its sub-axis ({}, {}, {})", b.name, to_string(b.dims), n,
                         dim, outer, inner));
    };
    check(cut.sub_axis, size);
    if (whole.sub_axis.dim != cut.sub_axis.dim) check(whole.sub_axis, extent);
  }

  void exchange() const {
    if (i_.in.size() != 1 || i_.out.size() != 1) fail("it has one operand and one result");
    const Buffer &x = buffer(i_.in[0]), &y = buffer(i_.out[0]);
    if (of_.cuts.size() != 1) fail("it has cuts before and after");
    const std::vector<Interval>&from = of_.cuts[0].cuts, &to = of_.to.cuts;
    check_cuts(from, i_.in[0]);
    check_cuts(to, i_.out[0]);
    check_sides(x, of_.cuts[0], from[rank_].size(), of_.to, to.back().end);
    check_sides(y, of_.to, to[rank_].size(), of_.cuts[0], from.back().end);
    const int64_t before = from[rank_].size() * to.back().end, after = from.back().end * to[rank_].size();
    const bool fits = before > 0  ? elements(x) % before == 0 && elements(y) == elements(x) / before * after
                      : after > 0 ? elements(x) == 0 && elements(y) % after == 0
                                  : elements(x) == 0 && elements(y) == 0;
    if (!fits || x.dtype != y.dtype)
      fail(fmt::format("'{}' of shape {} and '{}' of shape {} are not its cuts", x.name, to_string(x.dims), y.name,
                       to_string(y.dims)));
  }

  const VerifyContext& c_;
  const Segment& s_;
  size_t k_;
  const Instruction& i_;
  const work::Collective& of_;
  size_t rank_, members_;
  bool first_;
};

}  // namespace

void verify_collectives(const Plan& plan, const Entry& entry) {
  using Rank = std::pair<size_t, size_t>;                      // of so many members
  std::vector<std::vector<Rank>> rank_of(plan.groups.size());  // [group][device]
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    rank_of[g].resize(entry.rows.size());
    for (const std::vector<int32_t>& part : plan.groups[g].parts)
      for (size_t rank = 0; rank < part.size(); ++rank) rank_of[g][part[rank]] = {rank, part.size()};
  }
  // Devices of one program at one place in a group are alike in its collectives.
  const auto rows = rows_of_programs(entry);
  for (size_t p = 0; p < entry.programs.size(); ++p) {
    const VerifyContext c{plan, entry, p, entry.programs[p]};
    std::vector<std::set<Rank>> ranks(plan.groups.size());
    for (size_t g = 0; g < plan.groups.size(); ++g)
      for (const DeviceRow* row : rows[p]) ranks[g].insert(rank_of[g][row->device]);
    std::vector<char> runs(c.program.segments.size());
    for (const ScheduleRow& r : watched(c.program.schedule)) runs[r.segment] = 1;
    for (size_t s = 0; s < c.program.segments.size(); ++s)
      for (size_t k = 0; runs[s] && k < c.program.segments[s].instructions.size(); ++k) {
        const Instruction& i = c.program.segments[s].instructions[k];
        if (i.group() == kNone) continue;
        std::set<size_t> sizes;
        for (const auto& [rank, members] : ranks[i.group()]) {
          Watch::look();
          if (members > 0) Shapes(c, c.program.segments[s], k, rank, members, sizes.insert(members).second).check();
        }
      }
  }
}

}  // namespace whale
