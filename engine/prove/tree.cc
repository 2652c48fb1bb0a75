#include "prove/tree.h"

#include <algorithm>
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

uint64_t hash(uint64_t beside, const Region& region) { return mix(beside, region); }

Tree::Tree(Reference& reference, const Entry& entry, const Symmetry& symmetry, bool exact)
    : ref_(reference), batch_(entry.batch), exact_(exact), shapes_(symmetry, entry.rows.size()) {
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
    if (ref_.factors(op).list[static_cast<size_t>(f.key.factor)].group.rows > 0) return true;
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
  return mix_both(mix(a.order, hash(a.terms, b.terms)), mix(b.order, hash(b.terms, a.terms)));
}

uint64_t Tree::beside(const Value& a, const Value& b) const {
  if (!exact_) return 0;
  const auto of = [&](const Value& v) { return mix(v.order, ref_.tensor(v.tensor).name); };
  return mix_both(of(a), of(b));
}

uint64_t Tree::made_of(uint64_t order, TensorId of, TensorId made) const {
  return order == 0 || of == made ? order : mix(order, ref_.tensor(made).name);
}

uint64_t Tree::put_together(const std::vector<uint64_t>& orders) {
  uint64_t out = 5;
  for (const uint64_t order : orders) out = mix(out, order);
  return std::ranges::count(orders, orders[0]) == std::ssize(orders) ? orders[0] : out;
}

void Tree::close(Value& sum) {
  if (!exact_ || !sum.terms.whole() || sum.order == 0) return;
  sums_[sum.tensor][sum.order].insert(mix(6, sum.region));
  sum.order = 0;
}

void Tree::compute(int32_t device, const Op& op, const std::vector<Dims>& operands, const Value& result) {
  if (!exact_) return;
  uint64_t out = mix(7, op.name);
  for (const Dims& dims : operands) out = mix(out, dims);
  shapes_.add(device, Value{.tensor = result.tensor, .region = result.region, .order = out});
}

std::string Tree::order() const {
  uint64_t out = 8;
  std::map<std::string, const std::map<uint64_t, std::set<uint64_t>>*> named;
  for (const auto& [tensor, orders] : sums_) named[ref_.tensor(tensor).name] = &orders;
  for (const auto& [name, orders] : named) {
    out = mix(out, name);
    for (const auto& [order, elements] : *orders) {
      out = mix(out, order);
      if (orders->size() == 1) continue;  // of all elements
      for (const uint64_t e : elements) out = mix(out, e);
    }
  }
  for (const uint64_t shape : shapes_.all()) out = mix(out, shape);
  return fmt::format("{:016x}", out);
}

}  // namespace whale::proof
