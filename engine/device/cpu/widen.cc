#include "device/cpu/widen.h"

#include <algorithm>

#include "device/cpu/bf16.h"

namespace whale::cpu {
namespace {

struct Copy {
  void* narrow;
  float* wide;
  size_t elements;
};

class WidenedKernel final : public Kernel {
 public:
  WidenedKernel(const KernelSpec& spec, CpuDevice& device, Bind bind) {
    KernelSpec wide = spec;
    for (Operand& operand : wide.in) widen(operand, in_);
    for (Operand& operand : wide.out) widen(operand, out_);
    if (attr_string(*spec.attrs, "out_dtype") == "bf16") {
      attrs_ = *spec.attrs;
      attrs_["out_dtype"] = std::string("f32");
      wide.attrs = &attrs_;
    }
    kernel_ = bind(wide, device);
  }
  ~WidenedKernel() override {
    for (const auto* copies : {&in_, &out_})
      for (const Copy& copy : *copies) unmap_memory(copy.wide, copy.elements * sizeof(float));
  }
  void run() override {
    for (const Copy& copy : in_)
      for (size_t i = 0; i < copy.elements; ++i) copy.wide[i] = to_float(static_cast<const Bf16*>(copy.narrow)[i]);
    kernel_->run();
    for (const Copy& copy : out_)
      for (size_t i = 0; i < copy.elements; ++i) static_cast<Bf16*>(copy.narrow)[i] = to_bf16(copy.wide[i]);
  }
  size_t scratch_bytes() const override { return kernel_->scratch_bytes(); }
  void set_scratch(void* scratch) override { kernel_->set_scratch(scratch); }

 private:
  static void widen(Operand& operand, std::vector<Copy>& copies) {
    if (operand.dtype != DType::kBF16) return;
    const auto elements = static_cast<size_t>(element_count(operand.dims));
    copies.push_back({operand.data, static_cast<float*>(map_memory(elements * sizeof(float))), elements});
    operand.data = copies.back().wide;
    operand.dtype = DType::kF32;
    operand.version = nullptr;
  }
  std::vector<Copy> in_, out_;
  Attrs attrs_;
  std::unique_ptr<Kernel> kernel_;
};

}  // namespace

std::unique_ptr<Kernel> bind_or_widen(const KernelSpec& spec, CpuDevice& device, Bind bind) {
  try {
    return bind(spec, device);
  } catch (const dnnl::error&) {
    const auto narrow = [](const Operand& operand) { return operand.dtype == DType::kBF16; };
    if (std::none_of(spec.in.begin(), spec.in.end(), narrow) && std::none_of(spec.out.begin(), spec.out.end(), narrow))
      throw;
  }
  return std::make_unique<WidenedKernel>(spec, device, bind);
}

bool f32_or_bf16(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype != DType::kF32 && dtype != DType::kBF16) return false;
  return true;
}

}  // namespace whale::cpu
