#include "prove/terms.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace whale::proof {
namespace {

const FactorSet* find(const TermBox& box, const FactorKey& key) {
  for (const FactorSet& f : box)
    if (f.key == key) return &f;
  return nullptr;
}

// Boxes whose terms are alike along some factors, and the same ones along all others: only their number counts.
struct Counted {
  TermBox known, alike;  // the factors that are told apart, those that either box only counts
  int64_t number = 0, all = 1;
};

std::optional<Counted> counted(const TermBox& a, const TermBox& b) {
  Counted out;
  for (const TermBox* box : {&a, &b})
    for (const FactorSet& f : *box) {
      if (!f.any) continue;
      const FactorSet* other = find(out.alike, f.key);
      if (other && other->extent != f.extent) return {};
      if (!other) out.alike.push_back(f), out.all *= f.extent;
    }
  if (out.alike.empty()) return {};
  std::sort(out.alike.begin(), out.alike.end(), [](const FactorSet& x, const FactorSet& y) { return x.key < y.key; });
  const auto rest_of = [&](const TermBox& box) {
    TermBox rest;
    for (const FactorSet& f : box)
      if (!find(out.alike, f.key)) rest.push_back(f);
    return rest;
  };
  out.known = rest_of(a);
  if (!(out.known == rest_of(b))) return {};
  for (const TermBox* box : {&a, &b}) {
    int64_t n = 1;
    for (const FactorSet& f : out.alike) {
      const FactorSet* mine = find(*box, f.key);
      n *= mine ? mine->set.size() : f.extent;
    }
    out.number += n;
  }
  return out;
}

bool meet(const TermBox& a, const TermBox& b) {
  if (const auto both = counted(a, b)) return both->number > both->all;
  return std::all_of(a.begin(), a.end(), [&](const FactorSet& f) {
    const FactorSet* other = find(b, f.key);
    if (other != nullptr && other->extent != f.extent) return true;  // of a factor that was divided: who knows
    if (other != nullptr && (f.any || other->any)) return f.set.size() + other->set.size() > f.extent;
    return other == nullptr || f.set.meets(other->set);
  });
}

bool is_counted(const TermBox& box) { return std::ranges::any_of(box, &FactorSet::any); }

bool any_meet(const std::vector<TermBox>& boxes) {
  for (size_t a = 0; a < boxes.size(); ++a)
    for (size_t b = a + 1; b < boxes.size(); ++b)
      if (meet(boxes[a], boxes[b]) || meet(boxes[b], boxes[a])) return true;
  return false;
}

// Two boxes that differ in one factor are one.
bool merge(TermBox& a, const TermBox& b) {
  if (a.size() != b.size()) return false;
  size_t differ = a.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].key != b[i].key || a[i].any != b[i].any || a[i].extent != b[i].extent) return false;
    if (a[i].set == b[i].set) continue;
    if (differ != a.size()) return false;
    differ = i;
  }
  if (differ == a.size() || a[differ].any) return false;
  FactorSet& f = a[differ];
  if (f.set.meets(b[differ].set)) return false;  // where only the number is known of others
  f.set = f.set.united(b[differ].set);
  if (f.set.is_first(f.extent)) a.erase(a.begin() + static_cast<std::ptrdiff_t>(differ));
  return true;
}

// What stands for both boxes where terms are counted, the number written in digits of the factors' extents. None: they
// are not of this kind, or too many.
std::vector<TermBox> recounted(const TermBox& a, const TermBox& b) {
  const auto both = counted(a, b);
  if (!both || both->number > both->all) return {};
  const auto with = [&](const TermBox& counts) {
    TermBox box = both->known;
    box.insert(box.end(), counts.begin(), counts.end());
    std::sort(box.begin(), box.end(), [](const FactorSet& x, const FactorSet& y) { return x.key < y.key; });
    return box;
  };
  if (both->number == both->all) return {both->known};
  std::vector<TermBox> out;
  TermBox counts;
  int64_t left = both->number, row = both->all;
  for (FactorSet f : both->alike) {
    row /= f.extent;
    if (const int64_t rows = left / row; rows > 0) {
      counts.push_back(f);
      counts.back().any = true, counts.back().set = Set::first(rows);
      out.push_back(with(counts));
      counts.pop_back();
      left -= rows * row;
    }
    if (f.extent == 1) continue;
    f.any = true, f.set = Set::first(1);
    counts.push_back(std::move(f));
  }
  return out;
}

