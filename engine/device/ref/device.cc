// The reference device: plain memory, one loop per kernel.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/bf16.h"
#include "base/f16.h"
#include "device/ref/ref.h"
#include "device/ref/table.h"

namespace whale {
namespace ref {
namespace {

constexpr size_t kAlignment = 64;

Bind find_bind(OpCode op) {
  for (const auto family :
       {elementwise_rows, fused_rows, random_rows,     reduce_rows,    matmul_rows,     movement_rows,  indexing_rows,
        embedding_rows,   norm_rows,  batch_norm_rows, softmax_rows,   loss_rows,       attention_rows, conv_rows,
        pool_rows,        moe_rows,   optimizer_rows,  recommend_rows, row_update_rows, collective_rows})
    for (const Row& row : family())
      if (row.op == op) return row.bind;
  return nullptr;
}

class LoopKernel final : public Kernel {
 public:
  explicit LoopKernel(Body body) : body_(std::move(body)) {}
  void run() override { body_(); }

 private:
  Body body_;
};

// log(exp(a) + exp(b)); -inf is nothing, NaN stays.
template <class T>
T log_sum_exp(T a, T b) {
  const double x = static_cast<double>(a), y = static_cast<double>(b), top = x > y || x != x ? x : y;
  return std::isinf(top) ? static_cast<T>(x != x   ? x
                                          : y != y ? y
                                                   : top)
                         : static_cast<T>(top + std::log1p(std::exp(-std::fabs(x - y))));
}

template <class T>
T combined(Combine combine, T a, T b) {
  switch (combine) {
    case Combine::kSum:
      if constexpr (std::is_integral_v<T>)
        return static_cast<T>(plus(int64_t{a}, int64_t{b}));
      else
        return a + b;
    case Combine::kMax: return a > b || a != a ? a : b;  // NaN wins
    case Combine::kMin: return a < b || a != a ? a : b;
    case Combine::kLogSumExp: return log_sum_exp(a, b);
  }
  return a;
}

template <class T>
void combine_all(Combine combine, void* to, const void* a, const void* b, size_t elements) {
  for (size_t i = 0; i < elements; ++i)
    static_cast<T*>(to)[i] = combined(combine, static_cast<const T*>(a)[i], static_cast<const T*>(b)[i]);
}

template <float (*Widen)(uint16_t), uint16_t (*Narrow)(float)>
void combine_half(Combine combine, void* to, const void* a, const void* b, size_t elements) {
  const auto* x = static_cast<const uint16_t*>(a);
  const auto* y = static_cast<const uint16_t*>(b);
  for (size_t i = 0; i < elements; ++i)
    static_cast<uint16_t*>(to)[i] = Narrow(combined(combine, Widen(x[i]), Widen(y[i])));
}

class RefDevice final : public Device {
 public:
  void enter_thread(Queue) override {}

  void* allocate(size_t bytes) override {
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
    if (memory == nullptr)
      throw error(Code::kResourceExhausted, "the ref device could not allocate {} bytes; use fewer or smaller devices",
                  bytes);
    return std::memset(memory, 0, rounded);
  }
  void release(void* memory, size_t) override { std::free(memory); }

  std::unique_ptr<Kernel> bind(const KernelSpec& spec) override {
    const Bind bind = find_bind(spec.op);
    if (bind == nullptr) throw unimplemented("the ref device has no kernel for {}", def(spec.op).name);
    return std::make_unique<LoopKernel>(bind(spec));
  }

  bool in_host_memory() const override { return true; }
  void copy_in(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }
  void copy_out(void* to, const void* from, size_t bytes) override { copy(to, from, bytes); }

  void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) override {
    switch (dtype) {
      case DType::kF32: return combine_all<float>(combine, to, a, b, elements);
      case DType::kF64: return combine_all<double>(combine, to, a, b, elements);
      case DType::kBF16: return combine_half<bf16_to_float, float_to_bf16>(combine, to, a, b, elements);
      case DType::kF16: return combine_half<f16_to_float, float_to_f16>(combine, to, a, b, elements);
      case DType::kI32: return combine_all<int32_t>(combine, to, a, b, elements);
      case DType::kI64: return combine_all<int64_t>(combine, to, a, b, elements);
      case DType::kI8: return combine_all<int8_t>(combine, to, a, b, elements);
      case DType::kU8: return combine_all<uint8_t>(combine, to, a, b, elements);
      case DType::kU16: return combine_all<uint16_t>(combine, to, a, b, elements);
      default: throw unimplemented("the ref device does not combine {} between devices", name_of(dtype));
    }
  }

 private:
  static void copy(void* to, const void* from, size_t bytes) {
    if (bytes != 0) std::memcpy(to, from, bytes);
  }
};

class RefBackend final : public Backend {
 public:
  const char* name() const override { return "ref"; }
  bool supports(OpCode op, const std::vector<DType>&, const std::vector<DType>&) const override {
    return find_bind(op) != nullptr;
  }
  std::unique_ptr<Device> open(const DeviceSpec&, const OpenOptions&) override { return std::make_unique<RefDevice>(); }
  std::string describe() const override { return "ref: plain loops in float64, the oracle of the other devices"; }
};

}  // namespace
}  // namespace ref

std::unique_ptr<Backend> make_ref_backend() { return std::make_unique<ref::RefBackend>(); }

}  // namespace whale
