// Kernels made of a closure over what bind() worked out, and kernels in a row.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "device/device.h"

namespace whale::cpu {

template <class F>
class FunctionKernel final : public Kernel {
 public:
  FunctionKernel(size_t scratch_bytes, F f) : f_(std::move(f)), scratch_bytes_(scratch_bytes) {}
  void run() override { f_(scratch_); }
  size_t scratch_bytes() const override { return scratch_bytes_; }
  void set_scratch(void* scratch) override { scratch_ = static_cast<char*>(scratch); }

 private:
  F f_;
  size_t scratch_bytes_;
  char* scratch_ = nullptr;
};

// f is called with the scratch area, a char*.
template <class F>
std::unique_ptr<Kernel> make_kernel(size_t scratch_bytes, F f) {
  return std::make_unique<FunctionKernel<F>>(scratch_bytes, std::move(f));
}
inline std::unique_ptr<Kernel> nothing_to_do() {
  return make_kernel(0, [](char*) {});
}

// One after the other; each may use the whole scratch area.
class SequenceKernel final : public Kernel {
 public:
  void add(std::unique_ptr<Kernel> kernel) { kernels_.push_back(std::move(kernel)); }
  void run() override {
    for (const auto& kernel : kernels_) kernel->run();
  }
  size_t scratch_bytes() const override {
    size_t bytes = 0;
    for (const auto& kernel : kernels_) bytes = std::max(bytes, kernel->scratch_bytes());
    return bytes;
  }
  void set_scratch(void* scratch) override {
    for (const auto& kernel : kernels_) kernel->set_scratch(scratch);
  }

 private:
  std::vector<std::unique_ptr<Kernel>> kernels_;
};

}  // namespace whale::cpu
