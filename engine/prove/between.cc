#include "prove/between.h"

#include <algorithm>

namespace whale::proof {
namespace {

void expect(bool even) {
  if (!even) throw Uneven{};
}

int64_t behind(int64_t first, int64_t second, int64_t steps) { return first + steps * (second - first); }

// Runs that move, or that each step puts some more behind.
Set behind(const Set& first, const Set& second, int64_t steps) {
  if (first == second || steps == 0) return first;
  const auto &a = first.runs(), &b = second.runs();
  expect(b.size() >= a.size() && !a.empty());
  Set out;
  if (b.size() == a.size()) {
    for (size_t r = 0; r < a.size(); ++r) {
      const Interval run{behind(a[r].begin, b[r].begin, steps), behind(a[r].end, b[r].end, steps)};
      // Neither gone nor grown together with the one before.
      expect(run.begin >= 0 && run.size() > 0 && (r == 0 || run.begin > out.runs().back().end));
      out.append(run);
    }
    return out;
  }
  const size_t more = b.size() - a.size();
  expect(more <= a.size() && std::equal(a.begin(), a.end(), b.begin()));
  const int64_t by = b[a.size()].begin - a[a.size() - more].begin;
  for (size_t r = 0; r < more; ++r)
    expect(b[a.size() + r] == Interval{a[a.size() - more + r].begin + by, a[a.size() - more + r].end + by});
  out = second;
  for (int64_t n = 1; n < steps; ++n)
    for (size_t r = a.size(); r < b.size(); ++r) {
      expect(b[r].begin + n * by >= out.runs().back().end);
      out.append({b[r].begin + n * by, b[r].end + n * by});
    }
  return out;
}

Region behind(const Region& first, const Region& second, int64_t steps) {
  if (first.digits() == second.digits()) return first;
  expect(first.digits().size() == second.digits().size());
  std::vector<Digit> digits;
  for (size_t k = 0; k < first.digits().size(); ++k) {
    const Digit &a = first.digits()[k], &b = second.digits()[k];
    expect(a.extent == b.extent && a.any == b.any);
    digits.push_back({a.extent, behind(a.set, b.set, steps), a.any});
    expect(digits.back().set.empty() || digits.back().set.runs().back().end <= a.extent);
  }
  return Region(std::move(digits));
}

Terms behind(const Terms& first, const Terms& second, int64_t steps) {
  if (first == second) return first;
  expect(first.summands().size() == second.summands().size());
  std::vector<Summand> out = first.summands();
  for (size_t s = 0; s < out.size(); ++s) {
    const Summand& other = second.summands()[s];
    expect(out[s].tensor == other.tensor && out[s].boxes.size() == other.boxes.size());
    for (size_t b = 0; b < other.boxes.size(); ++b) {
      TermBox& box = out[s].boxes[b];
      expect(box.size() == other.boxes[b].size());
      for (size_t f = 0; f < box.size(); ++f) {
        const FactorSet& theirs = other.boxes[b][f];
        expect(box[f].key == theirs.key && box[f].extent == theirs.extent && box[f].any == theirs.any);
        box[f].set = behind(box[f].set, theirs.set, steps);
        expect(!box[f].set.empty() && box[f].set.runs().back().end <= box[f].extent);
      }
      std::erase_if(box, [](const FactorSet& f) { return f.set.is_first(f.extent); });
    }
  }
  return Terms::of(std::move(out));
}

}  // namespace

bool alike(const Value& a, const Value& b) {
  return a.tensor == b.tensor && a.dtype == b.dtype && a.combine == b.combine && a.order == b.order &&
         a.terms == b.terms && (a.region.digits() == b.region.digits() || same(a.region, b.region));
}

Value behind(const Value& first, const Value& second, int64_t steps) {
  expect(first.tensor == second.tensor && first.dtype == second.dtype && first.combine == second.combine &&
         first.order == second.order);
  Value out = second;
  out.region = behind(first.region, second.region, steps);
  out.terms = behind(first.terms, second.terms, steps);
  out.before = nullptr;
  return out;
}

Held between(const Held& first, const Held& second, const Held& last, int64_t steps, int64_t span) {
  if (first == second && second == last) return first;
  expect(first && second && last);
  expect(alike(behind(*first, *second, span), *last));
  return std::make_shared<const Value>(behind(*first, *second, steps));
}

Place between(const Place& first, const Place& second, const Place& last, int64_t steps, int64_t span) {
  const auto at = [&](int64_t n) {
    return Place{first.space, behind(first.begin, second.begin, n), behind(first.bytes, second.bytes, n)};
  };
  expect(first.space == second.space && at(span) == last);
  return at(steps);
}

std::vector<Memory::Part> between(const std::vector<Memory::Part>& first, const std::vector<Memory::Part>& second,
                                  const std::vector<Memory::Part>& last, int64_t steps, int64_t span) {
  expect(first.size() == second.size() && first.size() == last.size());
  std::vector<Memory::Part> out;
  for (size_t k = 0; k < first.size(); ++k) {
    expect(first[k].bytes == second[k].bytes && first[k].bytes == last[k].bytes);
    out.push_back({first[k].bytes, between(first[k].value, second[k].value, last[k].value, steps, span)});
  }
  return out;
}

}  // namespace whale::proof
