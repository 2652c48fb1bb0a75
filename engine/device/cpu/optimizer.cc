// Updates of parameters: one parallel region over all tuples of an op, cut into fixed chunks. State and arithmetic are
// float; other types are converted a tile at a time.
#include "device/cpu/update_rule.h"

#include <bit>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/optimizer.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

struct Vectors {
  V in[4], out[3];
};

template <Rule rule>
HWY_INLINE void update(Vectors& v, const UpdateNumbers& k) {
  const V p = v.in[0];
  if constexpr (rule == Rule::kLambApply) {
    v.out[0] = hn::NegMulAdd(splat(k.lr), v.in[1], p);
    return;
  }
  const bool couple = rule != Rule::kLambDirection && !k.decoupled;
  V g = hn::Mul(splat(k.clip), v.in[1]);
  if (couple) g = hn::MulAdd(splat(k.decay), p, g);
  if constexpr (rule == Rule::kSgd) {
    v.out[0] = hn::NegMulAdd(splat(k.lr), g, p);
  } else if constexpr (rule == Rule::kSgdMomentum) {
    const V m = hn::MulAdd(splat(k.momentum), v.in[2], g);
    v.out[0] = hn::NegMulAdd(splat(k.lr), k.nesterov ? hn::MulAdd(splat(k.momentum), m, g) : m, p);
    v.out[1] = m;
  } else if constexpr (rule == Rule::kAdagrad) {
    const V h = hn::MulAdd(g, g, v.in[2]);
    v.out[0] = hn::NegMulAdd(splat(k.lr), hn::Div(g, hn::Add(hn::Sqrt(h), splat(k.epsilon))), p);
    v.out[1] = h;
  } else {
    const V m = hn::MulAdd(splat(k.beta1), v.in[2], hn::Mul(splat(k.m_new), g));
    const V s = hn::MulAdd(splat(k.beta2), v.in[3], hn::Mul(hn::Mul(splat(k.v_new), g), g));
    V u = hn::Div(hn::Mul(m, splat(k.m_scale)), hn::Add(hn::Sqrt(hn::Mul(s, splat(k.v_scale))), splat(k.epsilon)));
    if (!couple) u = hn::MulAdd(splat(k.decay), p, u);
    v.out[0] = rule == Rule::kAdam ? hn::NegMulAdd(splat(k.lr), u, p) : u;
    v.out[1] = m;
    v.out[2] = s;
  }
}

template <Rule rule, int kIn, int kOut>
void update_tile(const UpdateTile& t, const UpdateNumbers& k) {
  Vectors v;
  int64_t i = 0;
  for (; i + kLanes <= t.n; i += kLanes) {
    for (int j = 0; j < kIn; ++j) v.in[j] = load(t.in[j] + i);
    update<rule>(v, k);
    for (int j = 0; j < kOut; ++j) store(v.out[j], t.out[j] + i);
  }
  if (i < t.n) {
    for (int j = 0; j < kIn; ++j) v.in[j] = load_n(t.in[j] + i, t.n - i);
    update<rule>(v, k);
    for (int j = 0; j < kOut; ++j) store_n(v.out[j], t.out[j] + i, t.n - i);
  }
}

void run_update(Rule rule, const UpdateTile& t, const UpdateNumbers& k) {
  switch (rule) {
    case Rule::kSgd: return update_tile<Rule::kSgd, 2, 1>(t, k);
    case Rule::kSgdMomentum: return update_tile<Rule::kSgdMomentum, 3, 2>(t, k);
    case Rule::kAdam: return update_tile<Rule::kAdam, 4, 3>(t, k);
    case Rule::kAdagrad: return update_tile<Rule::kAdagrad, 3, 2>(t, k);
    case Rule::kLambDirection: return update_tile<Rule::kLambDirection, 4, 3>(t, k);
    case Rule::kLambApply: return update_tile<Rule::kLambApply, 2, 1>(t, k);
  }
}

