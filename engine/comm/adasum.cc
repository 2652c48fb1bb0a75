// Adasum (Maleki et al., 2021): a member's gradient and its neighbour's become
//   (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,
// then pairs of those, until one is left. Members behind the largest power of two enter first: member P + i goes into
// member i. Each member owns a slice of all gradients: it adds up the products of its slice, the members meet, and all
// know the sums, in the order of the members; then it combines its slice. Results depend on the number of members only.
#include <bit>
#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "base/f16.h"
#include "comm/member.h"

namespace whale::inproc {
namespace {

constexpr size_t kBlock = 2048;  // elements on the way through the host

using Values = double[kBlock];

double value(DType dtype, const char* data, size_t i) {
  uint16_t half = 0;
  float single = 0;
  double wide = 0;
  switch (dtype) {
    case DType::kF32: std::memcpy(&single, data + i * 4, 4); return static_cast<double>(single);
    case DType::kF64: std::memcpy(&wide, data + i * 8, 8); return wide;
    case DType::kBF16: std::memcpy(&half, data + i * 2, 2); return static_cast<double>(bf16_to_float(half));
    default: std::memcpy(&half, data + i * 2, 2); return static_cast<double>(f16_to_float(half));
  }
}
void put(DType dtype, char* data, size_t i, double x) {
  const auto single = static_cast<float>(x);
  const uint16_t half = dtype == DType::kBF16 ? float_to_bf16(single) : float_to_f16(single);
  switch (dtype) {
    case DType::kF32: std::memcpy(data + i * 4, &single, 4); break;
    case DType::kF64: std::memcpy(data + i * 8, &x, 8); break;
    default: std::memcpy(data + i * 2, &half, 2); break;
  }
}

struct Products {
  double ab = 0, aa = 0, bb = 0;
};

class Adasum final : public Member {
 public:
  Adasum(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec)
      : Member(group, rank, device), data_(static_cast<char*>(spec.in.at(0).data)), peers_(group.devices.size()) {
    offer_.op = spec.op;
    offer_.dtype = spec.in[0].dtype;
    offer_.elements = element_count(spec.in[0].dims);
    offer_.data = data_;
    bytes_ = static_cast<size_t>(size_of(offer_.dtype));
    if (!is_float(offer_.dtype)) throw internal("Adasum of {}", name_of(offer_.dtype));
    if (spec.out.at(0).data != data_) throw internal("Adasum works in place; its operand and result have two places");
    if (!spec.weights.empty() && spec.weights.size() != size())
      throw internal("Adasum over {} members has {} weights", size(), spec.weights.size());
    // A sum over all samples holds mine by their share; the gradient of my own mean does not.
    int64_t all = 0;
    for (const int64_t w : spec.weights) all += w;
    scale_ = spec.weights.empty()      ? static_cast<double>(size())
             : spec.weights[rank] == 0 ? 0
                                       : static_cast<double>(all) / static_cast<double>(spec.weights[rank]);
    if (size() > kMostMembers) throw unimplemented("Adasum over {} devices; at most {}", size(), kMostMembers);
  }

  bool run(Lookout* lookout) override {
    if (size() == 1 || offer_.elements == 0) return true;
    next_call();
    scale_all();
    if (!Member::begin(lookout)) return false;
    for (size_t m = 0; m < size(); ++m) peers_[m] = const_cast<char*>(offer_of(m).data);
    const size_t power = std::bit_floor(size());
    if (power < size() && !combine_pairs(power, 1, size() - power, lookout)) return false;
    for (size_t step = 1; step < power; step *= 2)
      if (!combine_pairs(step, 2 * step, power / (2 * step), lookout)) return false;
    spread();
    return end(lookout);
  }

 private:
  // A pair's products are kept in the slots of the members.
  static constexpr size_t kMostMembers = static_cast<size_t>(kSmallBytes) / sizeof(Products);

  int64_t slice(size_t member) const {
    return offer_.elements * static_cast<int64_t>(member) / static_cast<int64_t>(size());
  }

  // body(byte offset, elements) over blocks of [begin, end).
  template <class Body>
  void each_block(int64_t begin, int64_t end, Body body) const {
    for (int64_t at = begin; at < end; at += static_cast<int64_t>(kBlock))
      body(static_cast<size_t>(at) * bytes_, std::min(kBlock, static_cast<size_t>(end - at)));
  }
  void read(Values& to, const char* from, size_t n) {
    device_.copy_out(raw_, from, n * bytes_);
    for (size_t i = 0; i < n; ++i) to[i] = value(offer_.dtype, raw_, i);
  }
  void write(char* to, const Values& from, size_t n) {
    for (size_t i = 0; i < n; ++i) put(offer_.dtype, raw_, i, from[i]);
    device_.copy_in(to, raw_, n * bytes_);
  }

  void scale_all() {
    each_block(0, offer_.elements, [&](size_t at, size_t n) {
      read(a_, data_ + at, n);
      for (size_t i = 0; i < n; ++i) a_[i] *= scale_;
      write(data_ + at, a_, n);
    });
  }

  // Member k * stride takes in member k * stride + distance, for k < count: all pairs at once, each member its slice.
  bool combine_pairs(size_t distance, size_t stride, size_t count, Lookout* lookout) {
    const int64_t begin = slice(rank_), end = slice(rank_ + 1);
    next_call();
    for (size_t k = 0; k < count; ++k) {
      const char *a = peers_[k * stride], *b = peers_[k * stride + distance];
      Products p;
      each_block(begin, end, [&](size_t at, size_t n) {
        read(a_, a + at, n);
        read(b_, b + at, n);
        for (size_t i = 0; i < n; ++i) p.ab += a_[i] * b_[i], p.aa += a_[i] * a_[i], p.bb += b_[i] * b_[i];
      });
      std::memcpy(group_.slots[rank_].small[half_] + k * sizeof p, &p, sizeof p);
    }
    if (!Member::begin(lookout)) return false;
    for (size_t k = 0; k < count; ++k) {
      Products sum;
      for (size_t m = 0; m < size(); ++m) {
        Products p;
        std::memcpy(&p, group_.slots[m].small[half_] + k * sizeof p, sizeof p);
        sum.ab += p.ab, sum.aa += p.aa, sum.bb += p.bb;
      }
      const double fa = sum.aa == 0 ? 1 : 1 - sum.ab / (2 * sum.aa), fb = sum.bb == 0 ? 1 : 1 - sum.ab / (2 * sum.bb);
      char *a = peers_[k * stride], *b = peers_[k * stride + distance];
      each_block(begin, end, [&](size_t at, size_t n) {
        read(a_, a + at, n);
        read(b_, b + at, n);
        for (size_t i = 0; i < n; ++i) a_[i] = fa * a_[i] + fb * b_[i];
        write(a + at, a_, n);
      });
    }
    return true;
  }

  void spread() {
    const char* from = peers_[0];
    for (size_t m = 1; m < size(); ++m)
      each_block(slice(rank_), slice(rank_ + 1), [&](size_t at, size_t n) {
        device_.copy_out(raw_, from + at, n * bytes_);
        device_.copy_in(peers_[m] + at, raw_, n * bytes_);
      });
  }

  char* data_;
  std::vector<char*> peers_;  // data of the members
  size_t bytes_ = 4;
  double scale_ = 1;
  Values a_, b_;
  alignas(8) char raw_[kBlock * 8];
};

}  // namespace

std::unique_ptr<Collective> bind_adasum(GroupState& group, size_t rank, Device& device, const CollectiveSpec& spec) {
  return std::make_unique<Adasum>(group, rank, device, spec);
}

}  // namespace whale::inproc
