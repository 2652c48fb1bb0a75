// Reverse mode: the gradient of the loss by every trainable parameter, as ops appended to the graph.
#include <algorithm>

#include "grad/passes.h"
#include "grad/rewrite.h"
#include "ops/grad_builder.h"

namespace whale {
namespace {

class Reverse {
 public:
  explicit Reverse(Graph& graph)
      : g_(graph),
        forward_(graph.ops.size()),
        needs_(graph.tensors.size()),
        of_parameters_(graph.tensors.size()),
        grads_(graph.tensors.size()) {}

  void run() {
    mark();
    const TensorId loss = g_.training.loss;
    if (!needs_[static_cast<size_t>(loss)]) return;
    place_ = g_.tensor(loss).producer;
    seed(loss);
    for (size_t i = forward_; i-- > 0;) backward(static_cast<OpId>(i));
    for (const Variable& v : std::vector<Variable>(g_.variables)) collect(v);
  }

 private:
  struct Part {
    OpId use;  // the forward op that the contribution comes from
    TensorId grad;
  };
  Graph& g_;
  const size_t forward_;
  std::vector<bool> needs_;               // per forward tensor: depends on a trainable parameter
  std::vector<bool> of_parameters_;       // per forward tensor: follows from variables alone
  std::vector<std::vector<Part>> grads_;  // per forward tensor
  OpId place_ = kNone;

  void mark() {
    for (const Variable& v : g_.variables)
      if (v.role == Role::kParameter && v.trainable && is_float(g_.tensor(v.tensor).dtype))
        needs_[static_cast<size_t>(v.tensor)] = true;
    for (const Variable& v : g_.variables) of_parameters_[static_cast<size_t>(v.tensor)] = true;
    for (const Op& op : g_.ops) {
      const bool fixed = std::all_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) {
        return id == kNone || of_parameters_[static_cast<size_t>(id)];
      });
      for (const TensorId id : op.outputs) of_parameters_[static_cast<size_t>(id)] = fixed;
      if (has_flag(op.code, kNoGradient)) continue;
      const bool any = std::any_of(op.inputs.begin(), op.inputs.end(),
                                   [&](TensorId id) { return id != kNone && needs_[static_cast<size_t>(id)]; });
      if (!any) continue;
      for (const TensorId id : op.outputs)
        if (is_float(g_.tensor(id).dtype)) needs_[static_cast<size_t>(id)] = true;
    }
  }

  // An op beside the rules: seeds and sums.
  TensorId emit(OpId at, OpCode code, TensorIds inputs, Attrs attrs) {
    const OpId id = append_op(g_, code, std::move(inputs), std::move(attrs), g_.op(at).scope);
    Op& op = g_.op(id);
    op.phase = Phase::kBackward;
    op.origin = at;
    op.location = g_.op(at).location;
    return op.outputs[0];
  }

  // In f16 the loss counts loss_scale times, so that small gradients are not lost; add_updates takes it back.
  void seed(TensorId loss) {
    if (g_.training.precision == Precision::kFloat16) {
      g_.tensors.push_back(
          {.name = "loss_scale", .dtype = g_.tensor(loss).dtype, .dims = {}, .kind = TensorKind::kStep});
      grads_.resize(g_.tensors.size());
      needs_.resize(g_.tensors.size());
      of_parameters_.resize(g_.tensors.size());
      grads_[static_cast<size_t>(loss)].push_back({place_, static_cast<TensorId>(g_.tensors.size() - 1)});
      return;
    }
    const Attrs attrs{{"shape", Dims{}}, {"value", 1.0}, {"dtype", std::string(name_of(g_.tensor(loss).dtype))}};
    grads_[static_cast<size_t>(loss)].push_back({place_, emit(place_, OpCode::k_fill, {}, attrs)});
  }

