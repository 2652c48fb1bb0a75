// The device interface: what a back end implements. Small on purpose. A back end with foreign libraries is a shared
// library of its own (libwhale_cpu.so), opened when asked for and version-locked; `ref` and `null` are built in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale {

// What changes from step to step and kernels read, in the device's memory: what is recorded once stays as it is.
struct StepParameters {
  uint64_t seed = 0;
  int64_t iteration = 0;  // always advances: random ops
};

// What changes from row to row of the schedule, known when it is bound. One per queue; kernels keep a pointer to it
// from bind() on and read it in run().
struct RowContext {
  int64_t batch_begin = 0;  // first global sample of this device's part of the current micro-batch
};

// One operand of a bound kernel: where it is, fixed for the session's life.
struct Operand {
  void* data = nullptr;
  DType dtype{};
  Dims dims;
  bool constant = false;  // a variable that no instruction of this segment changes: packed copies may be kept until
                          // the variable's version moves (see KernelSpec::versions)
  const uint64_t* version =
      nullptr;  // variables: counts writes; a kernel compares it to know that its packing is stale
  bool present() const { return dtype != DType{}; }
};

struct KernelSpec {
  OpCode op{};
  std::string name;
  const Attrs* attrs = nullptr;
  std::vector<Operand> in;  // absent operands: present() == false
  std::vector<Operand> out;
  Box box;
  uint64_t key = 0;
  const StepParameters* step = nullptr;  // in the device's memory
  const RowContext* row = nullptr;
};

// An op bound to its operands. run() allocates nothing and throws only on a failure of the device.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual void run() = 0;
  // Scratch bytes it needs while it runs; the device provides one scratch area, of the largest demand, to all its
  // kernels.
  virtual size_t scratch_bytes() const { return 0; }
  virtual void set_scratch(void* /*scratch*/) {}
};

// One device: threads of the executor call it, one for each queue in use. Only compute's binds, and runs kernels; the
// others call `combine` and the copies, several of them at once.
class Device {
 public:
  virtual ~Device() = default;
  // Called once on the compute thread before anything else, and on each further thread: affinity, and all threads that
  // kernels will use. Throws resource_exhausted when the system does not give them.
  virtual void enter_thread(Queue queue) = 0;
  virtual void* allocate(size_t bytes) = 0;  // 64-byte aligned, zeroed lazily
  virtual void release(void* memory, size_t bytes) = 0;
  // Memory of the host that the device copies from and to fastest. Where the device has no other: its own.
  virtual void* allocate_host(size_t bytes) { return allocate(bytes); }
  virtual void release_host(void* memory, size_t bytes) { release(memory, bytes); }
  // A step begins: it reads nothing here that it has not written. A device that looks for plans that do may spoil it.
  virtual void forget(void* /*memory*/, size_t /*bytes*/) {}
  virtual std::unique_ptr<Kernel> bind(const KernelSpec& spec) = 0;  // throws unimplemented: op, dtype, device
  // Also between two places in the host's memory.
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  // False: it holds no values, so that none need be moved to where others of its kind, or its host, would find them.
  virtual bool has_values() const { return true; }
  // The host, and who reads its memory, reads and writes the device's as its own.
  virtual bool in_host_memory() const { return false; }
  // The arithmetic of reductions between devices: to[i] = combine(a[i], b[i]).
  virtual void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) = 0;
};

// How a device is opened, beside what the plan says of it.
struct OpenOptions {
  int threads = 0;   // cpu: of its team; 0: as many as it has cores
  bool pin = true;   // cpu: its threads run on its cores only; else wherever the caller's thread may
  bool bf16 = true;  // cpu: false: as a processor without instructions for bf16, in f32 on copies
};

// A back end: makes devices, and says before any device exists what they can do.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;  // "cpu", "ref", "null"
  virtual bool supports(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out) const = 0;
  virtual std::unique_ptr<Device> open(const DeviceSpec& spec, const OpenOptions& options) = 0;
  std::unique_ptr<Device> open(const DeviceSpec& spec) { return open(spec, {}); }
  virtual std::string describe() const = 0;  // one line for `whale devices`: library, instruction set
};

// Every back end library exports this one symbol; `version` is compared for equality before anything else is touched.
// extern "C" const whale_backend_entry whale_backend;
struct BackendEntry {
  const char* version;
  Backend* (*create)();
};
#define WHALE_BACKEND_SYMBOL "whale_backend"

// The back ends of one engine, opened on first use (device/open.cc): `ref` and `null` are built in, `cpu` is
// libwhale_cpu.so in the folder of libwhale.so. get() throws unavailable, saying what to install. Thread-safe.
class Backends {
 public:
  // library_dir: where back end libraries are; empty: the folder of libwhale.so.
  explicit Backends(std::string library_dir = {});
  ~Backends();
  Backend& get(DeviceKind kind);
  const std::string& folder() const;  // where libraries are that this one opens

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace whale
