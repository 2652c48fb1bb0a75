// Folds of float tensors viewed as [outer, extent, inner] over the middle.
#pragma once

#include "ir/dtype.h"

namespace whale::cpu {

enum class Fold { kSum, kMax, kMin };

// to [outer, chunks, inner]: each chunk of the extent folded by itself. Columns are taken in blocks. A task is one
// (outer, chunk, block); its result does not depend on who runs it.
struct FoldStep {
  const void* from = nullptr;
  DType dtype{};
  float* to = nullptr;
  int64_t outer = 1, extent = 1, inner = 1, chunks = 1;
  Fold fold = Fold::kSum;

  static constexpr int64_t kColumns = 512;
  int64_t blocks() const { return (inner + kColumns - 1) / kColumns; }
  int64_t tasks() const { return outer * chunks * blocks(); }
};

void run_fold(const FoldStep& step, int64_t first_task, int64_t last_task);
double sum_of_squares(DType dtype, const void* from, int64_t at, int64_t n);

}  // namespace whale::cpu