  // Activations are summed as contributions arrive (so that only one is kept); a variable's wait for their turn:
  // uses are summed in the order of the forward program.
  void contribute(OpId use, TensorId to, TensorId grad) {
    // A parameter's cast is passed at once: sums are then in the parameter's type, never rounded on the way. So is one
    // of what follows from parameters alone: it is small, and all samples' gradients meet there.
    const OpId maker = g_.tensor(to).producer;
    if (maker != kNone && g_.op(maker).code == OpCode::k_cast && passes(g_.op(maker).inputs[0], to)) {
      to = g_.op(maker).inputs[0];
      if (!needs_[static_cast<size_t>(to)]) return;
      const DType want = g_.tensor(to).dtype;
      if (g_.tensor(grad).dtype != want)
        grad = emit(use, OpCode::k_cast, {grad}, {{"dtype", std::string(name_of(want))}});
    }
    auto& parts = grads_[static_cast<size_t>(to)];
    if (parts.empty() || is_variable(g_, to))
      parts.push_back({use, grad});
    else
      parts[0].grad = emit(use, OpCode::k_add, {parts[0].grad, grad}, {});
  }

  bool passes(TensorId from, TensorId to) const {
    return is_variable(g_, from) ||
           (of_parameters_[static_cast<size_t>(from)] && keeps_sums_of(g_.tensor(from).dtype, g_.tensor(to).dtype));
  }

  void backward(OpId id) {
    TensorIds grads;
    bool any = false;
    for (const TensorId y : g_.op(id).outputs) {
      const auto& parts = grads_[static_cast<size_t>(y)];
      grads.push_back(parts.empty() ? kNone : parts[0].grad);
      any |= !parts.empty();
    }
    const OpDef& d = def(g_.op(id).code);
    if (!any || (d.flags & kNoGradient)) return;
    std::vector<bool> wanted;
    for (const TensorId x : g_.op(id).inputs) wanted.push_back(x != kNone && needs_[static_cast<size_t>(x)]);
    if (std::none_of(wanted.begin(), wanted.end(), [](bool w) { return w; })) return;
    const TensorIds inputs = g_.op(id).inputs;
    try {
      if (!d.gradient)
        throw unimplemented("op '{}' has no gradient, but the loss depends on a parameter through it", d.name);
      GradBuilder builder(g_, id, std::move(grads));
      builder.needs_grad = wanted;
      d.gradient(builder);
      for (size_t k = 0; k < inputs.size(); ++k)
        if (wanted[k] && builder.results()[k] != kNone) contribute(id, inputs[k], builder.results()[k]);
    } catch (Error& e) {
      e.at_op(g_.op(id).name).at_scope(g_.scope_path(g_.op(id).scope));
      throw;
    }
  }

  void collect(const Variable& v) {
    auto& parts = grads_[static_cast<size_t>(v.tensor)];
    if (parts.empty() || !needs_[static_cast<size_t>(v.tensor)]) return;
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.use < b.use; });
    TensorId sum = parts[0].grad;
    for (size_t i = 1; i < parts.size(); ++i) sum = emit(parts[i].use, OpCode::k_add, {sum, parts[i].grad}, {});
    g_.gradients.push_back({g_.tensor(v.tensor).name, sum});
  }
};

}  // namespace

void differentiate(Graph& graph) {
  const TensorId loss = graph.training.loss;
  if (loss == kNone) throw invalid("the graph has no loss to differentiate");
  if (!graph.gradients.empty()) throw internal("the graph has been differentiated before");
  if (!graph.tensor(loss).dims.empty() || !is_float(graph.tensor(loss).dtype))
    throw invalid("the loss '{}' is {} {}, expected a floating-point scalar", graph.tensor(loss).name,
                  name_of(graph.tensor(loss).dtype), to_string(graph.tensor(loss).dims));
  if (graph.tensor(loss).producer == kNone)
    throw invalid("the loss '{}' is not computed by any op", graph.tensor(loss).name);
  Reverse(graph).run();
}

}  // namespace whale
