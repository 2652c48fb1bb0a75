#include "base/heap.h"

#include <cstdlib>

namespace whale {

void keep_heap() {
  void* volatile block = std::malloc(16u << 20);
  std::free(block);
}

}  // namespace whale
