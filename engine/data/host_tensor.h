// Data outside a session: dense row-major host memory that somebody else owns.
#pragma once

#include <string>

#include "ir/dtype.h"
#include "ir/shape.h"

namespace whale {

struct HostTensor {
  DType dtype = DType::kF32;
  Dims dims;
  void* data = nullptr;  // inputs are only read
  size_t bytes() const { return static_cast<size_t>(element_count(dims)) * static_cast<size_t>(size_of(dtype)); }
};

// For feeding and fetching.
struct NamedHost {
  std::string name;
  HostTensor tensor;
};

}  // namespace whale
