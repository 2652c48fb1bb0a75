#include "prove/terms.h"

#include <algorithm>
#include <cmath>

namespace whale::proof {
namespace {

const FactorSet* find(const TermBox& box, const FactorKey& key) {
  for (const FactorSet& f : box)
    if (f.key == key) return &f;
  return nullptr;
}

bool meet(const TermBox& a, const TermBox& b) {
  return std::all_of(a.begin(), a.end(), [&](const FactorSet& f) {
    const FactorSet* other = find(b, f.key);
    if (other != nullptr && (f.any || other->any)) return f.set.size() + other->set.size() > f.extent;
    return other == nullptr || f.set.meets(other->set);
  });
}

// Two boxes that differ in one factor are one; alike terms are counted.
bool merge(TermBox& a, const TermBox& b) {
  if (a.size() != b.size()) return false;
  size_t differ = a.size(), counted = a.size();
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(a[i].key == b[i].key) || a[i].any != b[i].any) return false;
    if (a[i].any) counted = i;
    if (a[i].set == b[i].set) continue;
    if (differ != a.size()) return false;
    differ = i;
  }
  if (differ == a.size()) differ = counted;
  if (differ == a.size()) return false;
  FactorSet& f = a[differ];
  if (f.any && f.set.size() + b[differ].set.size() > f.extent) return false;
  if (!f.any && f.set.meets(b[differ].set)) return false;  // where only the number is known of others
  f.set = f.any ? Set::first(f.set.size() + b[differ].set.size()) : f.set.united(b[differ].set);
  if (f.set.is_first(f.extent)) a.erase(a.begin() + static_cast<std::ptrdiff_t>(differ));
  return true;
}

void merge_all(std::vector<TermBox>& boxes) {
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < boxes.size() && !again; ++i)
      for (size_t k = i + 1; k < boxes.size() && !again; ++k)
        if (merge(boxes[i], boxes[k])) boxes.erase(boxes.begin() + static_cast<std::ptrdiff_t>(k)), again = true;
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

Terms Terms::none(TensorId tensor) {
  Terms out;
  out.summands_.push_back({tensor, {}});
  return out;
}

void Terms::rename(TensorId tensor) {
  if (summands_.size() == 1) summands_[0].tensor = tensor;
}

void Terms::unite(TensorId tensor) {
  if (summands_.size() < 2 || summands_[0].boxes.empty()) return;
  if (std::ranges::all_of(summands_, [&](const Summand& s) { return s.boxes == summands_[0].boxes; }))
    summands_ = {{tensor, std::move(summands_[0].boxes)}};
}

void Terms::name_alike(Terms& a, Terms& b, TensorId tensor) {
  const auto own = [&](const Terms& t) { return t.summands_.size() == 1 && t.summands_[0].tensor == tensor; };
  if (own(a)) b.unite(tensor);
  if (own(b)) a.unite(tensor);
}

bool Terms::counted() const {
  for (const Summand& s : summands_)
    for (const TermBox& b : s.boxes)
      for (const FactorSet& f : b)
        if (f.any) return true;
  return false;
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
  if (summands_.size() != 1 || other.summands_.size() != 1) return {};
  Terms out = *this;
  out.summands_[0].boxes.clear();
  for (const TermBox& a : summands_[0].boxes)
    for (const TermBox& b : other.summands_[0].boxes) {
      TermBox both = a;
      both.insert(both.end(), b.begin(), b.end());
      std::ranges::sort(both, {}, &FactorSet::key);
      for (size_t k = 1; k < both.size(); ++k)
        if (both[k].key == both[k - 1].key) return {};
      out.summands_[0].boxes.push_back(std::move(both));
    }
  return out;
}

bool Terms::beside(const Terms& other) {
  for (const Summand& theirs : other.summands_) {
    const auto at = std::lower_bound(summands_.begin(), summands_.end(), theirs.tensor,
                                     [](const Summand& s, TensorId id) { return s.tensor < id; });
    if (at == summands_.end() || at->tensor != theirs.tensor)
      summands_.insert(at, theirs);
    else if (!(at->boxes == theirs.boxes))
      return false;
  }
  return true;
}

static bool has_none(const std::vector<Summand>& summands) {
  return !summands.empty() && std::ranges::all_of(summands, [](const Summand& s) { return s.boxes.empty(); });
}

bool Terms::named_as(const Terms& other) const {
  return has_none(summands_) || has_none(other.summands_) ||
         std::ranges::equal(summands_, other.summands_, {}, &Summand::tensor, &Summand::tensor);
}

TensorId Terms::join(const Terms& other) {
  if (has_none(other.summands_)) return kNone;
  if (has_none(summands_)) {
    *this = other;
    return kNone;
  }
  if (!named_as(other)) return other.summands_.empty() ? kNone : other.summands_[0].tensor;
  return join_some(other);
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
      merge_all(at->boxes);
    }
  }
  settle();
  return kNone;
}

void Terms::settle() {
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