void merge_all(std::vector<TermBox>& boxes) {
  const auto merge_two = [&](size_t i, size_t k) {
    if (!merge(boxes[i], boxes[k])) {
      const std::vector<TermBox> made = recounted(boxes[i], boxes[k]);
      if (made.empty() || made == std::vector{boxes[i], boxes[k]} || made == std::vector{boxes[k], boxes[i]})
        return false;
      boxes[i] = made[0];
      boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(k));
      boxes.insert(boxes.end(), made.begin() + 1, made.end());
      return true;
    }
    boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(k));
    return true;
  };
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < boxes.size() && !again; ++i)
      for (size_t k = i + 1; k < boxes.size() && !again; ++k) again = merge_two(i, k);
  }
  const auto before = [](const TermBox& a, const TermBox& b) {
    for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
      if (a[i].key != b[i].key) return a[i].key < b[i].key;
      if (!(a[i].set == b[i].set)) {
        const auto &x = a[i].set.runs(), &y = b[i].set.runs();
        for (size_t r = 0; r < x.size() && r < y.size(); ++r)
          if (!(x[r] == y[r])) return std::pair(x[r].begin, x[r].end) < std::pair(y[r].begin, y[r].end);
        return x.size() < y.size();
      }
    }
    return a.size() < b.size();
  };
  std::sort(boxes.begin(), boxes.end(), before);
}

// Are all terms in one of these disjoint boxes, in whatever pieces? Those that are counted are one box when they are.
bool have_all(const std::vector<TermBox>& boxes) {
  std::map<FactorKey, int64_t> extents;
  for (const TermBox& b : boxes)
    for (const FactorSet& f : b)
      if (f.any || extents.try_emplace(f.key, f.extent).first->second != f.extent) return false;
  double all = 1, found = 0;
  for (const auto& [key, extent] : extents) all *= static_cast<double>(extent);
  constexpr double kExact = 9e15;  // as far as numbers of terms are whole ones
  if (all > kExact) return false;
  for (const TermBox& b : boxes) {
    double n = all;
    for (const FactorSet& f : b) n = n / static_cast<double>(f.extent) * static_cast<double>(f.set.size());
    found += n;
  }
  return found == all;
}

}  // namespace

void Terms::add_summand(TensorId tensor, TermBox box) {
  const auto at = std::lower_bound(summands_.begin(), summands_.end(), tensor,
                                   [](const Summand& s, TensorId id) { return s.tensor < id; });
  summands_.insert(at, {tensor, {std::move(box)}});
}

Terms Terms::of(std::vector<Summand> ascending) {
  Terms out;
  out.summands_ = std::move(ascending);
  out.settle();
  return out;
}

std::vector<TensorId> Terms::names() const {
  std::vector<TensorId> out;
  for (const Summand& s : summands_) out.push_back(s.tensor);
  return out;
}

void Terms::name_as(std::vector<TensorId> ascending) {
  const std::vector<TermBox> boxes = std::move(summands_.at(0).boxes);
  summands_.clear();
  for (const TensorId id : ascending) summands_.push_back({id, boxes});
}

Terms Terms::none(TensorId tensor) {
  Terms out;
  out.summands_.push_back({tensor, {}});
  return out;
}

void Terms::rename(TensorId tensor) {
  if (summands_.size() == 1) summands_[0].tensor = tensor;
}

void Terms::rename_each(const std::function<TensorId(TensorId)>& name) {
  for (Summand& s : summands_) s.tensor = name(s.tensor);
  std::ranges::sort(summands_, {}, &Summand::tensor);
}

bool Terms::alike() const {
  return summands_.size() > 1 && !summands_[0].boxes.empty() &&
         std::ranges::all_of(summands_, [&](const Summand& s) { return s.boxes == summands_[0].boxes; });
}

void Terms::unite(TensorId tensor) {
  if (alike()) summands_ = {{tensor, std::move(summands_[0].boxes)}};
}

void Terms::unite_lots(const std::function<TensorId(const std::vector<TensorId>&)>& name) {
  std::vector<std::pair<std::vector<TensorId>, size_t>> lots;  // names, and the first of them
  for (size_t k = 0; k < summands_.size(); ++k) {
    const auto lot = std::ranges::find_if(lots, [&](const auto& l) {
      return !summands_[k].boxes.empty() && summands_[l.second].boxes == summands_[k].boxes;
    });
    if (lot == lots.end())
      lots.push_back({{summands_[k].tensor}, k});
    else
      lot->first.push_back(summands_[k].tensor);
  }
  std::vector<Summand> out;
  for (auto& [names, first] : lots)
    out.push_back({names.size() > 1 ? name(names) : names[0], std::move(summands_[first].boxes)});
  summands_ = std::move(out);
  std::ranges::sort(summands_, {}, &Summand::tensor);
}

void Terms::name_alike(Terms& a, Terms& b, TensorId tensor, const std::function<bool(const Terms&)>& told) {
  const auto own = [&](const Terms& t) { return t.summands_.size() == 1 && t.summands_[0].tensor == tensor; };
  if (own(a) && told(b)) b.unite(tensor);
  if (own(b) && told(a)) a.unite(tensor);
  if (own(a) && b.summands_.size() > 1) a.name_as(b.names());
  if (own(b) && a.summands_.size() > 1) b.name_as(a.names());
}

