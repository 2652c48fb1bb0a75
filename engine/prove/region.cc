#include "prove/region.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "base/format.h"

namespace whale::proof {
namespace {

std::optional<Digit> merged(const Digit& outer, const Digit& inner) {
  if (outer.extent == 1) return inner;
  if (inner.extent == 1) return outer;
  if (outer.any && inner.any)
    return Digit{outer.extent * inner.extent, Set::first(outer.set.size() * inner.set.size()), true};
  if (outer.open() || inner.open()) return {};
  auto set = outer.set.times(inner.set, inner.extent);
  if (!set) return {};
  return Digit{outer.extent * inner.extent, std::move(*set)};
}

// Into an outer digit and an inner one of `extent`.
std::optional<std::pair<Digit, Digit>> divided(const Digit& d, int64_t extent) {
  if (d.extent % extent) return {};
  const int64_t rows = d.extent / extent;
  if (d.open()) {
    const int64_t n = d.set.size();
    if (n % extent == 0)
      return std::pair{Digit{rows, Set::first(n / extent), true}, Digit{extent, Set::first(extent), true}};
    if (n < extent) return std::pair{Digit{rows, Set::first(1), true}, Digit{extent, Set::first(n), true}};
    return {};
  }
  auto parts = d.set.over(extent);
  if (!parts) return {};
  return std::pair{Digit{rows, std::move(parts->first), d.any}, Digit{extent, std::move(parts->second), d.any}};
}

// Neighbours that hold any of their positions are one digit, and digits of one position none.
std::vector<Digit> joint(const Region& r) {
  std::vector<Digit> out;
  for (const Digit& d : r.digits()) {
    if (d.extent == 1) continue;
    if (!out.empty() && out.back().any && d.any)
      out.back() = *merged(out.back(), d);
    else
      out.push_back(d);
  }
  return out;
}

}  // namespace

Region Region::whole(const Dims& dims) {
  std::vector<Digit> digits;
  digits.reserve(dims.size());
  for (const int64_t n : dims) digits.push_back({n, Set::first(n)});
  return Region(std::move(digits));
}

int64_t Region::size() const {
  int64_t n = 1;
  for (const Digit& d : digits_) n *= d.set.size();
  return n;
}

bool Region::is_whole() const {
  return std::ranges::all_of(digits_, [](const Digit& d) { return d.whole(); });
}

bool Region::open() const {
  return std::ranges::any_of(digits_, [](const Digit& d) { return d.open(); });
}

std::optional<Region> Region::in(const Dims& dims) const {
  if (element_count(dims) == 0) return size() == 0 ? std::optional(whole(dims)) : std::nullopt;
  std::vector<Digit> out, left(digits_.rbegin(), digits_.rend());  // the next one last
  out.reserve(dims.size());
  const auto next = [&] {
    Digit d{1, Set::first(1)};
    if (!left.empty()) d = std::move(left.back()), left.pop_back();
    return d;
  };
  for (const int64_t n : dims) {
    Digit d = next();
    while (d.extent == 1 && n > 1 && !left.empty()) d = next();
    if (n == 1 && d.extent > 1) {
      left.push_back(std::move(d));
      out.push_back({1, Set::first(1)});
      continue;
    }
    while (d.extent % n) {
      if (left.empty()) return {};
      Digit inner = next();
      // No more of the next one than is wanted, where it divides.
      const int64_t wanted = n / std::gcd(n, d.extent);
      if (inner.extent > wanted && inner.extent % wanted == 0) {
        if (auto parts = divided(inner, inner.extent / wanted)) {
          left.push_back(std::move(parts->second));
          inner = std::move(parts->first);
        }
      }
      auto both = merged(d, inner);
      if (!both) return {};
      d = std::move(*both);
    }
    if (d.extent > n) {
      auto parts = divided(d, d.extent / n);
      if (!parts) return {};
      left.push_back(std::move(parts->second));
      d = std::move(parts->first);
    }
    out.push_back(std::move(d));
  }
  for (const Digit& d : left)
    if (d.extent != 1) return {};
  return Region(std::move(out));
}

Region Region::spread(const Dims& dims, const Dims& local) const {
  if (dims.size() != local.size()) return *this;
  std::vector<Digit> out;
  size_t k = 0;  // of dims
  const std::vector<Digit> digits = joint(*this);
  for (size_t at = 0; at < digits.size(); ++at) {
    const Digit& d = digits[at];
    const size_t first = k;
    int64_t extent = 1, held = 1;
    bool fits = d.any;
    for (; k < dims.size() && extent < d.extent; ++k) extent *= dims[k], held *= local[k], fits &= local[k] <= dims[k];
    if (extent != d.extent) {  // of other dims from here on, the last of these in part
      const int64_t all = k > first && local[k - 1] > 0 ? extent / dims[k - 1] : 0;
      const int64_t n = all > 0 ? held / local[k - 1] : 0;
      if (fits && n > 0 && d.extent % all == 0 && d.set.size() % n == 0 && d.set.size() / n <= d.extent / all) {
        for (size_t whole = first; whole + 1 < k; ++whole) out.push_back({dims[whole], Set::first(local[whole]), true});
        out.push_back({d.extent / all, Set::first(d.set.size() / n), true});
        ++at;
      }
      out.insert(out.end(), digits.begin() + static_cast<std::ptrdiff_t>(at), digits.end());
      break;
    }
    if (!fits || held != d.set.size()) {
      out.push_back(d);
      continue;
    }
    for (size_t n = first; n < k; ++n) out.push_back({dims[n], Set::first(local[n]), true});
  }
  return Region(std::move(out));
}

namespace {

// The positions of a digit that stand at these places among those that are held.
std::optional<Digit> at(Digit d, const Set& places) {
  if (d.open()) {
    d.set = Set::first(places.size());
    return d;
  }
  auto set = d.set.at(places);
  if (!set) return {};
  d.set = d.any ? Set::first(set->size()) : std::move(*set);
  return d;
}

// Elements [part.begin, part.end) of these digits from the first on: whole rows, or a part of one.
std::optional<std::vector<Digit>> run_of(std::vector<Digit> digits, Interval part) {
  for (size_t i = 0; i < digits.size(); ++i) {
    int64_t row = 1;
    for (size_t k = i + 1; k < digits.size(); ++k) row *= digits[k].set.size();
    if (row == 0) return {};
    const bool rows = part.begin % row == 0 && part.end % row == 0, in_one = part.begin / row == (part.end - 1) / row;
    if (!rows && !in_one) {
      auto both = merged(digits[i], digits[i + 1]);
      if (!both) return {};
      digits[i] = std::move(*both);
      digits.erase(digits.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      --i;
      continue;
    }
    const int64_t first = part.begin / row;
    auto some = at(std::move(digits[i]), Set(Interval{first, rows ? part.end / row : first + 1}));
    if (!some) return {};
    digits[i] = std::move(*some);
    if (rows) return digits;
    part = {part.begin - first * row, part.end - first * row};
  }
  return digits;
}

}  // namespace

std::optional<Region> Region::cut(int64_t outer, int64_t extent, int64_t inner, Interval part) const {
  if (part == Interval{0, extent}) return *this;
  if (outer * extent * inner != size()) return {};
  if (size() == 0) return *this;
  if (part.size() == 0 && !digits_.empty()) {
    Region none = *this;
    none.digits_.back().set = Set();
    return none;
  }
  std::vector<Digit> out;
  size_t i = 0, end = digits_.size();
  for (; i < end && outer % std::max<int64_t>(digits_[i].set.size(), 1) == 0; ++i) {
    if (outer == 1 && (digits_[i].set.size() != 1 || i + 1 == end)) break;
    outer /= digits_[i].set.size(), out.push_back(digits_[i]);
  }
  if (outer > 1 && i == end) return {};
  while (end > i && inner % std::max<int64_t>(digits_[end - 1].set.size(), 1) == 0 &&
         (inner > 1 || digits_[end - 1].set.size() == 1) && end - 1 > i)
    inner /= digits_[--end].set.size();
  if (i == end) return {};
  std::vector<Digit> middle(digits_.begin() + static_cast<std::ptrdiff_t>(i),
                            digits_.begin() + static_cast<std::ptrdiff_t>(end));
  if (outer == 1) {
    auto run = run_of(std::move(middle), {part.begin * inner, part.end * inner});
    if (!run) return {};
    out.insert(out.end(), run->begin(), run->end());
  } else {
    Digit d = middle[0];
    for (size_t k = 1; k < middle.size(); ++k) {
      auto both = merged(d, middle[k]);
      if (!both) return {};
      d = std::move(*both);
    }
    if (outer * extent * inner != d.set.size()) return {};
    const auto places = places_of(outer, extent, inner, Set(part));
    auto some = places ? at(std::move(d), *places) : std::nullopt;
    if (!some) return {};
    out.push_back(std::move(*some));
  }
  out.insert(out.end(), digits_.begin() + static_cast<std::ptrdiff_t>(end), digits_.end());
  return Region(std::move(out));
}

std::optional<Region> Region::cut(const Dims& local, const SubAxis& sub_axis, Interval part) const {
  int64_t outer = sub_axis.outer, inner = sub_axis.inner;
  const auto dim = static_cast<size_t>(sub_axis.dim);
  if (dim >= local.size() || outer <= 0 || inner <= 0 || local[dim] % (outer * inner)) return {};
  const int64_t extent = local[dim] / (outer * inner);
  if (part.begin < 0 || part.end > extent) return {};
  for (size_t d = 0; d < dim; ++d) outer *= local[d];
  for (size_t d = dim + 1; d < local.size(); ++d) inner *= local[d];
  return cut(outer, extent, inner, part);
}

std::optional<Region> Region::run(int64_t begin, int64_t n) const {
  const int64_t all = size();
  if (begin == 0 && n == all) return *this;
  int64_t inner = 1;  // the largest whole number of inner digits that the run is made of
  for (size_t d = digits_.size(); d-- > 0;) {
    const int64_t more = inner * digits_[d].set.size();
    if (more == 0 || begin % more || n % more) break;
    inner = more;
  }
  return cut(1, all / inner, inner, {begin / inner, (begin + n) / inner});
}

namespace {

bool alike(const std::vector<Digit>& a, const std::vector<Digit>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].extent != b[i].extent) return false;
    if (a[i].any || b[i].any ? a[i].set.size() != b[i].set.size() : !(a[i].set == b[i].set)) return false;
  }
  return true;
}

