// Mixture of experts: routing group by group, and rows between tokens and experts' places. Every element is made by one
// thread in a fixed order.
#include "ops/moe.h"

#include <cstring>
#include <limits>

#include "device/cpu/bf16.h"
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"
#include "device/expert_begin.h"

namespace whale::cpu {
namespace {

// ---- routing ----------------------------------------------------------------------------------------------------
struct Router {
  int64_t groups, tokens, experts, k, capacity;
  bool normalize;
  TileFunction exp = tile_function(OpCode::k_exp);
  explicit Router(const KernelSpec& spec)
      : groups(spec.in[0].dims[0]),
        tokens(spec.in[0].dims[1]),
        experts(spec.in[0].dims[2]),
        k(attr_int(*spec.attrs, "k", 1)),
        capacity(moe_capacity(*spec.attrs, tokens, experts)),
        normalize(attr_bool(*spec.attrs, "normalize")) {}
  double work() const { return 8 * static_cast<double>(groups) * static_cast<double>(tokens * experts); }

  void softmax(const float* logits, float* p) const {
    float top = -std::numeric_limits<float>::infinity(), sum = 0;
    for (int64_t e = 0; e < experts; ++e) top = std::max(top, logits[e]);
    for (int64_t e = 0; e < experts; ++e) p[e] = logits[e] - top;
    exp(p, nullptr, nullptr, p, experts);
    for (int64_t e = 0; e < experts; ++e) sum += p[e];
    for (int64_t e = 0; e < experts; ++e) p[e] /= sum;
  }
  // Descending, ties to the lowest index.
  void choose(const float* logits, int32_t* chosen) const {
    for (int64_t j = 0; j < k; ++j) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        if (best >= 0 && !(logits[e] > logits[best])) continue;
        if (std::find(chosen, chosen + j, static_cast<int32_t>(e)) == chosen + j) best = e;
      }
      chosen[j] = static_cast<int32_t>(best);
    }
  }
  float divisor(const float* p, const int32_t* chosen) const {
    if (!normalize) return 1;
    float sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += p[chosen[j]];
    return sum;
  }
};

// What one thread needs, in the scratch area.
struct RouterRoom {
  double* mean;
  float *logits, *p, *dp;
  int32_t *first, *taken, *chosen;
  static int64_t bytes(const Router& r) { return round_up(r.experts * (8 + 3 * 4 + 2 * 4) + r.k * 4, 64); }
  RouterRoom(char* at, const Router& r) {
    mean = reinterpret_cast<double*>(at);
    logits = reinterpret_cast<float*>(mean + r.experts);
    p = logits + r.experts;
    dp = p + r.experts;
    first = reinterpret_cast<int32_t*>(dp + r.experts);
    taken = first + r.experts;
    chosen = taken + r.experts;
  }
};

template <class F>
std::unique_ptr<Kernel> group_by_group(const Router& r, CpuDevice& device, F f) {
  const int threads = threads_for(device, r.work());
  const int64_t each = RouterRoom::bytes(r);
  return make_kernel(static_cast<size_t>(each * threads), [=](char* scratch) {
    parallel_tasks(threads, r.groups, [&](int64_t g, int thread) { f(r, RouterRoom(scratch + each * thread, r), g); });
  });
}

std::unique_ptr<Kernel> bind_gate(const KernelSpec& spec, CpuDevice& device) {
  const Operand logits = spec.in[0];
  auto* slot = static_cast<int32_t*>(spec.out[0].data);
  auto* weight = static_cast<float*>(spec.out[1].data);
  auto* aux = static_cast<float*>(spec.out[2].data);
  auto* dropped = static_cast<int32_t*>(spec.out[3].data);
  return group_by_group(Router(spec), device, [=](const Router& r, const RouterRoom& room, int64_t g) {
    std::fill(room.mean, room.mean + r.experts, 0.0);
    std::fill(room.first, room.first + r.experts, 0);
    std::fill(room.taken, room.taken + r.experts, 0);
    for (int64_t t = g * r.tokens; t < (g + 1) * r.tokens; ++t) {
      load_tile(logits.dtype, logits.data, t * r.experts, room.logits, r.experts);
      r.softmax(room.logits, room.p);
      int32_t* chosen = slot + t * r.k;  // experts first, slots once all tokens have chosen
      r.choose(room.logits, chosen);
      const float divisor = r.divisor(room.p, chosen);
      for (int64_t e = 0; e < r.experts; ++e) room.mean[e] += room.p[e];
      ++room.first[chosen[0]];
      for (int64_t j = 0; j < r.k; ++j) weight[t * r.k + j] = room.p[chosen[j]] / divisor;
    }
    int32_t full = 0;
    for (int64_t j = 0; j < r.k; ++j) {
      for (int64_t t = g * r.tokens; t < (g + 1) * r.tokens; ++t) {
        int32_t& at = slot[t * r.k + j];
        const int32_t place = room.taken[at]++;
        const bool fits = place < r.capacity;
        at = fits ? static_cast<int32_t>(at * r.capacity + place) : -1;
        if (!fits) weight[t * r.k + j] = 0, ++full;
      }
    }
    double balance = 0;
    for (int64_t e = 0; e < r.experts; ++e) balance += room.first[e] * room.mean[e];
    const auto tokens = static_cast<double>(r.tokens);
    aux[g] = static_cast<float>(static_cast<double>(r.experts) * balance / (tokens * tokens));
    dropped[g] = full;
  });
}

