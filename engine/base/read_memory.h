// The memory of another process, copied by the kernel.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace whale {

// false: it may not be read, or is not there.
inline bool read_memory(pid_t process, uint64_t address, char* place, size_t bytes) {
  while (bytes > 0) {
    const iovec to{place, bytes}, from{reinterpret_cast<void*>(address), bytes};  // NOLINT(performance-no-int-to-ptr)
    const ssize_t n = process_vm_readv(process, &to, 1, &from, 1, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    place += n, address += static_cast<uint64_t>(n), bytes -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace whale
