// Reverse mode: the gradient of the loss by every trainable parameter, as ops appended to the graph.
#include <algorithm>

#include "grad/gradients.h"
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

  // The gradients of the sum of `of` by each of `by`, as forward ops.
  TensorIds run(TensorId of, const TensorIds& by) {
    wanted_ = by;
    for (const TensorId id : by) needs_[id] = true;
    follow();
    TensorIds out;
    if (needs_[of]) {
      place_ = g_.tensor(of).producer;
      const Attrs ones{
          {"shape", g_.tensor(of).dims}, {"value", 1.0}, {"dtype", std::string(name_of(g_.tensor(of).dtype))}};
      // `of` itself may be asked for.
      grads_[of] = {place_, laid_along(place_, emit(place_, OpCode::k_fill, {}, ones), of)};
      for (size_t i = forward_; i-- > 0;) backward(static_cast<OpId>(i));
    }
    for (const TensorId id : by) out.push_back(grads_[id].grad);
    for (size_t i = forward_; i < g_.ops.size(); ++i) g_.ops[i].phase = Phase::kForward, g_.ops[i].origin = kNone;
    return out;
  }

  void run() {
    mark();
    const TensorId loss = g_.training.loss;
    if (!needs_[loss]) return;
    place_ = g_.tensor(loss).producer;
    seed(loss);
    for (size_t i = forward_; i-- > 0;) backward(static_cast<OpId>(i));
    for (const Variable& v : g_.variables)
      if (const TensorId grad = grads_[v.tensor].grad; grad != kNone)
        g_.gradients.push_back({g_.tensor(v.tensor).name, grad});
  }

 private:
  struct Part {
    OpId use = kNone;  // the forward op that the contribution comes from
    TensorId grad = kNone;
  };
  Graph& g_;
  const size_t forward_;
  std::vector<bool> needs_;          // per forward tensor: depends on a trainable parameter
  std::vector<bool> of_parameters_;  // per forward tensor: follows from variables alone
  std::vector<Part> grads_;          // per forward tensor: the sum of what has come so far, and whence the last came
  OpId place_ = kNone;
  OpId fresh_ = 0;    // the first op of the rule that ran last
  TensorIds wanted_;  // of a user's own gradients; empty: those of all trained parameters

  void mark() {
    for (const Variable& v : g_.variables)
      if (v.role == Role::kParameter && v.trainable && is_float(g_.tensor(v.tensor).dtype)) needs_[v.tensor] = true;
    follow();
  }
  void follow() {
    for (const Variable& v : g_.variables) of_parameters_[v.tensor] = true;
    for (const Op& op : g_.ops) {
      const bool fixed = std::all_of(op.inputs.begin(), op.inputs.end(),
                                     [&](TensorId id) { return id == kNone || of_parameters_[id]; });
      for (const TensorId id : op.outputs) of_parameters_[id] = fixed;
      if (has_flag(op.code, kNoGradient)) continue;
      const bool any =
          std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return id != kNone && needs_[id]; });
      if (!any) continue;
      for (const TensorId id : op.outputs)
        if (is_float(g_.tensor(id).dtype)) needs_[id] = true;
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

  // ---- names: messages about a plan speak of a model's tensors. Where several passes give one name, name_apart tells
  // them apart. A user's own gradients keep what append_op calls them: names in a user's graph are the user's.
  static std::string gradient_of(const Tensor& t) { return t.name + ".grad"; }
  void call(OpId id, const std::string& name) {
    Op& op = g_.op(id);
    for (const TensorId y : op.outputs) {
      std::string& own = g_.tensor(y).name;
      own = name + own.substr(op.name.size());
    }
    op.name = name;
  }
  // What a rule has emitted, by the op that it is the rule of.
  void call_after(OpId forward) {
    if (!wanted_.empty()) return;
    for (auto id = fresh_; id < std::ssize(g_.ops); ++id)
      call(id, fmt::format("{}.{}", g_.op(forward).name, def(g_.op(id).code).name));
  }
  // A value that was made just now. One of an earlier op, which is several tensors' gradient, keeps its name.
  void call_gradient(TensorId grad, const std::string& name) {
    const OpId maker = g_.tensor(grad).producer;
    if (!wanted_.empty() || maker < fresh_) return;
    if (g_.op(maker).outputs.size() == 1)
      call(maker, name);
    else
      g_.tensor(grad).name = name;
  }
  // A part of a gradient, which goes on in a sum: by its use.
  void call_part(TensorId part, TensorId to, OpId use) {
    Tensor& t = g_.tensor(part);
    const std::string name = gradient_of(g_.tensor(to));
    if (!wanted_.empty() || t.name != name) return;
    if (const OpId maker = t.producer; g_.op(maker).outputs.size() == 1)
      call(maker, name + "@" + g_.op(use).name);
    else
      t.name += "@" + g_.op(use).name;
  }

  // In f16 the loss counts loss_scale times, so that small gradients are not lost; add_updates takes it back.
  void seed(TensorId loss) {
    if (g_.training.precision == Precision::kFloat16) {
      g_.tensors.push_back(
          {.name = "loss_scale", .dtype = g_.tensor(loss).dtype, .dims = {}, .kind = TensorKind::kStep});
      grads_.resize(g_.tensors.size());
      needs_.resize(g_.tensors.size());
      of_parameters_.resize(g_.tensors.size());
      grads_[loss] = {place_, static_cast<TensorId>(g_.tensors.size() - 1)};
      return;
    }
    const Attrs attrs{{"shape", Dims{}}, {"value", 1.0}, {"dtype", std::string(name_of(g_.tensor(loss).dtype))}};
    const TensorId one = emit(place_, OpCode::k_fill, {}, attrs);
    call(g_.tensor(one).producer, gradient_of(g_.tensor(loss)));
    grads_[loss] = {place_, one};
  }

  // Contributions are added as they arrive, a parameter's from its last use to its first: kept are the sum and one of
  // them, not one for each use.
  void contribute(OpId use, TensorId to, TensorId grad) {
    // A parameter's cast is passed at once: sums are then in the parameter's type, never rounded on the way. So is one
    // of what follows from parameters alone: it is small, and all samples' gradients meet there.
    call_gradient(grad, gradient_of(g_.tensor(to)));
    const OpId maker = g_.tensor(to).producer;
    if (maker != kNone && g_.op(maker).code == OpCode::k_cast && passes(g_.op(maker).inputs[0], to)) {
      to = g_.op(maker).inputs[0];
      if (!needs_[to]) return;
      const DType want = g_.tensor(to).dtype;
      if (g_.tensor(grad).dtype != want)
        grad = emit(use, OpCode::k_cast, {grad}, {{"dtype", std::string(name_of(want))}});
      call_gradient(grad, gradient_of(g_.tensor(to)));
    }
    const Part before = grads_[to], part{use, grad};
    grads_[to] = {use, before.grad == kNone ? grad : sum(to, before, part)};
  }
  TensorId sum(TensorId to, const Part& a, const Part& b) {
    call_part(a.grad, to, a.use), call_part(b.grad, to, b.use);
    const TensorId out = emit(b.use, OpCode::k_add, {a.grad, b.grad}, {});
    if (wanted_.empty()) call(g_.tensor(out).producer, gradient_of(g_.tensor(to)));
    return out;
  }

  bool passes(TensorId from, TensorId to) const {
    if (!wanted_.empty()) return false;  // the cast itself may be asked for
    return is_variable(g_, from) || (of_parameters_[from] && keeps_sums_of(g_.tensor(from).dtype, g_.tensor(to).dtype));
  }

  void backward(OpId id) {
    TensorIds grads;
    bool any = false;
    for (const TensorId y : g_.op(id).outputs) {
      grads.push_back(grads_[y].grad);
      any |= grads.back() != kNone;
    }
    const OpDef& d = def(g_.op(id).code);
    if (!any || (d.flags & kNoGradient)) return;
    std::vector<bool> wanted;
    for (const TensorId x : g_.op(id).inputs) wanted.push_back(x != kNone && needs_[x]);
    if (std::none_of(wanted.begin(), wanted.end(), [](bool w) { return w; })) return;
    const TensorIds inputs = g_.op(id).inputs;
    try {
      if (!d.gradient)
        throw unimplemented("op '{}' has no gradient, but {} through it", d.name,
                            wanted_.empty() ? "the loss depends on a parameter"
                                            : "what is differentiated depends on what it is differentiated by");
      if (!wanted_.empty() && has_flag(g_.op(id).code, kRandom))
        throw unimplemented(
            "op '{}' is random, and its numbers are fixed when the graph is planned: there is no gradient through it "
            "in the graph itself",
            d.name);
      // Whose gradient is made larger again, to extents that the graph has.
      const bool spreads =
          !wanted_.empty() && (g_.op(id).code == OpCode::k_reduce_sum || g_.op(id).code == OpCode::k_reduce_mean);
      const bool mean = !wanted_.empty() && g_.op(id).code == OpCode::k_reduce_mean;
      if (mean) grads = {divided_by_count(id, grads[0])};
      GradBuilder builder(g_, id, std::move(grads));
      builder.needs_grad = wanted;
      fresh_ = static_cast<OpId>(g_.ops.size());
      (mean ? def(OpCode::k_reduce_sum) : d).gradient(builder);
      call_after(id);
      for (size_t k = 0; k < inputs.size(); ++k)
        if (wanted[k] && builder.results()[k] != kNone)
          contribute(id, inputs[k], spreads ? laid_along(id, builder.results()[k], inputs[k]) : builder.results()[k]);
    } catch (Error& e) {
      e.at_op(g_.op(id).name).at_scope(g_.scope_path(g_.op(id).scope));
      throw;
    }
  }

  // In a user's graph extents may be of the batch, of which another run has another: `value`, of the shape of x, has
  // the extents that x has there, by way of the comparison.
  TensorId laid_along(OpId use, TensorId value, TensorId x) {
    const TensorId same = emit(use, OpCode::k_equal, {x, x}, {});  // whatever it says
    return emit(use, OpCode::k_where, {same, value, value}, {});
  }

  // A mean's denominator is counted there, from a one for each element.
  TensorId divided_by_count(OpId mean, TensorId grad) {
    const TensorId x = g_.op(mean).inputs[0];
    const Tensor from = g_.tensor(x);
    const DType exact = accumulate_dtype(from.dtype), narrow = g_.tensor(grad).dtype;
    const auto cast = [&](TensorId id, DType to) {
      return g_.tensor(id).dtype == to ? id : emit(mean, OpCode::k_cast, {id}, {{"dtype", std::string(name_of(to))}});
    };
    const TensorId one =
        emit(mean, OpCode::k_fill, {}, {{"shape", from.dims}, {"value", 1.0}, {"dtype", std::string(name_of(exact))}});
    const TensorId ones = laid_along(mean, one, x);
    const Op op = g_.op(mean);
    const TensorId count = emit(mean, OpCode::k_reduce_sum, {ones},
                                {{"axes", op.attrs.at("axes")}, {"keep_dims", op.attrs.at("keep_dims")}});
    return cast(emit(mean, OpCode::k_div, {cast(grad, exact), count}, {}), narrow);
  }
};

}  // namespace

TensorIds append_gradients(Graph& graph, TensorId of, const TensorIds& by) {
  if (!is_float(graph.tensor(of).dtype))
    throw invalid("'{}' is {}; only floating-point values are differentiated", graph.tensor(of).name,
                  name_of(graph.tensor(of).dtype));
  if (graph.tensor(of).producer == kNone)
    throw invalid("'{}' is not computed by any op: there is nothing to differentiate", graph.tensor(of).name);
  for (const TensorId id : by)
    if (!is_float(graph.tensor(id).dtype))
      throw invalid("'{}' is {}; gradients are by floating-point values", graph.tensor(id).name,
                    name_of(graph.tensor(id).dtype));
  return Reverse(graph).run(of, by);
}

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
