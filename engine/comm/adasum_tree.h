// The arithmetic of Adasum (Maleki et al., 2021): a member's gradient and its neighbour's become
//   (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
// then pairs of those, until one is left. Members behind the largest power of two enter first: member P + i goes into
// member i. Products are added up by slices, one a member, in the order of the members: who adds them up makes no
// difference, and results depend on the number of members only.
#pragma once

#include <bit>
#include <vector>

#include "comm/transport.h"

namespace whale {

class AdasumTree {
 public:
  struct Products {
    double ab = 0, aa = 0, bb = 0;
    void add(const Products& p) { ab += p.ab, aa += p.aa, bb += p.bb; }
  };
  AdasumTree(const CollectiveSpec& spec, size_t members, size_t rank, Device& device);

  int64_t elements() const { return elements_; }
  DType dtype() const { return dtype_; }
  size_t bytes() const { return static_cast<size_t>(elements_) * bytes_; }
  int64_t slice(size_t member) const {
    return elements_ * static_cast<int64_t>(member) / static_cast<int64_t>(members_);
  }
  // body(distance, stride, count): member k * stride takes in member k * stride + distance, for k < count. Ends when a
  // body says false.
  template <class Body>
  bool each_step(Body body) const {
    const size_t power = std::bit_floor(members_);
    if (power < members_ && !body(power, size_t{1}, members_ - power)) return false;
    for (size_t step = 1; step < power; step *= 2)
      if (!body(step, 2 * step, power / (2 * step))) return false;
    return true;
  }
  // In place: a sum over all samples holds mine by their share; the gradient of my own mean does not.
  void scale(char* data);
  Products products(const char* a, const char* b, int64_t begin, int64_t end);
  void join(char* a, const char* b, const Products& sum, int64_t begin, int64_t end);
  void copy(char* to, const char* from, int64_t begin, int64_t end);

 private:
  static constexpr size_t kBlock = 2048;  // elements on the way through the host
  using Values = double[kBlock];
  template <class Body>
  void each_block(int64_t begin, int64_t end, Body body) const;
  void read(Values& to, const char* from, size_t n);
  void write(char* to, const Values& from, size_t n);

  Device& device_;
  DType dtype_;
  int64_t elements_;
  size_t members_, bytes_;
  double scale_ = 1;
  Values a_, b_;
  alignas(8) char raw_[kBlock * 8];
};

}  // namespace whale
