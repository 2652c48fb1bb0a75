// Which ranks have begun what this one has: every call of a session is one of all ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "comm/counter.h"

namespace whale {

class Beginners {
 public:
  Beginners(int ranks, int self) : self_(self), begun_(static_cast<size_t>(ranks)) {}
  void reset() {  // between runs
    count_.reset();
    for (auto& begun : begun_) begun.store(false, std::memory_order_relaxed);
  }
  void add(int rank) {
    if (!begun_[rank].exchange(true, std::memory_order_relaxed)) count_.advance(1);
  }
  // Until all others have; false: aborted.
  bool wait(Lookout* lookout) { return count_.wait(static_cast<uint32_t>(begun_.size() - 1), lookout); }
  void abort() { count_.abort(); }
  std::vector<int32_t> late() const {
    std::vector<int32_t> out;
    for (size_t r = 0; r < begun_.size(); ++r)
      if (static_cast<int>(r) != self_ && !begun_[r].load(std::memory_order_relaxed))
        out.push_back(static_cast<int32_t>(r));
    return out;
  }

 private:
  const int self_;
  std::vector<std::atomic<bool>> begun_;  // by rank
  Counter count_;                         // of others
};

}  // namespace whale
