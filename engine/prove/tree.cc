#include "prove/tree.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/format.h"

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

uint64_t mix(uint64_t a, uint64_t b) {
  a = (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0xbf58476d1ce4e5b9;
  return a ^ (a >> 31);
}
uint64_t mix(uint64_t a, int64_t b) { return mix(a, static_cast<uint64_t>(b)); }
uint64_t mix(uint64_t a, std::string_view text) {
  for (const char c : text) a = mix(a, uint64_t{static_cast<unsigned char>(c)});
  return mix(a, uint64_t{text.size()});
}
uint64_t mix(uint64_t a, const Set& set) {
  for (const Interval& i : set.runs()) a = mix(mix(a, i.begin), i.end);
  return mix(a, set.size());
}
uint64_t mix(uint64_t a, const Dims& dims) {
  for (const int64_t n : dims) a = mix(a, n);
  return mix(a, static_cast<int64_t>(dims.size()));
}
uint64_t mix(uint64_t a, const Region& region) {
  for (const Digit& d : region.digits()) a = mix(mix(mix(a, d.set), d.extent), int64_t{d.any});
  return a;
}
// In either order: a + b is b + a.
uint64_t mix_both(uint64_t a, uint64_t b) { return mix(mix(1, std::min(a, b)), std::max(a, b)); }

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

std::string Tree::fault_of(TensorId sum, const Terms& a, const Terms& b) const {
  if (!exact_) return {};
  std::vector<FactorSet> left = samples_of(a), right = samples_of(b);
  if (a.summands().size() > 1 || b.summands().size() > 1) return {};  // each of its own micro-batches
  // What the program adds is what this op makes, not what is made of it. Where it adds groups, they are samples' too.
  const auto is_of_sum = [&](const FactorSet& f) {
    const Op& op = ref_.graph().op(f.key.op);
    if (ref_.factors(op).list[f.key.factor].group.rows > 0) return true;
    return std::ranges::any_of(op.outputs, [&](TensorId id) { return ref_.root(id) == sum; });
  };
  if (!std::ranges::all_of(left, is_of_sum) || !std::ranges::all_of(right, is_of_sum)) return {};
  const auto counted = [](const FactorSet& f) { return f.any; };
  if (std::ranges::any_of(left, counted) || std::ranges::any_of(right, counted)) return {};
  const auto without = [](std::vector<FactorSet> sets, const std::vector<FactorSet>& others) {
    std::erase_if(sets, [&](const FactorSet& f) {
      return std::ranges::any_of(others, [&](const FactorSet& x) { return x.extent == f.extent && x.set == f.set; });
    });
    return sets;
  };
  std::tie(left, right) = std::pair(without(left, right), without(right, left));
  if (left.empty() && right.empty()) return {};
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
  if (!l || !r) return {};
  const auto all = static_cast<int64_t>(micro_batches_.size());
  if (*l == *r || are_halves(*l, *r, all) || are_halves(*r, *l, all)) return {};
  return fmt::format("micro-batches [{}:{}] and [{}:{}] are no halves of a node of the tree over {}", l->begin, l->end,
                     r->begin, r->end, all);
}

uint64_t Tree::hash(const FactorSet& f) const {
  const uint64_t key = mix(mix(2, ref_.graph().op(f.key.op).name), int64_t{f.key.factor});
  return mix(mix(mix(key, f.set), f.extent), int64_t{f.any});
}

// But for what all of the others have, too: a device's place in a split says nothing of the order of its micro-batches.
uint64_t Tree::hash(const Terms& terms, const Terms& besides) const {
  const auto has = [](const Terms& t, const FactorSet& f) {
    return std::ranges::all_of(t.summands(), [&](const Summand& s) {
      return std::ranges::all_of(s.boxes, [&](const TermBox& box) { return std::ranges::count(box, f) > 0; });
    });
  };
  uint64_t out = 3;
  for (const Summand& s : terms.summands()) {
    uint64_t boxes = 0;  // in any order
    for (const TermBox& box : s.boxes) {
      uint64_t each = 4;
      for (const FactorSet& f : box)
        if (!has(terms, f) || !has(besides, f)) each = mix(each, hash(f));
      boxes += each;
    }
    if (!s.boxes.empty()) out = mix(mix(out, ref_.tensor(s.tensor).name), boxes);
  }
  return out;
}

uint64_t Tree::added(const Value& a, const Value& b) const {
  if (!exact_) return 0;
  if (a.order == kUntold || b.order == kUntold) return kUntold;
  const uint64_t one = mix(a.order, hash(a.terms, b.terms)), other = mix(b.order, hash(b.terms, a.terms));
  // The larger of 0 and -0 is the first of them.
  const uint64_t both = a.combine == Joining(Combine::kSum) ? mix_both(one, other) : mix(one, other);
  return mix(mix(both, name_of(a.dtype)), name_of(b.dtype));
}

uint64_t Tree::beside_zero(const Value& v, const Value& zeros, double zero) const {
  if (!exact_) return 0;
  if (v.order == kUntold || zeros.order == kUntold || zeros.signs) return kUntold;
  return mix(mix(v.order, zeros.order), int64_t{std::signbit(zero) ? 6 : 5});
}

uint64_t Tree::cast(const Value& v, DType to) const {
  return !exact_ || v.order == kUntold ? v.order : mix(v.order, name_of(to));
}

uint64_t Tree::made(const Value& result, std::string_view kernel, const std::vector<uint64_t>& orders,
                    const std::vector<Dims>& dims) const {
  if (!exact_) return 0;
  if (std::ranges::count(orders, kUntold) > 0) return kUntold;
  uint64_t out = mix(mix(mix(6, ref_.tensor(result.tensor).name), kernel), name_of(result.dtype));
  for (const uint64_t order : orders) out = mix(out, order);
  for (const Dims& of : dims) out = mix(out, of);
  return out;
}

uint64_t Tree::put_together(const std::vector<uint64_t>& orders, const std::vector<Region>& places) {
  if (std::ranges::count(orders, orders[0]) == std::ssize(orders)) return orders[0];
  const auto is_open = [](const Region& r) { return std::ranges::any_of(r.digits(), &Digit::any); };
  if (std::ranges::count(orders, kUntold) > 0 || std::ranges::any_of(places, is_open)) return kUntold;
  uint64_t out = 7;
  for (size_t k = 0; k < orders.size(); ++k) out = mix(mix(out, orders[k]), places[k]);
  return out;
}

void Tree::deliver(const std::string& name, const Dims& dims, const Value& value) {
  if (!exact_) return;
  alike_ &= value.order != kUntold && !value.signs;
  const Region region = value.region.in(dims).value_or(value.region);
  std::vector<Delivered>& all = delivered_[name];
  const auto meets = [&](const Region& other) {
    for (size_t d = 0; d < region.digits().size(); ++d)
      if (d < other.digits().size() && !region.digits()[d].any && !other.digits()[d].any &&
          !region.digits()[d].set.meets(other.digits()[d].set))
        return false;
    return true;
  };
  for (const Delivered& each : all) {
    if (each.order == value.order && each.region.digits() == region.digits()) return;
    alike_ &= each.order == value.order || !meets(each.region);
  }
  all.push_back({region, value.order});
}

std::map<std::string, uint64_t> Tree::orders() const {
  std::map<std::string, uint64_t> out;
  if (!alike_) return out;
  for (const auto& each : delivered_) {
    const std::vector<Delivered>& all = each.second;
    const bool one = std::ranges::all_of(all, [&](const Delivered& d) { return d.order == all[0].order; });
    uint64_t parts = 0;  // in any order
    for (const Delivered& d : all) parts += mix(d.order, d.region);
    out.emplace(each.first, one ? all[0].order : parts);
  }
  return out;
}

}  // namespace whale::proof
