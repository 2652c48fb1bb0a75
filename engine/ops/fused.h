// A chain of elementwise ops as data: the attribute `ops` of the `fused` op, and the body of a kernel that runs it.
// A step's operands are numbered: 0 .. n-1 the fused op's inputs, n + i the result of step i.
#pragma once

#include <optional>
#include <vector>

#include "ops/op.h"

namespace whale {

struct FusedStep {
  OpCode code{};
  DType dtype = DType::kF32;  // of the result
  std::vector<int> operands;  // at most 3
  double value = 0;           // dropout: rate; pow etc.: unused
  uint64_t key = 0;           // dropout
};

struct FusedBody {
  std::vector<FusedStep> steps;
  std::vector<int> results;  // operand numbers that are outputs of the fused op
};

// The op as a step without its operands; none where it is no step, or its attributes say more than a step does.
std::optional<FusedStep> step_of(const Op& op, DType result);

// As attributes: "ops" ints [count, (code, dtype, key, operand count, operands...)*, results...], "values" floats (one
// per step).
Attrs encode(const FusedBody& body, int inputs);
FusedBody decode(const Attrs& attrs, int inputs);  // throws on malformed data
int result_count(const Attrs& attrs);              // of what decode() accepts

}  // namespace whale
