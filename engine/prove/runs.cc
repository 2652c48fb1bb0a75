#include "prove/runs.h"

namespace whale::proof {

Runs::Runs(const std::vector<bool>& joined) {
  const auto n = static_cast<int64_t>(joined.size());
  for (int64_t p = 0; p < n; ++p) begins_.push_back(p > 0 && joined[p] ? begins_.back() : p);
  lasts_.resize(begins_.size());
  for (int64_t p = n; p-- > 0;) {
    const bool same = p + 1 < n && begin(p + 1) == begin(p);
    lasts_[p] = same ? last(p + 1) : p;
  }
}

bool Runs::any_long() const {
  for (int64_t p = 0; p < size(); ++p)
    if (long_at(p)) return true;
  return false;
}

int64_t Runs::stands_for(int64_t p) const {
  if (!long_at(p)) return 1;
  if (p == begin(p) || p == last(p)) return 1;
  return p == begin(p) + 1 ? last(p) - begin(p) - 1 : 0;
}

void Runs::split(int64_t begin, int64_t last) {
  for (int64_t p = begin; p <= last; ++p) begins_[p] = lasts_[p] = p;
}

}  // namespace whale::proof
