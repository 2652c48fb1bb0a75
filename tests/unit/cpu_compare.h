// One op on the CPU device against the reference device: same operands, same attributes.
#pragma once

#include <string>
#include <vector>

#include "device/device.h"
#include "ops/op.h"

namespace whale::test {

// An operand: noise in [-1, 1) unless values are given. Absent: no dtype.
struct Input {
  DType dtype{};
  Dims dims;
  std::vector<double> values;
  uint64_t seed = 0;  // 0: by position
};
inline Input f32(Dims dims) { return {DType::kF32, std::move(dims), {}}; }
inline Input bf16(Dims dims) { return {DType::kBF16, std::move(dims), {}}; }
inline Input absent() { return {}; }

// What an op gives on a device of `kind` ("ref" or "cpu" with that many cores), as doubles, one array a result. On cpu
// it runs twice and the two runs must be equal bit for bit; results are filled with garbage before.
std::vector<std::vector<double>> run_op(DeviceKind kind, int cores, OpCode op, const Attrs& attrs,
                                        const std::vector<Input>& inputs, const std::vector<DType>& result_types = {},
                                        const OpenOptions& options = {});

// Runs on ref, on cpu with one core and with two (bf16: with its instructions and without), and compares: |cpu - ref|
// <= tolerance * max(1e-6, max |ref|), for each result.
void compare(OpCode op, const Attrs& attrs, const std::vector<Input>& inputs, double tolerance);

// 2e-5, or 1.6e-2 (two bf16 roundings) when an operand is bf16.
double usual_tolerance(const std::vector<Input>& inputs);
inline void compare(OpCode op, const Attrs& attrs, const std::vector<Input>& inputs) {
  compare(op, attrs, inputs, usual_tolerance(inputs));
}

}  // namespace whale::test
