// The door of libwhale_cpu.so.
#include <fmt/format.h>

#include "base/version.h"
#include "device/cpu/copies.h"
#include "device/cpu/device.h"
#include "device/cpu/isa.h"
#include "device/cpu/team.h"
#include "ops/op.h"

namespace whale::cpu {
namespace {

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  bool supports(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out) const override {
    return find_kernel(op, without_f16(in), without_f16(out)) != nullptr;
  }
  std::unique_ptr<Device> open(const DeviceSpec& spec, const OpenOptions& options) override {
    return std::make_unique<CpuDevice>(spec, options);
  }
  std::string describe() const override { return fmt::format("{}, oneDNN {}, OpenMP", isa_name(), onednn_version()); }
};

// What the environment tells oneDNN to print, write or compute otherwise does not hold. The settings are the process's
// own: a host that uses the same oneDNN finds them so.
void quiet_onednn() {
  dnnl_set_verbose(0);
  dnnl_set_jit_dump(0);
  dnnl_set_jit_profiling_flags(DNNL_JIT_PROFILE_NONE);
  // Without AMX: the kernels of oneDNN 2.6 for it are older than the processors that have it, and end a process by
  // SIGILL for convolutions of odd sizes. Refused once oneDNN has been used: then the host has chosen.
  dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx512_core_bf16);
  dnnl_set_cpu_isa_hints(dnnl_cpu_isa_no_hints);
}

Backend* create() {
  quiet_onednn();
  prepare_thread_exit();
  return new CpuBackend;
}

}  // namespace
}  // namespace whale::cpu

extern "C" __attribute__((visibility("default"))) const whale::BackendEntry whale_backend;
extern "C" const whale::BackendEntry whale_backend{whale::kVersion, whale::cpu::create};
