// Elements of an index that name nothing: found before a step in what the caller gives, and during it in what the
// graph computes.
#pragma once

#include <optional>
#include <string>

#include "ir/dtype.h"
#include "ir/shape.h"
#include "ops/op.h"

namespace whale {

// Position and value of the first of `count` elements (i32 or i64) that the range does not permit.
struct BadIndex {
  int64_t position = 0, value = 0;
};
std::optional<BadIndex> first_outside(DType dtype, const void* indices, int64_t count, const IndexRange& range);

// "[2, 5]": the position in a tensor of these dims.
std::string position_text(const Dims& dims, int64_t position);

}  // namespace whale
