// What the rules of optimizers work with: ops of the update phase, state variables, and the step's scalars.
#pragma once

#include <string>
#include <unordered_map>

#include "ops/op.h"

namespace whale {

struct UpdateBuilder {
  explicit UpdateBuilder(Graph& graph) : g(graph) {}

  Graph& g;
  OpId origin = kNone;     // ops emitted now take its scope
  TensorId of = kNone;     // and are named after this variable
  TensorId rate = kNone;   // the learning rate
  TensorId scale = kNone;  // the clipping factor on gradients; kNone: none

  TensorIds emit_all(OpCode code, TensorIds inputs, Attrs attrs = {});
  TensorId emit(OpCode code, TensorIds inputs, Attrs attrs = {}) {
    return emit_all(code, std::move(inputs), std::move(attrs))[0];
  }
  TensorId constant(double value, DType dtype);
  TensorId step_scalar(const char* name, DType dtype);
  TensorId updates() { return step_scalar("updates", DType::kI64); }
  // A new state variable "<parameter>/<state>" of the accumulate dtype, zero at first.
  TensorId state(TensorId parameter, const char* state_name, Dims dims);
  TensorId state(TensorId parameter, const char* state_name, Dims dims, DType dtype);
  // Of another shape: `of_owner`, the parameter's dimension that each dimension is.
  TensorId state(TensorId parameter, const char* state_name, Dims dims, std::vector<int> of_owner);
  void set_next(TensorId variable, TensorId next);

 private:
  std::unordered_map<TensorId, size_t> variable_number_;  // of those that were there when one was last looked for
  std::unordered_map<std::string, TensorId> step_scalars_;
};

// Adafactor's update of one parameter, composed of primitive ops.
void adafactor(UpdateBuilder& b, TensorId p, TensorId grad, bool decay, const Optimizer& o);

}  // namespace whale
