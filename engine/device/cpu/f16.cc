#include "device/cpu/f16.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <map>

#include "base/f16.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

constexpr int64_t kLeast = 16384;  // elements that are worth a thread
constexpr size_t kAlignment = 64;

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) void widen_fast(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  for (; i < n; ++i) to[i] = f16_to_float(from[i]);
}
__attribute__((target("avx,f16c"))) void narrow_fast(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  for (; i < n; ++i) to[i] = float_to_f16(from[i]);
}
bool is_fast() {  // clang's builtin does not know f16c
  unsigned a, b, c = 0, d;
  return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#else
void widen_fast(const uint16_t*, float*, int64_t) {}
void narrow_fast(const float*, uint16_t*, int64_t) {}
bool is_fast() { return false; }
#endif

void widen(const uint16_t* from, float* to, int64_t n, int threads) {
  parallel_for(threads, n, kLeast, [&](int64_t b, int64_t e) {
    if (is_fast()) return widen_fast(from + b, to + b, e - b);
    for (int64_t i = b; i < e; ++i) to[i] = f16_to_float(from[i]);
  });
}
void narrow(const float* from, uint16_t* to, int64_t n, int threads) {
  parallel_for(threads, n, kLeast, [&](int64_t b, int64_t e) {
    if (is_fast()) return narrow_fast(from + b, to + b, e - b);
    for (int64_t i = b; i < e; ++i) to[i] = float_to_f16(from[i]);
  });
}

// A fused op's steps keep their types: each is rounded as the op of its own would round it.
Attrs wide_attrs(const KernelSpec& spec) {
  Attrs attrs = *spec.attrs;
  for (const char* name : {"dtype", "out_dtype"}) {
    const auto it = attrs.find(name);
    if (it == attrs.end()) continue;
    auto* given = std::get_if<std::string>(&it->second);
    if (given && !given->empty() && parse_dtype(*given) == DType::kF16) *given = name_of(DType::kF32);
  }
  return attrs;
}

class CopiesKernel final : public Kernel {
 public:
  CopiesKernel(const KernelSpec& spec, CpuDevice& device) : attrs_(wide_attrs(spec)), threads_(device.threads()) {
    KernelSpec wide = spec;
    wide.attrs = &attrs_;
    size_t bytes = 0;
    std::map<const void*, size_t> places;  // operands of one storage stay so
    const auto each = [&](auto body) {
      for (auto* list : {&wide.in, &wide.out})
        for (Operand& x : *list)
          if (x.dtype == DType::kF16) body(x, list == &wide.in);
    };
    each([&](Operand& x, bool) {
      if (!places.try_emplace(x.data, bytes).second) return;
      const size_t size = static_cast<size_t>(element_count(x.dims)) * sizeof(float);
      bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    });
    char* area = device.wide_area(bytes);
    each([&](Operand& x, bool read) {
      const Copy copy{static_cast<uint16_t*>(x.data), reinterpret_cast<float*>(area + places.at(x.data)),
                      element_count(x.dims)};
      (read ? in_ : out_).push_back(copy);
      x.data = copy.wide;
      x.dtype = DType::kF32;
      x.constant = false;
      x.version = nullptr;
    });
    kernel_ = device.bind(wide);
  }
  void run() override {
    for (const Copy& c : in_) widen(c.narrow, c.wide, c.elements, threads_);
    kernel_->run();
    for (const Copy& c : out_) narrow(c.wide, c.narrow, c.elements, threads_);
  }
  size_t scratch_bytes() const override { return kernel_->scratch_bytes(); }
  void set_scratch(void* scratch) override { kernel_->set_scratch(scratch); }

 private:
  struct Copy {
    uint16_t* narrow;
    float* wide;
    int64_t elements;
  };
  Attrs attrs_;
  int threads_;
  std::vector<Copy> in_, out_;
  std::unique_ptr<Kernel> kernel_;
};

}  // namespace

void round_f16(float* x, int64_t n) {
  uint16_t rounded[256];
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t m = std::min<int64_t>(256, n - i);
    narrow(x + i, rounded, m, 1);
    widen(rounded, x + i, m, 1);
  }
}

bool has_f16(const KernelSpec& spec) {
  const auto is = [](const Operand& x) { return x.dtype == DType::kF16; };
  return std::any_of(spec.in.begin(), spec.in.end(), is) || std::any_of(spec.out.begin(), spec.out.end(), is);
}

std::vector<DType> without_f16(std::vector<DType> types) {
  std::replace(types.begin(), types.end(), DType::kF16, DType::kF32);
  return types;
}

std::unique_ptr<Kernel> bind_on_copies(const KernelSpec& spec, CpuDevice& device) {
  return std::make_unique<CopiesKernel>(spec, device);
}

}  // namespace whale::cpu
