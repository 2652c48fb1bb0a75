// For the family files: the declaration of every OpDef, and what several families' rules share beside rules.h.
#pragma once

#include "ops/axes.h"
#include "ops/fused.h"
#include "ops/grad_builder.h"
#include "ops/op.h"
#include "ops/rules.h"

namespace whale {

// One OpDef literal per line of ops.def, defined in its family's file: `const OpDef op_def_add = {...};`.
#define WHALE_OP(number, name) extern const OpDef op_def_##name;
#include "ops/ops.def"
#undef WHALE_OP

// Numpy broadcasting of all inputs to each output: one map factor "d<i>" per dimension of the result.
Factors elementwise_factors(const OpView& view);

}  // namespace whale
