// One CPU device: the cores it may use, its memory, its oneDNN engine and queue.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "device/cpu/kernels.h"
#include "device/cpu/onednn.h"
#include "device/device.h"

namespace whale::cpu {

class CpuDevice final : public Device {
 public:
  CpuDevice(const DeviceSpec& spec, const OpenOptions& options);
  ~CpuDevice() override;
  void enter_thread(Queue queue) override;
  void* allocate(size_t bytes) override;
  void release(void* memory, size_t bytes) override;
  std::unique_ptr<Kernel> bind(const KernelSpec& spec) override;
  bool in_host_memory() const override { return true; }
  void copy_in(void* to, const void* from_host, size_t bytes) override;
  void copy_out(void* to_host, const void* from, size_t bytes) override;
  void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) override;

  // Threads of its OpenMP pool. A kernel fixes its blocking by this number at bind.
  int threads() const { return threads_; }
  bool has_bf16() const { return has_bf16_; }  // instructions that multiply bf16
  OneDnn& onednn() { return onednn_; }
  // Where kernels keep f32 copies while they run: they share an area, since only one runs at a time.
  char* wide_area(size_t bytes);

 private:
  std::vector<int> cores_;
  int threads_;
  bool has_bf16_;
  OneDnn onednn_;
  struct WideArea {
    void* data;
    size_t bytes;
  };
  std::vector<WideArea> wide_;  // the last one is the largest
};

// Threads worth waking for `work` elements of streaming arithmetic: 1 below the cost of a fork and join.
inline int threads_for(const CpuDevice& device, double work, double least = 16384) {
  return work < 2 * least ? 1 : device.threads();
}

// Copies that stay in memory order; large blocks are mapped with huge pages, released with the same size.
void* map_memory(size_t bytes);
void unmap_memory(void* memory, size_t bytes);

}  // namespace whale::cpu
