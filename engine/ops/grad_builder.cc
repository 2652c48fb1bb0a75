#include "ops/grad_builder.h"

namespace whale {

TensorId GradBuilder::input(int i) const {
  const TensorIds& inputs = graph.op(forward_).inputs;
  return static_cast<size_t>(i) < inputs.size() ? inputs[i] : kNone;
}

bool GradBuilder::wants(int i) const {
  const TensorId id = input(i);
  if (id == kNone || !is_float(graph.tensor(id).dtype)) return false;
  return needs_grad.empty() || (static_cast<size_t>(i) < needs_grad.size() && needs_grad[i]);
}

void GradBuilder::set(int i, TensorId grad) {
  if (!wants(i) || grad == kNone) return;
  const TensorId id = input(i);
  WHALE_CHECK(dims(grad) == dims(id), "the gradient rule of an op gave a gradient of another shape than its operand");
  input_grads_[i] = cast(grad, graph.tensor(id).dtype);
}

TensorIds GradBuilder::emit_all(OpCode code, TensorIds inputs, Attrs attrs) {
  const OpId id = append_op(graph, code, std::move(inputs), std::move(attrs), graph.op(forward_).scope);
  Op& made = graph.op(id);
  const Op& forward = graph.op(forward_);
  made.phase = Phase::kBackward;
  made.region = forward.region;
  made.origin = forward_;
  made.location = forward.location;
  return made.outputs;
}

TensorId GradBuilder::emit(OpCode code, TensorIds inputs, Attrs attrs) {
  return emit_all(code, std::move(inputs), std::move(attrs)).front();
}

TensorId GradBuilder::constant(double value, DType dtype) {
  return emit(OpCode::k_fill, {}, {{"shape", Ints{}}, {"value", value}, {"dtype", std::string(name_of(dtype))}});
}

TensorId GradBuilder::reshape(TensorId a, const Dims& to) {
  if (dims(a) == to) return a;
  return emit(OpCode::k_reshape, {a}, {{"shape", to}});
}

TensorId GradBuilder::sum_to(TensorId a, const Dims& to) {
  const Dims from = dims(a);
  if (from == to) return a;
  WHALE_CHECK(from.size() >= to.size(), "sum_to a larger rank");
  const size_t extra = from.size() - to.size();
  Ints axes;
  for (size_t i = 0; i < from.size(); ++i)
    if (i < extra || (to[i - extra] == 1 && from[i] != 1)) axes.push_back(static_cast<int64_t>(i));
  if (!axes.empty()) a = emit(OpCode::k_reduce_sum, {a}, {{"axes", axes}});
  return reshape(a, to);
}

TensorId GradBuilder::cast(TensorId a, DType dtype) {
  if (graph.tensor(a).dtype == dtype) return a;
  return emit(OpCode::k_cast, {a}, {{"dtype", std::string(name_of(dtype))}});
}

}  // namespace whale