std::unique_ptr<Kernel> bind_gate_grad(const KernelSpec& spec, CpuDevice& device) {
  const Operand logits = spec.in[0], dlogits = spec.out[0];
  const auto* slot = static_cast<const int32_t*>(spec.in[1].data);
  const auto* dweight = has(spec.in, 2) ? static_cast<const float*>(spec.in[2].data) : nullptr;
  const auto* daux = has(spec.in, 3) ? static_cast<const float*>(spec.in[3].data) : nullptr;
  return group_by_group(Router(spec), device, [=](const Router& r, const RouterRoom& room, int64_t g) {
    std::fill(room.first, room.first + r.experts, 0);
    for (int64_t t = g * r.tokens; daux && t < (g + 1) * r.tokens; ++t) {
      load_tile(logits.dtype, logits.data, t * r.experts, room.logits, r.experts);
      r.choose(room.logits, room.chosen);
      ++room.first[room.chosen[0]];
    }
    const auto tokens = static_cast<double>(r.tokens);
    const double scale = daux ? daux[g] * static_cast<double>(r.experts) / (tokens * tokens) : 0;
    for (int64_t t = g * r.tokens; t < (g + 1) * r.tokens; ++t) {
      load_tile(logits.dtype, logits.data, t * r.experts, room.logits, r.experts);
      r.softmax(room.logits, room.p);
      r.choose(room.logits, room.chosen);
      for (int64_t e = 0; e < r.experts; ++e) room.dp[e] = static_cast<float>(scale * room.first[e]);
      const auto given = [&](int64_t j) { return dweight && slot[t * r.k + j] >= 0 ? dweight[t * r.k + j] : 0; };
      const float divisor = r.divisor(room.p, room.chosen);
      float shared = 0;  // what raising the divisor costs
      for (int64_t j = 0; r.normalize && j < r.k; ++j) shared += given(j) * (room.p[room.chosen[j]] / divisor);
      for (int64_t j = 0; j < r.k; ++j) room.dp[room.chosen[j]] += (given(j) - shared) / divisor;
      float inner = 0;
      for (int64_t e = 0; e < r.experts; ++e) inner += room.p[e] * room.dp[e];
      for (int64_t e = 0; e < r.experts; ++e) room.dp[e] = room.p[e] * (room.dp[e] - inner);
      store_tile(dlogits.dtype, room.dp, dlogits.data, t * r.experts, r.experts);
    }
  });
}

// ---- rows -------------------------------------------------------------------------------------------------------
#define WHALE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WHALE_ROW_FUNCTIONS(T)                                                                    \
  WHALE_CLONES void scale_row(const T* x, float w, T* y, int64_t n) {                             \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(w * to_float(x[i])); \
  }                                                                                               \
  WHALE_CLONES void add_row(const T* x, float w, float* y, int64_t n) {                           \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) y[i] += w * to_float(x[i]);               \
  }                                                                                               \
  WHALE_CLONES void store_row(const float* x, T* y, int64_t n) {                                  \
    _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(x[i]);               \
  }                                                                                               \
  WHALE_CLONES float dot_rows(const T* x, const T* y, int64_t n) {                                \
    float sum[16] = {};                                                                           \
    int64_t i = 0;                                                                                \
    for (; i + 16 <= n; i += 16)                                                                  \
      for (int64_t j = 0; j < 16; ++j) sum[j] += to_float(x[i + j]) * to_float(y[i + j]);         \
    for (; i < n; ++i) sum[i % 16] += to_float(x[i]) * to_float(y[i]);                            \
    for (int64_t j = 8; j > 0; j /= 2)                                                            \
      for (int64_t l = 0; l < j; ++l) sum[l] += sum[l + j];                                       \
    return sum[0];                                                                                \
  }
WHALE_ROW_FUNCTIONS(float)
WHALE_ROW_FUNCTIONS(Bf16)

struct Places {
  int64_t experts, groups, capacity, width, begin, tokens, k;
  Places(const KernelSpec& spec, const Dims& places, const Dims& slots)
      : experts(places[0]),
        groups(places[1]),
        capacity(places[2]),
        width(places[3]),
        begin(expert_begin(spec)),
        tokens(slots[1]),
        k(slots[2]) {}
  // Row of the places that slot `slot` of group g is; -1: none, or another device's.
  int64_t row(int32_t slot, int64_t g) const {
    const int64_t expert = slot < 0 ? -1 : slot / capacity - begin;
    if (expert < 0 || expert >= experts) return -1;
    return (expert * groups + g) * capacity + slot % capacity;
  }
  int64_t least() const { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)); }
};

