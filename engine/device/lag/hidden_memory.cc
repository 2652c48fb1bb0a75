#include "device/lag/hidden_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>

#include "base/error.h"

namespace whale::lag {
namespace {

size_t in_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page + (bytes == 0 ? page : 0);
}

Error no_memory(size_t bytes) {
  return error(Code::kResourceExhausted, "a lag device could not map {} bytes; use fewer or smaller devices", bytes);
}

}  // namespace

// Never destroyed: sessions may outlive what is static.
HiddenMemory& HiddenMemory::get() {
  static HiddenMemory& memory = *new HiddenMemory;
  return memory;
}

void HiddenMemory::reserve() {
  void* both = mmap(nullptr, 2 * kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (both == MAP_FAILED)
    throw error(Code::kResourceExhausted,
                "lag devices need {} GiB of address space, which the process does not get (ulimit -v); use ref devices",
                2 * kSpan >> 30);
  begin_ = reinterpret_cast<uintptr_t>(both);
  free_.emplace(0, kSpan);
}

void* HiddenMemory::allocate(size_t bytes) {
  const size_t size = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  if (free_.empty()) reserve();
  for (auto at = free_.begin(); at != free_.end(); ++at) {
    const auto [begin, free] = *at;
    if (free < size) continue;
    void* memory = reinterpret_cast<void*>(begin_ + kSpan + begin);
    if (mmap(memory, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) break;
    free_.erase(at);
    if (free > size) free_.emplace(begin + size, free - size);
    return reinterpret_cast<void*>(begin_ + begin);
  }
  throw no_memory(bytes);
}

void HiddenMemory::release(void* hidden, size_t bytes) {
  if (hidden == nullptr) return;
  size_t size = in_pages(bytes);
  const std::lock_guard lock(mutex_);
  size_t begin = reinterpret_cast<uintptr_t>(hidden) - begin_;
  mmap(reinterpret_cast<void*>(begin_ + kSpan + begin), size, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + size) size += next->second, next = free_.erase(next);
  if (next != free_.begin())
    if (const auto before = std::prev(next); before->first + before->second == begin) {
      before->second += size;
      return;
    }
  free_.emplace_hint(next, begin, size);
}

}  // namespace whale::lag