// The halves of fp32 numbers.
void join_halves(const uint16_t* high, const uint16_t* low, float* to, int64_t n) {
  const hn::Rebind<uint16_t, F32> half;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto h = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(half, high + i)));
    hn::StoreU(hn::BitCast(F32(), hn::Or(h, hn::PromoteTo(U32(), hn::LoadU(half, low + i)))), F32(), to + i);
  }
  for (; i < n; ++i) to[i] = std::bit_cast<float>(static_cast<uint32_t>(high[i]) << 16 | low[i]);
}
void split_halves(const float* from, uint16_t* high, uint16_t* low, int64_t n) {
  const hn::Rebind<uint16_t, F32> half;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto bits = hn::BitCast(U32(), hn::LoadU(F32(), from + i));
    hn::StoreU(hn::TruncateTo(half, hn::ShiftRight<16>(bits)), half, high + i);
    hn::StoreU(hn::TruncateTo(half, hn::And(bits, hn::Set(U32(), 0xFFFF))), half, low + i);
  }
  for (; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(from[i]);
    high[i] = static_cast<uint16_t>(bits >> 16), low[i] = static_cast<uint16_t>(bits);
  }
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cstring>
#include <limits>

#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

namespace whale::cpu {

HWY_EXPORT(run_update);
HWY_EXPORT(join_halves);
HWY_EXPORT(split_halves);

void update_tile(Rule rule, const UpdateTile& t, const UpdateNumbers& k) {
  HWY_DYNAMIC_DISPATCH(run_update)(rule, t, k);
}
void join_halves(const uint16_t* high, const uint16_t* low, float* to, int64_t n) {
  HWY_DYNAMIC_DISPATCH(join_halves)(high, low, to, n);
}
void split_halves(const float* from, uint16_t* high, uint16_t* low, int64_t n) {
  HWY_DYNAMIC_DISPATCH(split_halves)(from, high, low, n);
}

double scalar(const Operand& x, double otherwise) {
  if (!x.present()) return otherwise;
  if (x.dtype == DType::kI64) return static_cast<double>(*static_cast<const int64_t*>(x.data));
  float value;
  load_tile(x.dtype, x.data, 0, &value, 1);
  return value;
}

RuleSettings rule_settings(Rule rule, const Attrs& attrs) {
  RuleSettings s;
  UpdateNumbers& k = s.numbers;
  s.beta1 = attr_float(attrs, "beta1", 0.9), s.beta2 = attr_float(attrs, "beta2", 0.999);
  k.beta1 = static_cast<float>(s.beta1), k.beta2 = static_cast<float>(s.beta2);
  k.m_new = static_cast<float>(1 - s.beta1), k.v_new = static_cast<float>(1 - s.beta2);
  k.momentum = static_cast<float>(attr_float(attrs, "momentum"));
  k.epsilon = static_cast<float>(attr_float(attrs, "epsilon", rule == Rule::kAdagrad ? 1e-10 : 1e-8));
  k.nesterov = attr_bool(attrs, "nesterov"), k.decoupled = attr_bool(attrs, "decoupled");
  return s;
}

UpdateNumbers numbers_now(const RuleSettings& s, const Operand& lr, const Operand& updates, const Operand& scale) {
  UpdateNumbers now = s.numbers;
  now.lr = static_cast<float>(scalar(lr, 0));
  now.clip = static_cast<float>(scalar(scale, 1));
  const double t = scalar(updates, 0) + 1;
  now.m_scale = static_cast<float>(1 / (1 - std::pow(s.beta1, t)));
  now.v_scale = static_cast<float>(1 / (1 - std::pow(s.beta2, t)));
  return now;
}

namespace {

constexpr int64_t kChunk = 16384, kTile = 1024;

// How a rule's operands stand in the spec.
struct Form {
  Rule rule;
  int lr, updates, scale;  // positions; -1: the rule has none
  int first, width;        // of the tuples
  int read, written;       // operands that are whole tensors, results
};

struct Chunk {
  const Operand* tuple;  // `width` operands
  const Operand* result;
  double decay;
  int64_t at, n;
};

struct Update {
  Form form;
  std::vector<Operand> in, out;
  std::vector<Chunk> chunks;  // point into in and out
  RuleSettings settings;
};

// Elements [at, at + n) of one tuple, tile by tile.
void run_chunk(const Update& u, const Chunk& chunk, UpdateNumbers k) {
  const Form& form = u.form;
  k.decay = static_cast<float>(chunk.decay);
  if (form.rule == Rule::kLambApply) {
    const double pn = scalar(chunk.tuple[2], 0), un = scalar(chunk.tuple[3], 0);
    if (pn > 0 && un > 0) k.lr *= static_cast<float>(std::sqrt(pn) / std::sqrt(un));
  }
  alignas(64) float buffers[7][kTile];
  for (int64_t at = chunk.at; at < chunk.at + chunk.n; at += kTile) {
    UpdateTile t{};
    t.n = std::min(kTile, chunk.at + chunk.n - at);
    for (int j = 0; j < form.read; ++j) {
      const Operand& x = chunk.tuple[j];
      if (x.dtype == DType::kF32) {
        t.in[j] = static_cast<const float*>(x.data) + at;
      } else {
        load_tile(x.dtype, x.data, at, buffers[j], t.n);
        t.in[j] = buffers[j];
      }
    }
    for (int j = 0; j < form.written; ++j) {
      const Operand& y = chunk.result[j];
      t.out[j] = y.dtype == DType::kF32 ? static_cast<float*>(y.data) + at : buffers[4 + j];
    }
    update_tile(form.rule, t, k);
    for (int j = 0; j < form.written; ++j) {
      const Operand& y = chunk.result[j];
      if (y.dtype != DType::kF32) store_tile(y.dtype, t.out[j], y.data, at, t.n);
    }
  }
}

// A scale that is NaN: results, which lie on their operands, stay; a direction is zero.
void skip(const Update& u) {
  if (u.form.rule != Rule::kLambDirection) return;
  for (size_t i = 0; i < u.out.size(); i += static_cast<size_t>(u.form.written))
    std::memset(u.out[i].data, 0, static_cast<size_t>(count(u.out[i]) * size_of(u.out[i].dtype)));
}

std::unique_ptr<Kernel> bind_update(const KernelSpec& spec, CpuDevice& device, const Form& form) {
  auto u = std::make_shared<Update>();
  u->form = form;
  u->in = spec.in;
  u->out = spec.out;
  const Attrs& attrs = *spec.attrs;
  u->settings = rule_settings(form.rule, attrs);
  const double decay = attr_float(attrs, "weight_decay");
  const Ints& decays = attr_ints(attrs, "decays");
  const auto first = static_cast<size_t>(form.first), width = static_cast<size_t>(form.width);
  if (u->in.size() < first || (u->in.size() - first) % width != 0)
    throw internal("op '{}' has {} operands, which are not tuples of {}", spec.name, u->in.size(), width);
  for (size_t t = 0; first + t * width < u->in.size(); ++t) {
    const Operand* tuple = &u->in[first + t * width];
    const Operand* result = &u->out[t * static_cast<size_t>(form.written)];
    const double wd = t < decays.size() && decays[t] == 0 ? 0 : decay;
    for (int64_t at = 0; at < count(tuple[0]); at += kChunk)
      u->chunks.push_back({tuple, result, wd, at, std::min(kChunk, count(tuple[0]) - at)});
  }
  return make_kernel(0, [u, threads = device.threads()](char*) {
    const auto operand = [&](int i) { return i < 0 ? Operand{} : u->in[i]; };
    const UpdateNumbers now =
        numbers_now(u->settings, operand(u->form.lr), operand(u->form.updates), operand(u->form.scale));
    if (std::isnan(now.clip)) return skip(*u);
    parallel_for(threads, static_cast<int64_t>(u->chunks.size()), 1, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) run_chunk(*u, u->chunks[i], now);
    });
  });
}

