// What a gradient rule works with: the forward op, the gradients of its outputs, and a way to emit ops.
#pragma once

#include "ops/op.h"

namespace whale {

class GradBuilder {
 public:
  GradBuilder(Graph& graph, OpId forward, TensorIds output_grads)
      : graph(graph),
        forward_(forward),
        output_grads_(std::move(output_grads)),
        input_grads_(graph.op(forward).inputs.size(), kNone) {}

  Graph& graph;
  // A copy each time: emitting may move the graph's vectors.
  Op op() const { return graph.op(forward_); }
  TensorId input(int i) const;  // kNone when absent
  TensorId output(int i) const { return graph.op(forward_).outputs[i]; }
  TensorId grad(int i = 0) const { return output_grads_[i]; }  // kNone: no influence
  const TensorType type(TensorId id) const { return {graph.tensor(id).dtype, graph.tensor(id).dims}; }
  Dims dims(TensorId id) const { return graph.tensor(id).dims; }  // a copy: emitting moves the tensors
  bool wants(int i) const;         // input i is present, floating point, and needs a gradient
  void set(int i, TensorId grad);  // the gradient of input i: same shape; cast to its dtype if it differs

  // Appends an op (phase backward, scope and origin of the forward op); returns its first output.
  TensorId emit(OpCode code, TensorIds inputs, Attrs attrs = {});
  TensorIds emit_all(OpCode code, TensorIds inputs, Attrs attrs = {});

  // Common pieces.
  TensorId add(TensorId a, TensorId b) { return emit(OpCode::k_add, {a, b}); }
  TensorId mul(TensorId a, TensorId b) { return emit(OpCode::k_mul, {a, b}); }
  TensorId neg(TensorId a) { return emit(OpCode::k_neg, {a}); }
  TensorId constant(double value, DType dtype);  // rank 0
  TensorId reshape(TensorId a, const Dims& dims);
  TensorId sum_to(TensorId a, const Dims& dims);  // undo broadcasting: reduce_sum to exactly `dims`
  TensorId cast(TensorId a, DType dtype);         // no op when equal

  std::vector<bool> needs_grad;  // per input; filled by the pass
  const TensorIds& results() const { return input_grads_; }

 private:
  OpId forward_;
  TensorIds output_grads_;
  TensorIds input_grads_;
};

}  // namespace whale
