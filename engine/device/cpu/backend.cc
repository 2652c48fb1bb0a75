// The door of libwhale_cpu.so.
#include <fmt/format.h>

#include "base/version.h"
#include "device/cpu/device.h"
#include "device/cpu/f16.h"
#include "device/cpu/isa.h"
#include "ops/op.h"

namespace whale::cpu {
namespace {

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  bool supports(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out) const override {
    return find_kernel(op, without_f16(in), without_f16(out)) != nullptr;
  }
  std::unique_ptr<Device> open(const DeviceSpec& spec) override { return std::make_unique<CpuDevice>(spec); }
  std::string describe() const override { return fmt::format("{}, oneDNN {}, OpenMP", isa_name(), onednn_version()); }
};

Backend* create() { return new CpuBackend; }

}  // namespace
}  // namespace whale::cpu

extern "C" __attribute__((visibility("default"))) const whale::BackendEntry whale_backend;
extern "C" const whale::BackendEntry whale_backend{whale::kVersion, whale::cpu::create};
