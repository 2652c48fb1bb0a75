// The scores of a block are kept transposed, [key, query]: a vector holds 16 queries, so that maxima, sums and masks
// need no operation across lanes, and K and V are read where they lie.
#include "device/cpu/attention.h"
#include "device/cpu/tile.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/attention_blocks.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/block_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

inline constexpr int64_t kQ = AttentionArgs::kQueries, kK = AttentionArgs::kKeys;
HWY_INLINE int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }
HWY_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
HWY_INLINE int64_t clamped(int64_t x, int64_t high) { return x < 0 ? 0 : x > high ? high : x; }

struct Rows {
  const float* p;
  int64_t stride;
};

// n rows of one head as float, width padded with zeros: in place when it is that already.
inline Rows rows_of(const HeadsView& x, int64_t b, int64_t t, int64_t h, int64_t n, float* scratch) {
  if (x.dtype == DType::kF32 && x.width % 16 == 0) return {reinterpret_cast<const float*>(x.at(b, t, h)), x.time};
  const int64_t stride = padded(x.width);
  for (int64_t i = 0; i < n; ++i) {
    load_tile(x.dtype, x.at(b, t + i, h), 0, scratch + i * stride, x.width);
    std::memset(scratch + i * stride + x.width, 0, static_cast<size_t>(stride - x.width) * 4);
  }
  return {scratch, stride};
}

// Transposed to [width, kQ]; columns past n are 0.
inline void transpose_rows(const Rows& x, int64_t n, int64_t width, float scale, float* to) {
  transpose_block(x.p, x.stride, n, width, to, kQ, scale);
  if (n < kQ)
    for (int64_t c = 0; c < width; ++c) std::memset(to + c * kQ + n, 0, static_cast<size_t>(kQ - n) * 4);
}

// [width, kQ] back to n rows of a head.
inline void store_transposed(const float* from, const HeadsView& y, int64_t b, int64_t t, int64_t h, int64_t n,
                             float* scratch) {
  if (y.dtype == DType::kF32) {
    transpose_block(from, kQ, y.width, n, reinterpret_cast<float*>(y.at(b, t, h)), y.time, 1);
    return;
  }
  const int64_t stride = padded(y.width);
  transpose_block(from, kQ, y.width, n, scratch, stride, 1);
  for (int64_t i = 0; i < n; ++i) store_tile(y.dtype, scratch + i * stride, y.at(b, t + i, h), 0, y.width);
}

// Where a block lies.
struct Block {
  int64_t b, h, q0, nq, k0, nk;
  int64_t skew(const AttentionArgs& a) const {
    return k0 - a.shift - q0;
  }  // causal: key i is seen by queries from skew + i on
};

// bias of the block as [key, query]; 0 past the queries.
inline void load_bias(const AttentionArgs& a, const Block& at, float* row, float* to) {
  for (int64_t j = 0; j < kQ; ++j) {
    if (j < at.nq) {
      const int64_t first = at.b * a.bias_batch + at.h * a.bias_head + (at.q0 + j) * a.all_keys + a.key_begin + at.k0;
      load_tile(a.bias_dtype, a.bias, first, row, at.nk);
    } else {
      std::memset(row, 0, static_cast<size_t>(at.nk) * 4);
    }
    for (int64_t i = 0; i < at.nk; ++i) to[i * kQ + j] = row[i];
  }
}

// What dropout multiplies the block's probabilities with, as [key, query].
inline void load_keep(const AttentionArgs& a, const Block& at, float* row, float* to) {
  auto* words = reinterpret_cast<uint32_t*>(row);
  const uint32_t threshold = drop_threshold(a.rate);
  const auto kept = static_cast<float>(1 / (1 - a.rate));
  for (int64_t j = 0; j < at.nq; ++j) {
    random_words(a.stream, a.random_row(at.b, at.h, at.q0 + j) + static_cast<uint64_t>(at.k0), words, at.nk);
    for (int64_t i = 0; i < at.nk; ++i) to[i * kQ + j] = words[i] >= threshold ? kept : 0.0f;
  }
  for (int64_t j = at.nq; j < kQ; ++j)
    for (int64_t i = 0; i < at.nk; ++i) to[i * kQ + j] = 0;
}

// For the queries of lane group g: keys [0, full) are seen by all lanes, [full, end) by some, the rest by none.
struct Visible {
  int64_t full, end;
};
HWY_INLINE Visible visible(const AttentionArgs& a, const Block& at, int64_t lane) {
  if (!a.causal) return {at.nk, at.nk};
  const int64_t skew = at.skew(a);
  return {clamped(lane - skew + 1, at.nk), clamped(lane + kLanes - skew, at.nk)};
}
HWY_INLINE hn::Mask<F32> seen(const Block& at, const AttentionArgs& a, int64_t lane, int64_t key) {
  return hn::Ge(hn::Iota(F32(), static_cast<float>(lane)), splat(static_cast<float>(at.skew(a) + key)));
}

