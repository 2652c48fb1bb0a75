#include "prove/set.h"

#include <algorithm>
#include "base/format.h"

namespace whale::proof {
namespace {

constexpr size_t kMostRuns = 1 << 14;

}  // namespace

void Set::append(Interval run) {
  if (run.size() <= 0) return;
  if (!runs_.empty() && runs_.back().end == run.begin)
    runs_.back().end = run.end;
  else
    runs_.push_back(run);
}

int64_t Set::size() const {
  int64_t n = 0;
  for (const Interval& r : runs_) n += r.size();
  return n;
}

bool Set::meets(const Set& other) const {
  for (size_t i = 0, k = 0; i < runs_.size() && k < other.runs_.size();) {
    const Interval &a = runs_[i], &b = other.runs_[k];
    if (a.begin < b.end && b.begin < a.end) return true;
    if (a.end <= b.end)
      ++i;
    else
      ++k;
  }
  return false;
}

Set Set::united(const Set& other) const {
  std::vector<Interval> all(runs_.begin(), runs_.end());
  all.insert(all.end(), other.runs_.begin(), other.runs_.end());
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Set out;
  for (const Interval& r : all) {
    if (!out.runs_.empty() && r.begin <= out.runs_.back().end)
      out.runs_.back().end = std::max(out.runs_.back().end, r.end);
    else
      out.runs_.push_back(r);
  }
  return out;
}

std::optional<Set> Set::at(const Set& places) const {
  Set out;
  size_t run = 0;
  int64_t before = 0;  // elements of the runs before
  for (const Interval& p : places.runs_)
    for (int64_t at = p.begin; at < p.end;) {
      while (run < runs_.size() && at >= before + runs_[run].size()) before += runs_[run++].size();
      if (run == runs_.size()) return {};
      const int64_t n = std::min(p.end, before + runs_[run].size()) - at, begin = runs_[run].begin + at - before;
      out.append({begin, begin + n});
      if (out.runs_.size() > kMostRuns) return {};
      at += n;
    }
  return out;
}

std::optional<Set> Set::times(const Set& inner, int64_t extent) const {
  Set out;
  if (inner.is_first(extent)) {
    for (const Interval& r : runs_) out.append({r.begin * extent, r.end * extent});
    return out;
  }
  if (static_cast<size_t>(size()) * inner.runs_.size() > kMostRuns) return {};
  for (const Interval& r : runs_)
    for (int64_t a = r.begin; a < r.end; ++a)
      for (const Interval& b : inner.runs_) out.append({a * extent + b.begin, a * extent + b.end});
  return out;
}

std::optional<std::pair<Set, Set>> Set::over(int64_t extent) const {
  if (empty()) return std::pair<Set, Set>{};
  if (extent == 1) return std::pair{*this, first(1)};
  if (std::all_of(runs_.begin(), runs_.end(),
                  [&](const Interval& r) { return r.begin % extent == 0 && r.end % extent == 0; })) {
    Set outer;
    for (const Interval& r : runs_) outer.append({r.begin / extent, r.end / extent});
    return std::pair{outer, first(extent)};
  }
  // What the first row has, every row has.
  Set outer, inner;
  const int64_t row = runs_[0].begin / extent;
  for (const Interval& r : runs_)
    if (r.begin / extent == row) inner.append({r.begin - row * extent, std::min(r.end - row * extent, extent)});
  int64_t last = -1;
  for (const Interval& r : runs_)
    for (int64_t a = r.begin / extent; a * extent < r.end; ++a)
      if (a != last) outer.append({a, a + 1}), last = a;
  const auto again = outer.times(inner, extent);
  if (!again || !(*again == *this)) return {};
  return std::pair{outer, inner};
}

std::string to_string(const Set& set) {
  constexpr size_t kShown = 4;
  std::string out;
  for (size_t i = 0; i < set.runs().size(); ++i) {
    if (i == kShown) return fmt::format("[{}, ... {} runs]", out, set.runs().size());
    out += fmt::format("{}{}:{}", i ? ", " : "", set.runs()[i].begin, set.runs()[i].end);
  }
  return "[" + out + "]";
}

std::optional<Set> places_of(int64_t outer, int64_t extent, int64_t inner, const Set& part) {
  const auto rows = part.times(Set::first(inner), inner);
  return rows ? Set::first(outer).times(*rows, extent * inner) : rows;
}

}  // namespace whale::proof
