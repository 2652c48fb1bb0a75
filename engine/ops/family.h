// For the family files: the declaration of every OpDef, and what their rules share.
#pragma once

#include <cmath>

#include "ops/fused.h"
#include "ops/grad_builder.h"
#include "ops/op.h"

namespace whale {

// One OpDef literal per line of ops.def, defined in its family's file: `const OpDef op_def_add = {...};`.
#define WHALE_OP(number, name) extern const OpDef op_def_##name;
#include "ops/ops.def"
#undef WHALE_OP

// ---- shape rules: each throws with the op, the operand, what was expected and what was found -----------------------
const char* op_name(const OpView& view);
std::string input_name(const OpView& view, int i);  // "operand 'b' (number 1)"
std::string to_string(const TensorType& type);      // "f32[16,128]"
void expect_rank(const OpView& view, int i, size_t rank);
void expect_rank_at_least(const OpView& view, int i, size_t rank);
void expect_dims(const OpView& view, int i, const Dims& dims);
void expect_dtype(const OpView& view, int i, DType dtype);
void expect_float(const OpView& view, int i);
void expect_index(const OpView& view, int i);       // i32 or i64
void expect_same_dtype(const OpView& view, int i, int j);
// The attribute `name` as a dtype; `otherwise` when it is empty.
DType dtype_attr(const OpView& view, std::string_view name, DType otherwise);
// The attribute `name` when it has `count` entries; `count` times `otherwise` when it is empty.
std::vector<int64_t> ints_attr(const OpView& view, std::string_view name, size_t count, int64_t otherwise);

// ---- axes -----------------------------------------------------------------------------------------------------------
// Counts from the end when negative; throws when out of range.
int normalize_axis(std::string_view op, int64_t axis, size_t rank);
// Which dimensions the attribute `axes` names; all when it is empty.
std::vector<bool> reduced_axes(std::string_view op, const Attrs& attrs, size_t rank);
Dims leading(const Dims& dims, size_t drop = 1);    // without the last `drop` dimensions

// ---- factors --------------------------------------------------------------------------------------------------------
// Numpy broadcasting of all inputs to each output: one map factor per dimension of the result.
Factors elementwise_factors(const OpView& view);
// A factor that no operand carries yet.
Factor make_factor(const OpView& view, std::string name, FactorKind kind, int64_t extent);

// ---- cost -----------------------------------------------------------------------------------------------------------
double bytes_of(const OpView& view);                // of all operands and results
OpCost flops_and_bytes(const OpView& view, double flops);

}  // namespace whale
