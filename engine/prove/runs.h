// Positions on a line in runs of alike ones, of which the first, the second and the last stand for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace whale::proof {

class Runs {
 public:
  // `joined[p]`: p is like p - 1.
  explicit Runs(const std::vector<bool>& joined);
  int64_t size() const { return static_cast<int64_t>(begins_.size()); }
  int64_t begin(int64_t p) const { return begins_[p]; }
  int64_t last(int64_t p) const { return lasts_[p]; }
  bool long_at(int64_t p) const { return last(p) - begin(p) > 2; }
  bool any_long() const;  // does any of them stand for others?
  // Itself and those that it stands for: the second one for all between it and the last; 0: another stands for it.
  int64_t stands_for(int64_t p) const;
  // From here on nobody stands for anybody.
  void split(int64_t begin, int64_t last);

 private:
  std::vector<int64_t> begins_, lasts_;  // of the run of each position
};

}  // namespace whale::proof
