#include "device/cpu/device.h"

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "device/cpu/combine.h"
#include "device/cpu/copies.h"
#include "device/cpu/isa.h"
#include "device/cpu/large_copy.h"
#include "device/cpu/parallel.h"
#include "device/cpu/team.h"

namespace whale::cpu {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kCodeAddresses = size_t{32} << 20;  // more than oneDNN takes for a kernel

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

int allowed_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

std::vector<DType> types(const std::vector<Operand>& operands) {
  std::vector<DType> types;
  for (const Operand& operand : operands)
    if (operand.present()) types.push_back(operand.dtype);
  return types;
}

std::string list(const std::vector<DType>& types) {
  std::string text;
  for (const DType dtype : types) text += fmt::format("{}{}", text.empty() ? "" : ", ", name_of(dtype));
  return text;
}

}  // namespace

void* map_memory(size_t bytes) {
  const bool huge = bytes >= kHugePage;
  const size_t size = round_up(std::max<size_t>(bytes, 1), kPage);
  const size_t slack = huge ? kHugePage : 0;
  void* mapped =
      mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED)
    throw error(Code::kResourceExhausted, "cannot map {} bytes of memory for a cpu device: {}", bytes,
                std::strerror(errno));
  if (!huge) return mapped;
  // A huge page needs an aligned start; the slack before and after goes back.
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = round_up(begin, kHugePage);
  if (aligned != begin) munmap(mapped, aligned - begin);
  if (const size_t rest = begin + slack - aligned; rest != 0) munmap(reinterpret_cast<void*>(aligned + size), rest);
  madvise(reinterpret_cast<void*>(aligned), size, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(aligned);
}

void unmap_memory(void* memory, size_t bytes) {
  if (memory != nullptr) munmap(memory, round_up(std::max<size_t>(bytes, 1), kPage));
}

CpuDevice::CpuDevice(const DeviceSpec& spec, const OpenOptions& options)
    : cores_(options.pin ? spec.cores : std::vector<int>{}),
      threads_(options.threads > 0  ? options.threads
               : spec.cores.empty() ? allowed_cpus()
                                    : static_cast<int>(spec.cores.size())),
      has_bf16_(cpu::has_bf16() && options.bf16) {}

CpuDevice::~CpuDevice() {
  for (const WideArea& area : wide_) unmap_memory(area.data, area.bytes);
}

// Kernels are bound to addresses, so an area that has become too small stays, for those bound to it. The next one is at
// least twice as large: all together are less than twice the largest.
char* CpuDevice::wide_area(size_t bytes) {
  if (wide_.empty() || wide_.back().bytes < bytes) {
    const size_t size = std::max({bytes, wide_.empty() ? 0 : 2 * wide_.back().bytes, kHugePage});
    wide_.reserve(wide_.size() + 1);
    wide_.push_back({map_memory(size), size});
  }
  return static_cast<char*>(wide_.back().data);
}

void CpuDevice::enter_thread(Queue queue) {
  if (!cores_.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores_) {
      if (core < 0 || core >= CPU_SETSIZE) throw invalid("cpu device: there is no core {}", core);
      CPU_SET(static_cast<size_t>(core), &set);
    }
    if (sched_setaffinity(0, sizeof set, &set) != 0)
      throw invalid("cpu device: cannot run on cores {}: {}", fmt::join(cores_, ","), std::strerror(errno));
  }
  make_team(queue == Queue::kCompute ? threads_ : 1);
}

void* CpuDevice::allocate(size_t bytes) { return map_memory(bytes); }
void CpuDevice::release(void* memory, size_t bytes) { unmap_memory(memory, bytes); }

std::unique_ptr<Kernel> CpuDevice::bind(const KernelSpec& spec) {
  if (has(spec, DType::kF16)) return bind_on_copies(spec, *this, DType::kF16);
  const auto in = types(spec.in), out = types(spec.out);
  const KernelEntry* entry = find_kernel(spec.op, in, out);
  if (entry == nullptr)
    throw unimplemented(
        "device cpu has no kernel for {} ({}) -> ({}); use float32 for these values and the parameters behind them, or "
        "ref devices, which compute in any type",
        def(spec.op).name, list(in), list(out))
        .at_op(spec.name);
  const ThreadCount guard(threads_);
  need_addresses(kCodeAddresses);
  try {
    return entry->bind(spec, *this);
  } catch (Error& e) {
    throw e.at_op(spec.name);
  } catch (const dnnl::error& e) {
    if (e.status == dnnl_out_of_memory)
      throw error(Code::kResourceExhausted, "oneDNN has no memory for {}: {}", def(spec.op).name, e.what())
          .at_op(spec.name);
    throw unimplemented("oneDNN {} cannot run {} ({}) -> ({}) here: {}", onednn_version(), def(spec.op).name, list(in),
                        list(out), e.what())
        .at_op(spec.name);
  }
}

void CpuDevice::copy_in(void* to, const void* from_host, size_t bytes) { large_copy(to, from_host, bytes); }
void CpuDevice::copy_out(void* to_host, const void* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to_host, from, bytes);
}
void CpuDevice::combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) {
  combine_arrays(combine, dtype, to, a, b, elements);
}

}  // namespace whale::cpu