std::unique_ptr<Kernel> bind_sgd(const KernelSpec& spec, CpuDevice& device) {
  if (attr_float(*spec.attrs, "momentum") != 0)
    return bind_update(spec, device, {Rule::kSgdMomentum, 0, -1, 1, 2, 3, 3, 2});
  return bind_update(spec, device, {Rule::kSgd, 0, -1, 1, 2, 2, 2, 1});
}
std::unique_ptr<Kernel> bind_adam(const KernelSpec& spec, CpuDevice& device) {
  return bind_update(spec, device, {Rule::kAdam, 0, 1, 2, 3, 4, 4, 3});
}
std::unique_ptr<Kernel> bind_adagrad(const KernelSpec& spec, CpuDevice& device) {
  return bind_update(spec, device, {Rule::kAdagrad, 0, -1, 1, 2, 3, 3, 2});
}
std::unique_ptr<Kernel> bind_lamb_direction(const KernelSpec& spec, CpuDevice& device) {
  return bind_update(spec, device, {Rule::kLambDirection, -1, 0, 1, 2, 4, 4, 3});
}
std::unique_ptr<Kernel> bind_lamb_apply(const KernelSpec& spec, CpuDevice& device) {
  return bind_update(spec, device, {Rule::kLambApply, 0, -1, -1, 1, 4, 2, 1});
}

