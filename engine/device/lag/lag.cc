#include "device/lag/lag.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <thread>

#include <fmt/format.h>

#include "device/lag/hidden_memory.h"

namespace whale {
namespace lag {
namespace {

// Of the thread's queue.
thread_local uint64_t dice = 0;
thread_local std::chrono::steady_clock::time_point busy_until{};

uint32_t roll() {  // splitmix64
  uint64_t x = dice += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((x ^ (x >> 31)) >> 32);
}

// A collective is late before the first of its copies, and seldom between them.
enum class Mood : uint8_t { kFast, kSlow, kNowAndThen };
thread_local Mood mood = Mood::kFast;  // of the thread's queue
thread_local bool slow = false;
thread_local uint32_t left = 0;  // instructions until that may change

void be_late() {
  constexpr auto kSame = std::chrono::microseconds(20);  // instruction, when no longer ago
  constexpr uint32_t kWhile = 32, kOneSlow = 3, kOneIn = 2, kOneOfCopies = 64, kNanoseconds = 2'000'000;
  const bool same = std::chrono::steady_clock::now() - busy_until < kSame;
  if (left == 0)
    slow = mood == Mood::kSlow || (mood == Mood::kNowAndThen && roll() % kOneSlow == 0), left = 1 + roll() % kWhile;
  left -= !same;
  if (slow && roll() % (same ? kOneOfCopies : kOneIn) == 0)
    std::this_thread::sleep_for(std::chrono::nanoseconds(roll() % kNanoseconds));
}
void be_done() { busy_until = std::chrono::steady_clock::now(); }

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
    be_late();
    kernel_->run();
    be_done();
  }
  size_t scratch_bytes() const override { return kernel_->scratch_bytes(); }
  void set_scratch(void* scratch) override { kernel_->set_scratch(real(scratch)); }

 private:
  std::unique_ptr<Kernel> kernel_;
  std::vector<Bytes> results_;  // that share no bytes with what it reads
};

class LagDevice final : public Device {
 public:
  LagDevice(std::unique_ptr<Device> device, uint64_t seed, uint64_t number)
      : device_(std::move(device)), seed_(seed), number_(number) {}

  void enter_thread(Queue queue) override {
    dice = (seed_ * kMostDevices + number_ % kMostDevices) * kQueues + static_cast<uint64_t>(queue);
    // A third of the seeds each: every queue is slow for a while and fast for a while; compute is slow on about every
    // other device, and others catch up with it; the others are slow, and compute is far ahead.
    const bool compute = queue == Queue::kCompute;
    const Mood moods[] = {Mood::kNowAndThen, compute && roll() % 2 == 0 ? Mood::kSlow : Mood::kFast,
                          compute ? Mood::kFast : Mood::kSlow};
    mood = moods[seed_ % 3], left = 0;
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
    be_late();
    device_->copy_in(real(to), real(from), bytes);
    be_done();
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    be_late();
    device_->copy_out(real(to), real(from), bytes);
    be_done();
  }
  void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) override {
    spoil(real(to), elements * static_cast<size_t>(size_of(dtype)), {real(a), real(b)});
    be_late();
    device_->combine(combine, dtype, real(to), real(a), real(b), elements);
    be_done();
  }

 private:
  static constexpr uint64_t kMostDevices = 1 << 20;
  std::unique_ptr<Device> device_;
  uint64_t seed_, number_;
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
    return std::make_unique<LagDevice>(arithmetic_.open(spec, own), static_cast<uint64_t>(spec.index),
                                       opened_.fetch_add(1));
  }
  std::string describe() const override {
    return fmt::format(
        "{}: {}'s arithmetic, late at random and in memory that nobody else reaches: proves that plans wait", name(),
        arithmetic_.name());
  }

 private:
  Backend& arithmetic_;
  DeviceKind kind_;
  std::atomic<uint64_t> opened_{0};
};

}  // namespace
}  // namespace lag

std::unique_ptr<Backend> make_lag_backend(Backend& arithmetic, DeviceKind kind) {
  return std::make_unique<lag::LagBackend>(arithmetic, kind);
}

}  // namespace whale