bool same_extents(const std::vector<Digit>& a, const std::vector<Digit>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Digit& x, const Digit& y) { return x.extent == y.extent; });
}

}  // namespace

std::optional<Region> known(const Region& a, const Region& b) {
  if (a.digits() == b.digits()) return a;
  const auto any = [](const Region& r) {
    return std::ranges::any_of(r.digits(), [](const Digit& d) { return d.any && d.extent > 1; });
  };
  if (!any(a)) return a;
  if (!any(b)) return b;
  // What both are the same all along, the sum is.
  const auto both = [](const Region& x, const Region& y) -> std::optional<Region> {
    Dims extents;
    for (const Digit& d : x.digits()) extents.push_back(d.extent);
    const auto other = y.in(extents);
    if (!other) return {};
    std::vector<Digit> out = x.digits();
    for (size_t d = 0; d < out.size(); ++d) {
      const Digit& theirs = other->digits()[d];
      if (out[d].any && theirs.any && out[d].set.size() != theirs.set.size()) return {};
      if (out[d].any) out[d] = theirs;
    }
    return Region(std::move(out));
  };
  auto out = both(a, b);
  return out ? out : both(b, a);
}

bool same(const Region& a, const Region& b) {
  const std::vector<Digit> left = joint(a), right = joint(b);
  if (same_extents(left, right)) return alike(left, right);
  const auto dims = [](const std::vector<Digit>& digits) {
    Dims out;
    for (const Digit& d : digits) out.push_back(d.extent);
    return out;
  };
  if (const auto other = b.in(dims(left))) return alike(left, other->digits());
  if (const auto other = a.in(dims(right))) return alike(other->digits(), right);
  return false;
}

