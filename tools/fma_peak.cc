// Prints the fused multiply-add peak of N threads as JSON, for tools/bench: 24 independent accumulators in registers,
// so that latency is hidden. Compiled there with -march=native -fopenmp.
#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kAccumulators = 24, kRounds = 2'000'000;

#if defined(__AVX512F__)
using Vector = __m512;
inline Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
inline Vector splat(float v) { return _mm512_set1_ps(v); }
constexpr double kLanes = 16;
#else
using Vector = __m256;
inline Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
inline Vector splat(float v) { return _mm256_set1_ps(v); }
constexpr double kLanes = 8;
#endif

float f32_rounds() {
  Vector sum[kAccumulators];
  for (auto& s : sum) s = splat(0);
  Vector a = splat(1e-9f), b = splat(0.5f);
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 24
    for (auto& s : sum) s = fma(a, b, s);
    asm volatile("" : "+v"(a), "+v"(b));
  }
  Vector total = splat(0);
  for (const auto& s : sum) total = fma(total, b, s);
  return reinterpret_cast<const float*>(&total)[0];
}

#if defined(__AVX512BF16__)
float bf16_rounds() {
  __m512 sum[kAccumulators];
  for (auto& s : sum) s = _mm512_setzero_ps();
  __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(1e-3f)), b = a;
  for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 24
    for (auto& s : sum) s = _mm512_dpbf16_ps(s, a, b);
    asm volatile("" : "+v"(a), "+v"(b));
  }
  __m512 total = _mm512_setzero_ps();
  for (const auto& s : sum) total = _mm512_add_ps(total, s);
  return _mm512_reduce_add_ps(total);
}
#endif

// Median GFLOP/s of some windows.
double measure(float (*rounds)(), double flops_per_round, int threads) {
  std::vector<double> rates;
  volatile float sink = 0;
  for (int window = 0; window < 7; ++window) {
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    sink = rounds();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    rates.push_back(flops_per_round * kRounds * threads / seconds * 1e-9);
  }
  (void)sink;
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_max_threads();
  double bf16 = 0;
#if defined(__AVX512BF16__)
  bf16 = measure(bf16_rounds, 4 * 16 * kAccumulators, threads);
#endif
  std::printf("{\"f32_gflops\": %.1f, \"bf16_gflops\": %.1f, \"threads\": %d}\n",
              measure(f32_rounds, 2 * kLanes * kAccumulators, threads), bf16, threads);
  return 0;
}
