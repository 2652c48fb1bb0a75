// What of a plan stands for the rest of it. Along an axis of the meshes, and along the micro-batches, alike positions
// run the same programs, and the numbers that they differ by (where parts, samples and intervals begin) grow by equal
// steps. What the first, the second and the last of such a run hold says what those between hold: docs/proof.md has
// the argument. What is not seen to be regular is walked, all of it.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "prove/runs.h"

namespace whale::proof {

class Symmetry {
 public:
  // kSamplesAlike: of devices alone, and of those that have the same samples.
  enum class Sought : uint8_t { kNo, kYes, kSamplesAlike };
  Symmetry(const Plan& plan, const Entry& entry, Sought sought);

  bool found() const;                                                    // does anything stand for something?
  int64_t stands_for(int32_t device) const { return devices_[device]; }  // 0: it is not walked
  bool walked(int32_t device) const { return stands_for(device) > 0; }
  // Three devices of the run that a device lies in which is not walked, along one axis; it is `steps` behind the first,
  // the last is `span` behind it.
  struct Line {
    int32_t first = 0, second = 0, last = 0;
    int64_t steps = 0, span = 0;
  };
  Line line(int32_t device) const;
  const Runs& micro_batches() const { return micro_batches_; }

 private:
  friend class Regular;
  int32_t at(int32_t device, size_t axis, int64_t coordinate) const;  // the one there on that axis

  const Plan& plan_;
  const Entry& entry_;
  const Sought sought_;
  std::vector<Runs> axes_;
  Runs micro_batches_;
  std::vector<int64_t> devices_;
};

}  // namespace whale::proof