std::unique_ptr<Kernel> bind_clip_factor(const KernelSpec& spec, CpuDevice&) {
  const double max_norm = attr_float(*spec.attrs, "max_norm");
  return make_kernel(0, [sums = spec.in, y = spec.out[0], max_norm](char*) {
    double sum = 0;
    for (const Operand& x : sums) sum += scalar(x, 0);
    const auto factor = static_cast<float>(std::min(1.0, max_norm / (std::sqrt(sum) + 1e-6)));
    store_tile(y.dtype, &factor, y.data, 0, 1);
  });
}

// Divides by a power of two, so that nothing but the factor changes.
std::unique_ptr<Kernel> bind_unscale(const KernelSpec& spec, CpuDevice& device) {
  const int64_t chunks = (count(spec.in[0]) + kChunk - 1) / kChunk;
  auto bad = std::make_shared<std::vector<char>>(static_cast<size_t>(chunks));
  return make_kernel(0, [x = spec.in[0], scale = spec.in[1], y = spec.out[0], overflow = spec.out[1], bad, chunks,
                         threads = device.threads()](char*) {
    const auto factor = static_cast<float>(1 / scalar(scale, 1));
    parallel_for(threads, chunks, 1, [&](int64_t b, int64_t e) {
      alignas(64) float room[kTile];
      for (int64_t c = b; c < e; ++c) {
        const int64_t end = std::min(count(x), (c + 1) * kChunk);
        float sum = 0;  // of zeros, or NaN
        for (int64_t at = c * kChunk; at < end; at += kTile) {
          const int64_t n = std::min(kTile, end - at);
          const float* from = static_cast<const float*>(x.data) + at;
          if (x.dtype != DType::kF32) load_tile(x.dtype, x.data, at, room, n), from = room;
          float* to = static_cast<float*>(y.data) + at;
          for (int64_t i = 0; i < n; ++i) {
            to[i] = from[i] * factor;
            sum += to[i] * 0;
          }
        }
        (*bad)[c] = sum != 0;
      }
    });
    const bool any = std::any_of(bad->begin(), bad->end(), [](char b) { return b != 0; });
    *static_cast<float*>(overflow.data) = any ? std::numeric_limits<float>::infinity() : 0;
  });
}

std::unique_ptr<Kernel> bind_overflow(const KernelSpec& spec, CpuDevice&) {
  return make_kernel(0, [all = spec.in, y = spec.out[0]](char*) {
    const bool finite =
        std::all_of(all.begin(), all.end(), [](const Operand& x) { return std::isfinite(scalar(x, 0)); });
    *static_cast<float*>(y.data) = finite ? 1 : std::numeric_limits<float>::quiet_NaN();
  });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_sgd, bind_sgd, nullptr},
    {OpCode::k_adam, bind_adam, nullptr},
    {OpCode::k_adagrad, bind_adagrad, nullptr},
    {OpCode::k_lamb_direction, bind_lamb_direction, nullptr},
    {OpCode::k_lamb_apply, bind_lamb_apply, nullptr},
    {OpCode::k_clip_factor, bind_clip_factor, nullptr},
    {OpCode::k_unscale, bind_unscale, nullptr},
    {OpCode::k_overflow, bind_overflow, nullptr},
};

}  // namespace

std::span<const KernelEntry> optimizer_kernels() { return kTable; }

}  // namespace whale::cpu
#endif
