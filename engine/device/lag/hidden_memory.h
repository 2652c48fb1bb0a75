// Memory behind addresses that nobody can touch: it is mapped elsewhere, and only who asks real() finds it.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

namespace whale::lag {

// Of the whole process: a member of a collective is handed the addresses of its peers. Thread-safe.
class HiddenMemory {
 public:
  static HiddenMemory& get();

  void* allocate(size_t bytes);  // zeroed; a page is shared with nobody
  void release(void* hidden, size_t bytes);
  // Where `address` lies: that of other memory is its own.
  template <class T>
  T* real(T* address) const {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at - begin_ < kSpan ? reinterpret_cast<T*>(at + kSpan) : address;
  }

 private:
  static constexpr size_t kSpan = size_t{1} << 36;
  HiddenMemory() = default;
  void reserve();

  uintptr_t begin_ = ~uintptr_t{0} - kSpan;  // of the addresses; as much behind them is where the memory is
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // begin -> bytes
};

}  // namespace whale::lag