// Turns scores into exp(score - maximum), rescaling what was summed before: the running softmax.
inline void softmax_block(const AttentionArgs& a, const Block& at, const float* bias, const float* keep, float* s,
                          float* top, float* sum, float* out, bool first) {
  for (int64_t lane = 0; lane < kQ; lane += kLanes) {
    const Visible see = visible(a, at, lane);
    V high = splat(-HUGE_VALF);
    for (int64_t i = 0; i < see.end; ++i) {
      V x = load(s + i * kQ + lane);
      if (bias) x = hn::Add(x, load(bias + i * kQ + lane));
      if (i >= see.full) x = hn::IfThenElse(seen(at, a, lane, i), x, splat(-HUGE_VALF));
      if (bias || i >= see.full) store(x, s + i * kQ + lane);
      high = hn::Max(high, x);  // may miss a NaN: the sum does not
    }
    const V old = load(top + lane);
    const V now = hn::Max(old, high);
    const V base = hn::IfThenElse(hn::Eq(now, splat(-HUGE_VALF)), zero(), now);
    V total = zero();
    for (int64_t i = 0; i < see.end; ++i) {
      const V p = exp_fast(hn::Sub(load(s + i * kQ + lane), base));
      total = hn::Add(total, p);
      store(keep ? hn::Mul(p, load(keep + i * kQ + lane)) : p, s + i * kQ + lane);
    }
    for (int64_t i = see.end; i < at.nk; ++i) store(zero(), s + i * kQ + lane);
    const V factor = exp_fast(hn::Sub(old, base));  // 0 at the first block
    store(hn::MulAdd(load(sum + lane), factor, total), sum + lane);
    store(now, top + lane);
    if (first || hn::AllTrue(F32(), hn::Eq(factor, splat(1)))) continue;
    for (int64_t c = 0; c < a.dv_width; ++c) store(hn::Mul(load(out + c * kQ + lane), factor), out + c * kQ + lane);
  }
}

HWY_INLINE int64_t keys_of(const AttentionArgs& a, int64_t last_query) {
  return a.causal ? clamped(last_query + a.shift + 1, a.tk) : a.tk;
}

void attention_block(const AttentionArgs& a, int64_t b, int64_t h, int64_t block, float* scratch) {
  float* const query = scratch;                      // [d, kQ], scaled
  float* const scores = query + padded(a.d) * kQ;    // [kK, kQ]
  float* const out = scores + kK * kQ;               // [dv, kQ]
  float* const top = out + padded(a.dv_width) * kQ;  // [kQ]
  float* const sum = top + kQ;
  float* const row = sum + kQ;                                  // [kK]
  float* const bias = row + kK;                                 // [kK, kQ]
  float* const keep = bias + (a.bias ? kK * kQ : 0);            // [kK, kQ]
  float* const block_rows = keep + (a.rate > 0 ? kK * kQ : 0);  // [kK, max(d, dv)]
  Block at{b, h, block * kQ, smaller(kQ, a.tq - block * kQ), 0, 0};
  const int64_t kv = h / (a.heads / a.kv_heads), keys = keys_of(a, at.q0 + at.nq - 1);
  transpose_rows(rows_of(a.q, b, at.q0, h, at.nq, block_rows), at.nq, a.d, a.scale, query);
  for (int64_t j = 0; j < kQ; ++j) top[j] = -HUGE_VALF, sum[j] = 0;
  if (keys == 0) std::memset(out, 0, static_cast<size_t>(a.dv_width * kQ) * 4);
  for (at.k0 = 0; at.k0 < keys; at.k0 += kK) {
    at.nk = smaller(kK, keys - at.k0);
    const bool first = at.k0 == 0;
    const Rows k = rows_of(a.k, b, at.k0, kv, at.nk, block_rows);
    const int64_t skew = at.skew(a);
    block_gemm(at.nk, kQ, a.d, {k.p, k.stride, 1}, {query, kQ}, scores, kQ, false,
               a.causal ? Skip::kColumns : Skip::kNothing, skew);
    if (a.bias) load_bias(a, at, row, bias);
    if (a.rate > 0) load_keep(a, at, row, keep);
    softmax_block(a, at, a.bias ? bias : nullptr, a.rate > 0 ? keep : nullptr, scores, top, sum, out, first);
    const Rows v = rows_of(a.v, b, at.k0, kv, at.nk, block_rows);
    block_gemm(a.dv_width, kQ, at.nk, {v.p, 1, v.stride}, {scores, kQ}, out, kQ, !first);
  }
  for (int64_t lane = 0; lane < kQ; lane += kLanes) {
    const V total = load(sum + lane);
    const V inverse = hn::IfThenElseZero(differ(total, zero()), hn::Div(splat(1), total));
    for (int64_t c = 0; c < a.dv_width; ++c) store(hn::Mul(load(out + c * kQ + lane), inverse), out + c * kQ + lane);
    store(hn::Add(load(top + lane), log(total)), sum + lane);  // -inf without keys
  }
  if (a.lse) std::memcpy(a.lse + (b * a.heads + h) * a.tq + at.q0, sum, static_cast<size_t>(at.nq) * 4);
  store_transposed(out, a.out, b, at.q0, h, at.nq, block_rows);
}

