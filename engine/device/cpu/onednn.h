// oneDNN in our terms: the engine and stream of a device, and a kernel that is a list of primitives whose temporary
// memory (scratchpads, reordered weights) lies in the device's one scratch area.
#pragma once

#include <dnnl.hpp>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"

namespace whale::cpu {

struct OneDnn {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
};

std::string onednn_version();
dnnl::memory::data_type onednn_type(DType dtype);  // throws unimplemented
dnnl::memory::desc plain_desc(const Dims& dims, DType dtype);
dnnl::memory::desc strided_desc(const Dims& dims, DType dtype, const Dims& strides);
// An attribute whose scratchpad the caller provides, as DnnlKernel does.
dnnl::primitive_attr user_scratchpad();

class DnnlKernel final : public Kernel {
 public:
  explicit DnnlKernel(OneDnn& onednn) : onednn_(onednn) {}

  dnnl::memory operand(const dnnl::memory::desc& desc, const Operand& operand) const;
  // Memory that lives while the kernel runs, in the scratch area.
  dnnl::memory temporary(const dnnl::memory::desc& desc);
  // The same bytes in another layout: `from` itself when it has it already, else a temporary that a reorder fills here.
  dnnl::memory reordered(const dnnl::memory& from, const dnnl::memory::desc& to);
  void reorder(const dnnl::memory& from, const dnnl::memory& to);
  void call(const dnnl::primitive& primitive, const dnnl::memory::desc& scratchpad,
            std::initializer_list<std::pair<int, dnnl::memory>> arguments);
  template <class Pd, class Primitive>
  void call(const Pd& pd, const Primitive& primitive, std::initializer_list<std::pair<int, dnnl::memory>> arguments) {
    call(static_cast<const dnnl::primitive&>(primitive), pd.scratchpad_desc(), arguments);
  }

  void run() override;
  size_t scratch_bytes() const override { return scratch_bytes_; }
  void set_scratch(void* scratch) override;

 private:
  struct Call {
    dnnl::primitive primitive;
    std::vector<dnnl::memory> keep;
    std::vector<dnnl_exec_arg_t> arguments;
  };
  struct Temporary {
    dnnl::memory memory;
    size_t offset;
  };
  OneDnn& onednn_;
  std::vector<Call> calls_;
  std::vector<Temporary> temporaries_;
  size_t scratch_bytes_ = 0;
};

}  // namespace whale::cpu
