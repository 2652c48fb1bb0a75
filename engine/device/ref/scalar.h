// The elementwise ops as functions of numbers; elementwise.cc and fused.cc run them over tensors.
#pragma once

#include "ops/op.h"

namespace whale::ref {

using Unary = double (*)(double x);
using Binary = double (*)(double a, double b);

Unary unary(OpCode op);                       // null: not a function of one number
Binary binary(OpCode op);                     // null: not a function of two numbers
double cast(DType from, DType to, double x);  // what is to be stored; rounding to `to` is the store's
double where(double condition, double a, double b);
Unary activation(std::string_view name);  // "" and "none": null; throws on an unknown name

}  // namespace whale::ref