bool Terms::counted() const {
  return std::ranges::any_of(summands_, [](const Summand& s) { return std::ranges::any_of(s.boxes, is_counted); });
}

bool Terms::all_have(FactorKey key, int64_t extent) const {
  return std::ranges::all_of(summands_, [&](const Summand& s) {
    return std::ranges::all_of(s.boxes, [&](const TermBox& b) {
      const FactorSet* f = find(b, key);
      return f != nullptr && !f->any && f->extent == extent;
    });
  });
}

void Terms::count_from(FactorKey key, int64_t further, int64_t extent) {
  for (Summand& s : summands_)
    for (TermBox& b : s.boxes)
      for (FactorSet& f : b) {
        if (f.key != key) continue;
        Set moved;
        for (const Interval& run : f.set.runs()) moved.append({run.begin + further, run.end + further});
        f.set = std::move(moved), f.extent = extent;
      }
}

void Terms::restrict(const TermBox& box) {
  for (Summand& s : summands_)
    for (TermBox& b : s.boxes)
      for (const FactorSet& f : box) {
        const auto at = std::lower_bound(b.begin(), b.end(), f.key,
                                         [](const FactorSet& x, const FactorKey& k) { return x.key < k; });
        b.insert(at, f);
      }
}

std::optional<Terms> Terms::times(const Terms& other) const {
  if (other.summands_.size() != 1) return summands_.size() == 1 ? other.times(*this) : std::nullopt;
  Terms out = *this;
  for (size_t s = 0; s < summands_.size(); ++s) {
    out.summands_[s].boxes.clear();
    for (const TermBox& a : summands_[s].boxes)
      for (const TermBox& b : other.summands_[0].boxes) {
        TermBox both = a;
        both.insert(both.end(), b.begin(), b.end());
        std::ranges::sort(both, {}, &FactorSet::key);
        for (size_t k = 1; k < both.size(); ++k)
          if (both[k].key == both[k - 1].key) return {};
        out.summands_[s].boxes.push_back(std::move(both));
      }
  }
  return out;
}

bool Terms::beside(const Terms& other) {
  for (const Summand& theirs : other.summands_) {
    const auto at = std::lower_bound(summands_.begin(), summands_.end(), theirs.tensor,
                                     [](const Summand& s, TensorId id) { return s.tensor < id; });
    if (at != summands_.end() && at->tensor == theirs.tensor) return false;
    summands_.insert(at, theirs);
  }
  return true;
}

// Is each summand that it has terms of one of these?
bool Terms::has_names_of(const Terms& other) const {
  return std::ranges::all_of(other.summands_, [&](const Summand& theirs) {
    return theirs.boxes.empty() || std::ranges::binary_search(summands_, theirs.tensor, {}, &Summand::tensor);
  });
}

bool Terms::named_as(const Terms& other) const { return has_names_of(other) || other.has_names_of(*this); }

TensorId Terms::join(const Terms& other) {
  if (has_names_of(other)) return join_some(other.without_none());
  if (!other.has_names_of(*this)) return other.summands_.empty() ? kNone : other.summands_[0].tensor;
  const Terms mine = without_none();
  *this = other;
  return join_some(mine);
}

Terms Terms::without_none() const {
  Terms out = *this;
  std::erase_if(out.summands_, [](const Summand& s) { return s.boxes.empty(); });
  return out;
}

TensorId Terms::join_some(const Terms& other) {
  for (const Summand& theirs : other.summands_) {
    const auto at = std::lower_bound(summands_.begin(), summands_.end(), theirs.tensor,
                                     [](const Summand& s, TensorId id) { return s.tensor < id; });
    if (at == summands_.end() || at->tensor != theirs.tensor) {
      summands_.insert(at, theirs);
      continue;
    }
    for (const TermBox& a : at->boxes)
      for (const TermBox& b : theirs.boxes)
        if (meet(a, b)) return theirs.tensor;
    for (const TermBox& b : theirs.boxes) {
      at->boxes.push_back(b);
      const bool some_counted = std::ranges::any_of(at->boxes, is_counted);
      merge_all(at->boxes);
      if (some_counted && any_meet(at->boxes)) return theirs.tensor;  // two that fit a third one each, not both
    }
  }
  settle();
  return kNone;
}

void Terms::settle() {
  for (Summand& s : summands_)
    if (s.boxes.size() > 1 && have_all(s.boxes)) s.boxes = {TermBox{}};
  if (std::all_of(summands_.begin(), summands_.end(),
                  [](const Summand& s) { return s.boxes.size() == 1 && s.boxes[0].empty(); }))
    summands_.clear();
}

bool is_neutral(std::string_view combine, double value) {
  if (combine == name_of(Combine::kSum)) return value == 0;
  const bool least = combine == name_of(Combine::kMin);
  return std::isinf(value) && (value > 0) == least;
}

}  // namespace whale::proof