// From scores and dP to P (with dropout) and dS.
inline void gradient_block(const AttentionArgs& a, const Block& at, const float* bias, const float* keep,
                           const float* lse, const float* delta, float* s, float* dp) {
  for (int64_t lane = 0; lane < kQ; lane += kLanes) {
    const Visible see = visible(a, at, lane);
    const V base = load(lse + lane), shift = load(delta + lane), scale = splat(a.dbias ? 1 : a.scale);
    for (int64_t i = 0; i < see.end; ++i) {
      V x = load(s + i * kQ + lane);
      if (bias) x = hn::Add(x, load(bias + i * kQ + lane));
      V p = exp_fast(hn::Sub(x, base));
      V g = load(dp + i * kQ + lane);
      if (i >= see.full) {
        const auto m = seen(at, a, lane, i);
        p = hn::IfThenElseZero(m, p);
        g = hn::IfThenElseZero(m, g);
      }
      V dropped = p;
      if (keep) {
        const V z = load(keep + i * kQ + lane);
        dropped = hn::Mul(p, z);
        g = hn::Mul(g, z);
      }
      store(dropped, s + i * kQ + lane);
      store(hn::Mul(hn::Mul(p, scale), hn::Sub(g, shift)), dp + i * kQ + lane);
    }
    for (int64_t i = see.end; i < at.nk; ++i) store(zero(), s + i * kQ + lane), store(zero(), dp + i * kQ + lane);
  }
}

// delta = rowsum(dout * out); lse made safe for rows without keys and past the end.
inline void load_statistics(const AttentionArgs& a, const Block& at, const Rows& dout, float* scratch, float* lse,
                            float* delta) {
  const Rows out = rows_of(a.out, at.b, at.q0, at.h, at.nq, scratch);
  const int64_t width = padded(a.dv_width);
  for (int64_t j = 0; j < kQ; ++j) {
    lse[j] = HUGE_VALF, delta[j] = 0;
    if (j >= at.nq) continue;
    V sum = zero();
    for (int64_t c = 0; c < width; c += kLanes)
      sum = hn::MulAdd(load(out.p + j * out.stride + c), load(dout.p + j * dout.stride + c), sum);
    delta[j] = sum_lanes(sum);
    const float x = a.lse[(at.b * a.heads + at.h) * a.tq + at.q0 + j];
    lse[j] = x == -HUGE_VALF ? HUGE_VALF : x;
  }
}

inline void add_bias_gradient(const AttentionArgs& a, const Block& at, float* ds) {
  for (int64_t j = 0; j < at.nq; ++j) {
    float* to = a.dbias + at.b * a.bias_batch + at.h * a.bias_head + (at.q0 + j) * a.all_keys + a.key_begin + at.k0;
    for (int64_t i = 0; i < at.nk; ++i) to[i] += ds[i * kQ + j];
  }
  for (int64_t i = 0; i < at.nk * kQ; ++i) ds[i] *= a.scale;
}

inline void store_rows(const float* from, int64_t stride, const HeadsView& y, int64_t b, int64_t h, int64_t n) {
  for (int64_t i = 0; i < n; ++i) store_tile(y.dtype, from + i * stride, y.at(b, i, h), 0, y.width);
}

