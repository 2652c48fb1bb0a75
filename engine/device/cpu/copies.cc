#include "device/cpu/copies.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <map>

#include "base/f16.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

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
// Asked once: in a virtual machine each look leaves it, and takes longer than to convert a small tensor.
bool is_fast() {  // clang's builtin does not know f16c
  static const bool fast = [] {
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  }();
  return fast;
}
#else
void widen_fast(const uint16_t*, float*, int64_t) {}
void narrow_fast(const float*, uint16_t*, int64_t) {}
bool is_fast() { return false; }
#endif

void widen(const uint16_t* from, float* to, int64_t n) {
  if (is_fast()) return widen_fast(from, to, n);
  for (int64_t i = 0; i < n; ++i) to[i] = f16_to_float(from[i]);
}
void narrow(const float* from, uint16_t* to, int64_t n) {
  if (is_fast()) return narrow_fast(from, to, n);
  for (int64_t i = 0; i < n; ++i) to[i] = float_to_f16(from[i]);
}

// A fused op's steps keep their types: each is rounded as the op of its own would round it.
Attrs wide_attrs(const KernelSpec& spec, DType narrow) {
  Attrs attrs = *spec.attrs;
  for (const char* name : {"dtype", "out_dtype"}) {
    const auto it = attrs.find(name);
    if (it == attrs.end()) continue;
    auto* given = std::get_if<std::string>(&it->second);
    if (given && !given->empty() && parse_dtype(*given) == narrow) *given = name_of(DType::kF32);
  }
  return attrs;
}

class CopiesKernel final : public Kernel {
 public:
  CopiesKernel(const KernelSpec& spec, CpuDevice& device, DType narrow)
      : attrs_(wide_attrs(spec, narrow)), narrow_(narrow), threads_(device.threads()) {
    KernelSpec wide = spec;
    wide.attrs = &attrs_;
    // Operands of one storage stay so; one may be the beginning of another.
    struct Room {
      size_t size = 0, at = 0;
    };
    std::map<const void*, Room> rooms;
    const auto each = [&](auto body) {
      for (auto* list : {&wide.in, &wide.out})
        for (Operand& x : *list)
          if (x.present() && x.dtype == narrow) body(x, list == &wide.in);
    };
    each([&](Operand& x, bool) {
      size_t& size = rooms[x.data].size;
      size = std::max(size, static_cast<size_t>(element_count(x.dims)) * sizeof(float));
    });
    size_t bytes = 0;
    for (auto& [_, room] : rooms) {
      room.at = bytes;
      bytes += (room.size + kAlignment - 1) / kAlignment * kAlignment;
    }
    char* area = device.wide_area(bytes);
    each([&](Operand& x, bool read) {
      const Copy copy{static_cast<uint16_t*>(x.data), reinterpret_cast<float*>(area + rooms.at(x.data).at),
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
    for (const Copy& c : in_)
      parallel_for(threads_, c.elements, kLeast, [&](int64_t b, int64_t e) {
        narrow_ == DType::kF16 ? widen(c.narrow + b, c.wide + b, e - b)
                               : load_tile(DType::kBF16, c.narrow, b, c.wide + b, e - b);
      });
    kernel_->run();
    for (const Copy& c : out_)
      parallel_for(threads_, c.elements, kLeast, [&](int64_t b, int64_t e) {
        narrow_ == DType::kF16 ? narrow(c.wide + b, c.narrow + b, e - b)
                               : store_tile(DType::kBF16, c.wide + b, c.narrow, b, e - b);
      });
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
  DType narrow_;
  int threads_;
  std::vector<Copy> in_, out_;
  std::unique_ptr<Kernel> kernel_;
};

}  // namespace

void round_f16(float* x, int64_t n) {
  uint16_t rounded[256];
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t m = std::min<int64_t>(256, n - i);
    narrow(x + i, rounded, m);
    widen(rounded, x + i, m);
  }
}

bool has(const KernelSpec& spec, DType dtype) {
  const auto is = [&](const Operand& x) { return x.present() && x.dtype == dtype; };
  return std::any_of(spec.in.begin(), spec.in.end(), is) || std::any_of(spec.out.begin(), spec.out.end(), is);
}

std::vector<DType> without_f16(std::vector<DType> types) {
  std::replace(types.begin(), types.end(), DType::kF16, DType::kF32);
  return types;
}

std::unique_ptr<Kernel> bind_on_copies(const KernelSpec& spec, CpuDevice& device, DType narrow) {
  return std::make_unique<CopiesKernel>(spec, device, narrow);
}

std::unique_ptr<Kernel> bind_narrow(const KernelSpec& spec, CpuDevice& device, Bind bind) {
  const bool narrow = has(spec, DType::kBF16);
  if (narrow && !device.has_bf16()) return bind_on_copies(spec, device, DType::kBF16);
  try {
    return bind(spec, device);
  } catch (const dnnl::error&) {
    if (!narrow) throw;
  }
  return bind_on_copies(spec, device, DType::kBF16);
}

bool f32_or_bf16(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype != DType::kF32 && dtype != DType::kBF16) return false;
  return true;
}

}  // namespace whale::cpu