namespace {

Dims extents_of(const Region& r) {
  Dims out;
  for (const Digit& d : r.digits()) out.push_back(d.extent);
  return out;
}

// With one digit for each of `extents`; none: they are no box of these.
std::optional<Region> box_of(const std::vector<Region>& parts, const Dims& extents) {
  std::vector<Digit> out;
  for (size_t p = 0; p < parts.size(); ++p) {
    const auto part = parts[p].in(extents);
    if (!part) return {};
    const std::vector<Digit>& digits = part->digits();
    if (p == 0) {
      out = digits;
      continue;
    }
    for (size_t d = 0; d < out.size(); ++d) {
      if (out[d].any != digits[d].any && !out[d].whole() && !digits[d].whole()) return {};
      out[d].set = out[d].set.united(digits[d].set);
      out[d].any &= digits[d].any;
    }
  }
  return Region(std::move(out));
}

}  // namespace

std::vector<Region> hulls(const std::vector<Region>& parts, int64_t elements) {
  std::vector<Region> out, others;
  const auto add = [&](const Dims& extents) {
    auto box = box_of(parts, extents);
    if (!box) return false;
    const int64_t found = box->size();
    if (found == elements || found == 0) return out.push_back(std::move(*box)), found == elements;
    const std::vector<Digit>& digits = box->digits();
    for (size_t d = 0; d < digits.size(); ++d) {
      const int64_t n = digits[d].set.size() * elements;
      if (!digits[d].any || n % found || n / found > digits[d].extent) continue;
      std::vector<Digit> grown = digits;
      grown[d].set = Set::first(n / found);
      out.emplace_back(std::move(grown));
    }
    others.push_back(std::move(*box));
    return false;
  };
  const auto finest = std::max_element(
      parts.begin(), parts.end(), [](const Region& a, const Region& b) { return joint(a).size() < joint(b).size(); });
  const Dims extents = extents_of(*finest);
  if (add(extents)) return out;
  // [7:9] and [9:27] of 27 are a box, of 3 x 3 x 3 none.
  for (const Region& coarser : parts)
    if (extents_of(coarser) != extents && add(extents_of(coarser))) return out;
  // Nor are rows and a part of another row, where rows are of several digits: as one digit they are.
  for (size_t first = 0; first < extents.size(); ++first)
    for (size_t last = first + 1; last < extents.size(); ++last) {
      Dims fewer(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(first));
      fewer.push_back(std::accumulate(extents.begin() + static_cast<std::ptrdiff_t>(first),
                                      extents.begin() + static_cast<std::ptrdiff_t>(last) + 1, int64_t{1},
                                      std::multiplies<>{}));
      fewer.insert(fewer.end(), extents.begin() + static_cast<std::ptrdiff_t>(last) + 1, extents.end());
      if (add(fewer)) return out;
    }
  return out.empty() ? others : out;
}

std::string to_string(const Region& region) {
  std::string out;
  for (const Digit& d : region.digits()) {
    const std::string set = d.any ? fmt::format("any {}", d.set.size()) : to_string(d.set);
    out += fmt::format("{}{}", out.empty() ? "" : " x ", d.whole() ? fmt::format("all {}", d.extent) : set);
  }
  return out.empty() ? "a scalar" : out;
}

}  // namespace whale::proof
