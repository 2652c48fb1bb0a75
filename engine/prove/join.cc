#include "prove/join.h"

#include <algorithm>

#include "prove/sum.h"
#include "prove/tree.h"

namespace whale::proof {

std::optional<Region> box_of(const Region& region, const Dims& local, const std::vector<Interval>& at) {
  std::optional<Region> out = region;
  Dims dims = local;
  for (size_t d = 0; d < dims.size() && out; ++d) {
    out = out->cut(dims, SubAxis{static_cast<int>(d), 1, 1}, at[d]);
    dims[d] = at[d].size();
  }
  return out;
}

namespace {

bool meet(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  for (size_t d = 0; d < a.size(); ++d)
    if (a[d].begin >= b[d].end || b[d].begin >= a[d].end) return false;
  return true;
}

// No two pieces lie in one place; with as many elements as the whole has, they cover it.
void check_apart(const std::vector<Piece>& pieces) {
  std::vector<const Piece*> list;  // along the first dimension that tells them apart
  for (const Piece& p : pieces) list.push_back(&p);
  size_t d = 0;
  while (d + 1 < pieces[0].at.size() &&
         std::ranges::all_of(pieces, [&](const Piece& p) { return p.at[d] == pieces[0].at[d]; }))
    ++d;
  std::ranges::sort(list, {}, [&](const Piece* p) { return p->at[d].begin; });
  for (size_t a = 0; a < list.size(); ++a)
    for (size_t b = a + 1; b < list.size() && list[b]->at[d].begin < list[a]->at[d].end; ++b)
      if (meet(list[a]->at, list[b]->at)) refuse("two parts of {} lie in one place", to_string(list[a]->value->region));
}

uint64_t order_of(const std::vector<Piece>& pieces) {
  std::vector<uint64_t> orders;
  std::vector<Region> places;
  for (const Piece& p : pieces) orders.push_back(p.value->order), places.push_back(p.value->region);
  return Tree::put_together(orders, places);
}

}  // namespace

Held joined(const Reference& ref, const std::vector<Piece>& pieces, const Dims& local) {
  if (pieces.empty()) refuse("nothing is put together for {}", to_string(local));
  const Value& first = *pieces[0].value;
  std::vector<Region> regions;
  int64_t elements = 0;
  for (const Piece& p : pieces) {
    const Value& v = *p.value;
    if (v.tensor != first.tensor && (ref.constant(v.tensor) || ref.constant(first.tensor)))
      no_rule("{} and {} put together", ref.name(first.tensor), ref.name(v.tensor));
    if (v.tensor != first.tensor || v.dtype != first.dtype)
      refuse("parts of two tensors are put together, {} of {} and {} of {}", describe(ref, first), name_of(first.dtype),
             describe(ref, v), name_of(v.dtype));
    Terms mine = v.terms, others = first.terms;
    if (!(mine == others)) name_alike(ref, mine, others, first.tensor);
    if (!(mine == others) || (!v.terms.whole() && v.combine != first.combine))
      no_rule("parts with unlike terms put together: {} and {}", describe(ref, first), describe(ref, v));
    regions.push_back(v.region);
    elements += v.region.size();
  }
  if (elements != element_count(local))
    refuse("parts of {} elements are put together for {}", elements, to_string(local));
  if (pieces.size() > 1) check_apart(pieces);
  if (ref.constant(first.tensor)) {  // a number, of whatever shape
    Value out = first;
    out.region = Region({Digit{elements, Set::first(elements), true}});
    out.order = order_of(pieces);
    return std::make_shared<const Value>(std::move(out));
  }
  const std::vector<Region> all = hulls(regions, elements);
  const bool complete = std::ranges::any_of(all, [&](const Region& r) { return r.size() == elements; });
  if (all.empty() || (!complete && std::ranges::any_of(regions, &Region::open)))
    no_rule("parts {} and {} put together", to_string(regions[0]), to_string(regions.back()));
  if (!complete)
    refuse("parts {} and {} are put together, which leave something out or have it twice", to_string(regions[0]),
           to_string(regions.back()));
  const auto misplaced = [&](const Region& whole) {  // a piece; null: none is
    return std::ranges::find_if(pieces, [&](const Piece& p) {
      const auto part = box_of(whole, local, p.at);
      return !part || !same(*part, p.value->region);
    });
  };
  const auto right =
      std::ranges::find_if(all, [&](const Region& r) { return r.size() == elements && misplaced(r) == pieces.end(); });
  if (right == all.end()) {
    const auto first = std::ranges::find(all, elements, &Region::size);
    const Piece& p = *misplaced(*first);
    const auto part = box_of(*first, local, p.at);
    if (!part) no_rule("a part of {}", to_string(*first));
    refuse("where {} belongs, {} is put", to_string(*part), to_string(p.value->region));
  }
  Value out = first;
  out.region = *right;
  out.order = order_of(pieces);
  return std::make_shared<const Value>(std::move(out));
}

}  // namespace whale::proof
