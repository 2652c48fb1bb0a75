#include "comm/adasum_tree.h"

#include <cstring>

#include "base/bf16.h"
#include "base/error.h"
#include "base/f16.h"

namespace whale {
namespace {

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

}  // namespace

AdasumTree::AdasumTree(const CollectiveSpec& spec, size_t members, size_t rank, Device& device)
    : device_(device),
      dtype_(spec.in.at(0).dtype),
      elements_(element_count(spec.in[0].dims)),
      members_(members),
      bytes_(static_cast<size_t>(size_of(dtype_))) {
  if (!is_float(dtype_)) throw internal("Adasum of {}", name_of(dtype_));
  if (spec.out.at(0).data != spec.in[0].data)
    throw internal("Adasum works in place; its operand and result have two places");
  if (!spec.weights.empty() && spec.weights.size() != members)
    throw internal("Adasum over {} members has {} weights", members, spec.weights.size());
  int64_t all = 0;
  for (const int64_t w : spec.weights) all += w;
  scale_ = spec.weights.empty()      ? static_cast<double>(members)
           : spec.weights[rank] == 0 ? 0
                                     : static_cast<double>(all) / static_cast<double>(spec.weights[rank]);
}

// body(byte offset, elements) over blocks of [begin, end).
template <class Body>
void AdasumTree::each_block(int64_t begin, int64_t end, Body body) const {
  for (int64_t at = begin; at < end; at += static_cast<int64_t>(kBlock))
    body(static_cast<size_t>(at) * bytes_, std::min(kBlock, static_cast<size_t>(end - at)));
}
void AdasumTree::read(Values& to, const char* from, size_t n) {
  device_.copy_out(raw_, from, n * bytes_);
  for (size_t i = 0; i < n; ++i) to[i] = value(dtype_, raw_, i);
}
void AdasumTree::write(char* to, const Values& from, size_t n) {
  for (size_t i = 0; i < n; ++i) put(dtype_, raw_, i, from[i]);
  device_.copy_in(to, raw_, n * bytes_);
}

void AdasumTree::scale(char* data) {
  each_block(0, elements_, [&](size_t at, size_t n) {
    read(a_, data + at, n);
    for (size_t i = 0; i < n; ++i) a_[i] *= scale_;
    write(data + at, a_, n);
  });
}

AdasumTree::Products AdasumTree::products(const char* a, const char* b, int64_t begin, int64_t end) {
  Products p;
  each_block(begin, end, [&](size_t at, size_t n) {
    read(a_, a + at, n);
    read(b_, b + at, n);
    for (size_t i = 0; i < n; ++i) p.ab += a_[i] * b_[i], p.aa += a_[i] * a_[i], p.bb += b_[i] * b_[i];
  });
  return p;
}

void AdasumTree::join(char* a, const char* b, const Products& sum, int64_t begin, int64_t end) {
  const double fa = sum.aa == 0 ? 1 : 1 - sum.ab / (2 * sum.aa), fb = sum.bb == 0 ? 1 : 1 - sum.ab / (2 * sum.bb);
  each_block(begin, end, [&](size_t at, size_t n) {
    read(a_, a + at, n);
    read(b_, b + at, n);
    for (size_t i = 0; i < n; ++i) a_[i] = fa * a_[i] + fb * b_[i];
    write(a + at, a_, n);
  });
}

void AdasumTree::copy(char* to, const char* from, int64_t begin, int64_t end) {
  each_block(begin, end, [&](size_t at, size_t n) {
    device_.copy_out(raw_, from + at, n * bytes_);
    device_.copy_in(to + at, raw_, n * bytes_);
  });
}

}  // namespace whale
