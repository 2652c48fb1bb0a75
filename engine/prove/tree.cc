#include "prove/tree.h"

#include <algorithm>
#include <tuple>

#include "prove/value.h"

namespace whale::proof {
namespace {

bool are_halves(const Interval& left, const Interval& right, int64_t all) {
  const int64_t n = left.size();
  return (n & (n - 1)) == 0 && left.begin % (2 * n) == 0 && right.begin == left.end &&
         right.end == std::min(left.begin + 2 * n, all);
}

// Does the device work on the whole micro-batch too? A split may cut some ops' samples.
bool is_part(const DeviceRow& row, Interval samples, size_t u) {
  return std::ranges::any_of(row.samples, [&](const SampleCut& cut) {
    const Interval all = u < cut.micro_batches.size() ? cut.micro_batches[u] : Interval{};
    const bool alike = std::ranges::count(cut.micro_batches, all) == std::ssize(cut.micro_batches);
    return !alike && all.begin <= samples.begin && samples.end <= all.end && samples.size() < all.size();
  });
}

}  // namespace

Tree::Tree(Reference& reference, const Entry& entry, bool exact) : ref_(reference), batch_(entry.batch), exact_(exact) {
  if (!exact) return;
  for (const DeviceRow& row : entry.rows)
    for (const SampleCut& cut : row.samples) {
      const auto& all = cut.micro_batches;  // alike: what is no micro-batch's, for ops of the whole batch
      if (all.size() > 1 && std::ranges::count(all, all[0]) == std::ssize(all)) continue;
      for (size_t u = 0; u < all.size(); ++u)
        if (all[u].size() > 0 && !is_part(row, all[u], u)) micro_batches_.push_back(all[u]);
    }
  std::ranges::sort(micro_batches_, {}, &Interval::begin);
  micro_batches_.erase(std::unique(micro_batches_.begin(), micro_batches_.end()), micro_batches_.end());
  for (size_t u = 1; u < micro_batches_.size(); ++u)
    if (micro_batches_[u].begin < micro_batches_[u - 1].end)
      refuse("samples [{}:{}] and [{}:{}] are micro-batches that have some in common; exact mode cuts none",
             micro_batches_[u - 1].begin, micro_batches_[u - 1].end, micro_batches_[u].begin, micro_batches_[u].end);
}

std::optional<Interval> Tree::numbers(const FactorSet& terms) const {
  if (terms.any || batch_ <= 0) return {};
  Set set = terms.set;
  int64_t extent = terms.extent;
  if (extent % batch_ == 0)  // all or a part of each sample
    if (auto parts = set.over(extent / batch_)) set = std::move(parts->first), extent = batch_;
  if (set.runs().size() != 1) return {};
  // Positions are samples, some of each, or groups of them.
  const Interval at = set.runs()[0];
  const auto is = [&](int64_t sample, int64_t position) { return sample * extent == position * batch_; };
  Interval out{-1, -1};
  for (size_t u = 0; u < micro_batches_.size(); ++u) {
    if (is(micro_batches_[u].begin, at.begin)) out.begin = static_cast<int64_t>(u);
    if (is(micro_batches_[u].end, at.end)) out.end = static_cast<int64_t>(u) + 1;
  }
  if (out.begin < 0 || out.end <= out.begin) return {};
  return out;
}

std::vector<FactorSet> Tree::samples_of(const Terms& terms) const {
  std::vector<FactorSet> out;
  for (const Summand& s : terms.summands())
    for (const TermBox& box : s.boxes)
      for (const FactorSet& f : box)
        if (ref_.is_of_batch(f.key.op, f.key.factor) &&
            std::ranges::none_of(out, [&](const FactorSet& x) { return x.extent == f.extent && x.set == f.set; }))
          out.push_back(f);
  return out;
}

bool Tree::has_others(const Terms& terms) const {
  for (const Summand& s : terms.summands())
    for (const TermBox& box : s.boxes)
      for (const FactorSet& f : box)
        if (!ref_.is_of_batch(f.key.op, f.key.factor)) return true;
  return false;
}

Tree::Said Tree::said_of(TensorId sum, const Terms& a, const Terms& b) const {
  if (!exact_) return {};
  Said said;
  said.split = has_others(a) || has_others(b);
  std::vector<FactorSet> left = samples_of(a), right = samples_of(b);
  // Of several summands nobody has said which come first, each of its own micro-batches.
  if ((a.summands().size() > 1 || b.summands().size() > 1) && !(left.empty() && right.empty() && said.split))
    return said.unknown = true, said;
  // What the program adds is what this op makes, not what is made of it. Where it adds groups, they are samples' too.
  const auto is_of_sum = [&](const FactorSet& f) {
    const Op& op = ref_.graph().op(f.key.op);
    if (ref_.factors(op).list[static_cast<size_t>(f.key.factor)].group.rows > 0) return true;
    return std::ranges::any_of(op.outputs, [&](TensorId id) { return ref_.root(id) == sum; });
  };
  if (!std::ranges::all_of(left, is_of_sum) || !std::ranges::all_of(right, is_of_sum)) return said.unknown = true, said;
  const auto counted = [](const FactorSet& f) { return f.any; };
  if (std::ranges::any_of(left, counted) || std::ranges::any_of(right, counted)) return said.unknown = true, said;
  const auto without = [](std::vector<FactorSet> sets, const std::vector<FactorSet>& others) {
    std::erase_if(sets, [&](const FactorSet& f) {
      return std::ranges::any_of(others, [&](const FactorSet& x) { return x.extent == f.extent && x.set == f.set; });
    });
    return sets;
  };
  std::tie(left, right) = std::pair(without(left, right), without(right, left));
  if (left.empty() && right.empty()) return said;
  const auto all_of = [&](const std::vector<FactorSet>& sets) -> std::optional<Interval> {
    std::optional<Interval> out;
    for (const FactorSet& f : sets) {
      const auto here = numbers(f);
      if (!here || (out && !(*out == *here))) return {};
      out = here;
    }
    return out;
  };
  const std::optional<Interval> l = all_of(left), r = all_of(right);
  if (!l || !r) return said.unknown = true, said;
  const auto all = static_cast<int64_t>(micro_batches_.size());
  if (*l == *r || are_halves(*l, *r, all) || are_halves(*r, *l, all)) return said;
  said.fault = fmt::format("micro-batches [{}:{}] and [{}:{}] are no halves of a node of the tree over {}", l->begin,
                           l->end, r->begin, r->end, all);
  return said;
}

}  // namespace whale::proof
