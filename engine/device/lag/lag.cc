#include "device/lag/lag.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include <fmt/format.h>

#include "device/lag/hidden_memory.h"
#include "device/lag/lateness.h"

namespace whale {
namespace lag {
namespace {

// What will be written is nothing before it is: who reads it early, or the same bytes of last time, sees it.
void spoil(void* to, size_t bytes, std::initializer_list<const void*> read) {
  for (const void* from : read)
    if (from == to) return;
  if (bytes > 0) std::memset(to, 0xff, bytes);
}

template <class T>
T* real(T* address) {
  return HiddenMemory::get().real(address);
}

struct Bytes {
  char* begin = nullptr;
  size_t size = 0;
  bool meets(const Bytes& o) const { return begin < o.begin + o.size && o.begin < begin + size; }
};

Bytes bytes_of(const Operand& o) {
  return {static_cast<char*>(o.data), o.present() ? static_cast<size_t>(element_count(o.dims) * size_of(o.dtype)) : 0};
}

class LagKernel final : public Kernel {
 public:
  // `spec`: with the addresses of the memory.
  LagKernel(std::unique_ptr<Kernel> kernel, const KernelSpec& spec) : kernel_(std::move(kernel)) {
    for (const Operand& out : spec.out) {
      const Bytes bytes = bytes_of(out);
      const auto shared = [&](const Operand& in) { return bytes_of(in).meets(bytes); };
      if (bytes.size > 0 && std::ranges::none_of(spec.in, shared)) results_.push_back(bytes);
    }
  }
  void run() override {
    for (const Bytes& b : results_) spoil(b.begin, b.size, {});
    const UnderWay under_way(false);
    kernel_->run();
  }
  size_t scratch_bytes() const override { return kernel_->scratch_bytes(); }
  void set_scratch(void* scratch) override { kernel_->set_scratch(real(scratch)); }

 private:
  std::unique_ptr<Kernel> kernel_;
  std::vector<Bytes> results_;  // that share no bytes with what it reads
};

class LagDevice final : public Device {
 public:
  LagDevice(std::unique_ptr<Device> device, uint64_t seed, Opened& opened)
      : device_(std::move(device)), seed_(seed), turn_(opened, seed) {}

  void enter_thread(Queue queue) override {
    turn_.use(queue);
    become_queue(queue, turn_, seed_);
    device_->enter_thread(queue);
  }
  void* allocate(size_t bytes) override { return HiddenMemory::get().allocate(bytes); }
  void release(void* memory, size_t bytes) override { HiddenMemory::get().release(memory, bytes); }

  void forget(void* memory, size_t bytes) override { spoil(real(memory), bytes, {}); }
  std::unique_ptr<Kernel> bind(const KernelSpec& spec) override {
    KernelSpec mine = spec;
    for (std::vector<Operand>* list : {&mine.in, &mine.out})
      for (Operand& operand : *list) operand.data = real(operand.data);
    mine.step = real(mine.step);
    return std::make_unique<LagKernel>(device_->bind(mine), mine);
  }
  void copy_in(void* to, const void* from, size_t bytes) override {
    spoil(real(to), bytes, {real(from)});
    const UnderWay under_way(true);
    device_->copy_in(real(to), real(from), bytes);
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    const UnderWay under_way(true);
    device_->copy_out(real(to), real(from), bytes);
  }
  void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) override {
    spoil(real(to), elements * static_cast<size_t>(size_of(dtype)), {real(a), real(b)});
    const UnderWay under_way(true);
    device_->combine(combine, dtype, real(to), real(a), real(b), elements);
  }

 private:
  std::unique_ptr<Device> device_;
  uint64_t seed_;
  Turn turn_;
};

class LagBackend final : public Backend {
 public:
  LagBackend(Backend& arithmetic, DeviceKind kind) : arithmetic_(arithmetic), kind_(kind) {}
  const char* name() const override { return name_of(kind_); }
  bool supports(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out) const override {
    return arithmetic_.supports(op, in, out);
  }
  std::unique_ptr<Device> open(const DeviceSpec& spec, const OpenOptions& options) override {
    OpenOptions own = options;
    own.threads = std::max(1, own.threads);
    return std::make_unique<LagDevice>(arithmetic_.open(spec, own), static_cast<uint64_t>(spec.index), opened_);
  }
  std::string describe() const override {
    return fmt::format(
        "{}: {}'s arithmetic, late at random and in memory that nobody else reaches: proves that plans wait", name(),
        arithmetic_.name());
  }

 private:
  Backend& arithmetic_;
  DeviceKind kind_;
  Opened opened_;
};

}  // namespace
}  // namespace lag

std::unique_ptr<Backend> make_lag_backend(Backend& arithmetic, DeviceKind kind) {
  return std::make_unique<lag::LagBackend>(arithmetic, kind);
}

}  // namespace whale