void attention_grad_head(const AttentionArgs& a, int64_t b, int64_t kv, float* scratch) {
  const int64_t d = padded(a.d), w = padded(a.dv_width), wide = d > w ? d : w;
  float* const dk = scratch;           // [tk, d]
  float* const dv = dk + a.tk * d;     // [tk, dv]
  float* const query = dv + a.tk * w;  // [d, kQ], scaled
  float* const dout = query + d * kQ;  // [dv, kQ]
  float* const dq = dout + w * kQ;     // [d, kQ]
  float* const scores = dq + d * kQ;   // [kK, kQ], then P
  float* const dp = scores + kK * kQ;  // [kK, kQ], then dS
  float* const lse = dp + kK * kQ;
  float* const delta = lse + kQ;
  float* const row = delta + kQ;
  float* const q_rows = row + kK;  // four blocks of rows
  float* const dout_rows = q_rows + wide * kQ;
  float* const k_rows = dout_rows + wide * kQ;
  float* const v_rows = k_rows + wide * kQ;
  float* const bias = v_rows + wide * kQ;
  float* const keep = bias + (a.bias ? kK * kQ : 0);
  std::memset(dk, 0, static_cast<size_t>(a.tk * (d + w)) * 4);
  const int64_t group = a.heads / a.kv_heads;
  const Skip columns = a.causal ? Skip::kColumns : Skip::kNothing, depth = a.causal ? Skip::kDepth : Skip::kNothing;
  for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
    for (int64_t q0 = 0; q0 < a.tq; q0 += kQ) {
      Block at{b, h, q0, smaller(kQ, a.tq - q0), 0, 0};
      const int64_t keys = keys_of(a, q0 + at.nq - 1);
      const Rows q = rows_of(a.q, b, q0, h, at.nq, q_rows), g = rows_of(a.dout, b, q0, h, at.nq, dout_rows);
      load_statistics(a, at, g, k_rows, lse, delta);
      transpose_rows(q, at.nq, a.d, a.scale, query);
      transpose_rows(g, at.nq, a.dv_width, 1, dout);
      if (keys == 0) std::memset(dq, 0, static_cast<size_t>(d * kQ) * 4);
      for (at.k0 = 0; at.k0 < keys; at.k0 += kK) {
        at.nk = smaller(kK, keys - at.k0);
        const int64_t skew = at.skew(a);
        const Rows k = rows_of(a.k, b, at.k0, kv, at.nk, k_rows), v = rows_of(a.v, b, at.k0, kv, at.nk, v_rows);
        block_gemm(at.nk, kQ, a.d, {k.p, k.stride, 1}, {query, kQ}, scores, kQ, false, columns, skew);
        block_gemm(at.nk, kQ, a.dv_width, {v.p, v.stride, 1}, {dout, kQ}, dp, kQ, false, columns, skew);
        if (a.bias) load_bias(a, at, row, bias);
        if (a.rate > 0) load_keep(a, at, row, keep);
        gradient_block(a, at, a.bias ? bias : nullptr, a.rate > 0 ? keep : nullptr, lse, delta, scores, dp);
        if (a.dbias) add_bias_gradient(a, at, dp);
        block_gemm(at.nk, w, at.nq, {scores, kQ, 1}, {g.p, g.stride}, dv + at.k0 * w, w, true, depth, skew);
        block_gemm(at.nk, d, at.nq, {dp, kQ, 1}, {q.p, q.stride}, dk + at.k0 * d, d, true, depth, skew);
        block_gemm(a.d, kQ, at.nk, {k.p, 1, k.stride}, {dp, kQ}, dq, kQ, at.k0 != 0);
      }
      store_transposed(dq, a.dq, b, q0, h, at.nq, q_rows);
    }
  }
  store_rows(dk, d, a.dk, b, kv, a.tk);
  store_rows(dv, w, a.dv, b, kv, a.tk);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whale::cpu {

HWY_EXPORT(attention_block);
HWY_EXPORT(attention_grad_head);

namespace {
constexpr int64_t kQ = AttentionArgs::kQueries, kK = AttentionArgs::kKeys;
int64_t padded(int64_t width) { return (width + 15) / 16 * 16; }
int64_t extras(const AttentionArgs& a) { return (a.bias ? kK * kQ : 0) + (a.rate > 0 ? kK * kQ : 0) + 2 * kQ + kK; }
}  // namespace

size_t attention_scratch(const AttentionArgs& a) {
  const int64_t d = padded(a.d), w = padded(a.dv_width);
  return static_cast<size_t>((d + w) * kQ + kK * kQ + extras(a) + std::max(d, w) * kQ);
}
size_t attention_grad_scratch(const AttentionArgs& a) {
  const int64_t d = padded(a.d), w = padded(a.dv_width);
  return static_cast<size_t>(a.tk * (d + w) + (2 * d + w) * kQ + 2 * kK * kQ + extras(a) + 4 * std::max(d, w) * kQ);
}

void run_attention(const AttentionArgs& args, int64_t b, int64_t h, int64_t block, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attention_block)(args, b, h, block, scratch);
}
void run_attention_grad(const AttentionArgs& args, int64_t b, int64_t kv_head, float* scratch) {
  HWY_DYNAMIC_DISPATCH(attention_grad_head)(args, b, kv_head, scratch);
}

}  // namespace whale::cpu
#endif