float weight_at(const Operand& w, int64_t i) {
  if (!w.present()) return 1;
  return w.dtype == DType::kF32 ? static_cast<const float*>(w.data)[i]
                                : bf16_to_float(static_cast<const uint16_t*>(w.data)[i]);
}
Operand operand(const std::vector<Operand>& list, size_t i) { return i < list.size() ? list[i] : Operand{}; }

// Each place is written once: its token's row, or zeros.
template <class T>
std::unique_ptr<Kernel> dispatch(const KernelSpec& spec, CpuDevice& device) {
  const Places p(spec, spec.out[0].dims, spec.in[1].dims);
  const auto* x = static_cast<const T*>(spec.in[0].data);
  const auto* slot = static_cast<const int32_t*>(spec.in[1].data);
  const Operand weight = operand(spec.in, 2);
  auto* y = static_cast<T*>(spec.out[0].data);
  const int64_t rows = p.experts * p.groups * p.capacity, slots = count(spec.in[1]);
  return make_kernel(static_cast<size_t>(rows) * 8, [=, threads = device.threads()](char* scratch) {
    auto* source = reinterpret_cast<int64_t*>(scratch);  // which choice fills a place
    std::fill(source, source + rows, int64_t{-1});
    for (int64_t i = 0; i < slots; ++i)
      if (const int64_t to = p.row(slot[i], i / p.k / p.tokens); to >= 0) source[to] = i;
    parallel_for(threads, rows, p.least(), [&](int64_t b, int64_t e) {
      for (int64_t r = b; r < e; ++r) {
        const int64_t i = source[r];
        T* to = y + r * p.width;
        if (i < 0)
          std::memset(static_cast<void*>(to), 0, static_cast<size_t>(p.width) * sizeof(T));
        else if (weight.present())
          scale_row(x + i / p.k * p.width, weight_at(weight, i), to, p.width);
        else
          std::memcpy(static_cast<void*>(to), x + i / p.k * p.width, static_cast<size_t>(p.width) * sizeof(T));
      }
    });
  });
}

template <class T>
std::unique_ptr<Kernel> combine(const KernelSpec& spec, CpuDevice& device) {
  const Places p(spec, spec.in[0].dims, spec.in[1].dims);
  const auto* y = static_cast<const T*>(spec.in[0].data);
  const auto* slot = static_cast<const int32_t*>(spec.in[1].data);
  const Operand weight = operand(spec.in, 2);
  auto* x = static_cast<T*>(spec.out[0].data);
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, p.groups * p.tokens, p.least(), [&](int64_t b, int64_t e) {
      constexpr int64_t kWidth = 256;
      float sum[kWidth];
      for (int64_t t = b; t < e; ++t) {
        for (int64_t c = 0; c < p.width; c += kWidth) {
          const int64_t n = std::min(kWidth, p.width - c);
          std::fill(sum, sum + n, 0.0f);
          for (int64_t i = t * p.k; i < (t + 1) * p.k; ++i)
            if (const int64_t from = p.row(slot[i], t / p.tokens); from >= 0)
              add_row(y + from * p.width + c, weight_at(weight, i), sum, n);
          store_row(sum, x + t * p.width + c, n);
        }
      }
    });
  });
}

template <class T>
std::unique_ptr<Kernel> weight_grad(const KernelSpec& spec, CpuDevice& device) {
  const Places p(spec, spec.in[1].dims, spec.in[2].dims);
  const auto* x = static_cast<const T*>(spec.in[0].data);
  const auto* y = static_cast<const T*>(spec.in[1].data);
  const auto* slot = static_cast<const int32_t*>(spec.in[2].data);
  auto* dweight = static_cast<float*>(spec.out[0].data);
  return make_kernel(0, [=, slots = count(spec.in[2]), threads = device.threads()](char*) {
    parallel_for(threads, slots, p.least(), [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        const int64_t from = p.row(slot[i], i / p.k / p.tokens);
        dweight[i] = from < 0 ? 0 : dot_rows(x + i / p.k * p.width, y + from * p.width, p.width);
      }
    });
  });
}

using BindRows = std::unique_ptr<Kernel> (*)(const KernelSpec&, CpuDevice&);
template <BindRows kF32, BindRows kBF16>
std::unique_ptr<Kernel> bind_rows(const KernelSpec& spec, CpuDevice& device) {
  return spec.in[0].dtype == DType::kBF16 ? kBF16(spec, device) : kF32(spec, device);
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_moe_gate, bind_gate},
    {OpCode::k_moe_gate_grad, bind_gate_grad},
    {OpCode::k_moe_dispatch, bind_rows<dispatch<float>, dispatch<Bf16>>},
    {OpCode::k_moe_combine, bind_rows<combine<float>, combine<Bf16>>},
    {OpCode::k_moe_weight_grad, bind_rows<weight_grad<float>, weight_grad<Bf16>>},
};

}  // namespace

std::span<const KernelEntry> moe_kernels() { return kEntries; }

}  // namespace whale::cpu
