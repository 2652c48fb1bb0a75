// The part of one input that some devices read, when a rank is given that and not the whole batch: boxes of the batch,
// one behind the other along the dimension that counts samples.
#pragma once

#include <cstddef>
#include <vector>

#include "plan/plan.h"

namespace whale {

// Bytes that go from the caller's dense tensor to a device's.
struct FedRun {
  size_t host = 0, device = 0, bytes = 0;
};

// In its dimension of samples the ranges that are read, of each other one the hull of what is read. Where no dimension
// counts samples there is one box, and where nothing is read it is the whole.
class InputSlices {
 public:
  explicit InputSlices(const PlanInput& port);
  // A device reads `box` of the samples `range`: an interval of every dimension, that of samples aside.
  void add(SampleRange range, const std::vector<Interval>& box);
  void finish();  // after the last add()

  bool empty() const { return !read_; }  // nothing is read: the input may be left out
  size_t count() const { return batch_dim_ < 0 ? 1 : rows_.size(); }
  std::vector<Interval> box(size_t index) const;  // in the whole batch
  const Dims& dims() const { return dims_; }      // of the tensor that holds them
  // From that tensor to a device's `local`, which holds all of each sample of `range`. In the order of the device's.
  std::vector<FedRun> runs(SampleRange range, const Dims& local, int64_t element_bytes) const;
  std::string text() const;  // "samples [0, 2) and [4, 6)", "samples [0, 2), of each [:, 0:9, :]"

 private:
  Dims whole_, dims_;
  int batch_dim_ = -1;
  bool read_ = false;
  std::vector<Interval> rows_;  // apart, ascending
  std::vector<Interval> hull_;  // of samples: all
};

}  // namespace whale
