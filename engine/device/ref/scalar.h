// The elementwise ops as functions of numbers; elementwise.cc and fused.cc run them over tensors.
#pragma once

#include <functional>

#include "device/ref/access.h"
#include "ops/op.h"

namespace whale::ref {

// Of the operands' elements; what it gives is still to be rounded to the type of the result, or to wrap. `from`: type
// of the first operand. Null: no function of numbers alone.
using Scalar = std::function<Number(const Number* x)>;
Scalar scalar(OpCode op, DType from, DType to);

using Unary = double (*)(double x);
Unary activation(std::string_view name);  // "" and "none": null; throws on an unknown name

}  // namespace whale::ref
