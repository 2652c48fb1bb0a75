// Training::precision as a rewrite of the forward program; the backward ops follow from it.
//
// bf16: matrix products, convolutions and attention read bf16 (a parameter is cast once a step, and all uses share it);
// everything between them follows its operands, so activations and the residual stream are bf16 too. (torch.autocast
// keeps norms and the residual sum in f32; on a machine that is bound by memory bandwidth between the products, half
// the bytes are worth more than those bits, and kernels of norms and softmax sum in f32 anyway.) Losses, exponentials,
// logarithms and everything computed from them stay f32, as do parameters, their gradients, optimizer state and
// statistics.
//
// f16: the same casts. Its range is short, so the loss is scaled (differentiate, add_updates); parameters are the f32
// masters.
#include <map>
#include <set>

#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale {
namespace {

class LowPass {
 public:
  LowPass(Graph& graph, DType low) : r_(graph), g_(graph), low_(low) {}

  void run() {
    find_means();
    for (size_t i = 0; i < r_.old.size(); ++i) rewrite(i);
    const TensorId loss = r_.now(g_.training.loss);
    if (loss != kNone && g_.tensor(loss).dtype == low_)
      r_.replace(g_.training.loss, cast(r_.old.size() - 1, loss, DType::kF32));
    for (Variable& v : g_.variables) {
      const TensorId next = r_.now(v.next), want = v.tensor;
      if (next != kNone && g_.tensor(next).dtype != g_.tensor(want).dtype)
        v.next = cast(r_.old.size() - 1, next, g_.tensor(want).dtype);
    }
    r_.finish();
  }

 private:
  Rewriter r_;
  Graph& g_;
  DType low_;
  std::map<std::pair<TensorId, DType>, TensorId> casts_;
  // f32 values that are computed, not parameters, constants or inputs: they must not be rounded in passing.
  std::set<TensorId> wide_;
  // Sums of a mean: the old ops, and what they give here.
  std::vector<char> of_mean_;
  std::set<TensorId> sums_;

  bool is_low(TensorId id) const { return id != kNone && g_.tensor(id).dtype == low_; }
  bool is_f32(TensorId id) const { return id != kNone && g_.tensor(id).dtype == DType::kF32; }

  TensorId cast(size_t i, TensorId id, DType to) {
    const auto [it, fresh] = casts_.try_emplace({id, to}, kNone);
    if (!fresh) return it->second;
    it->second = r_.emit(i, OpCode::k_cast, {id}, {{"dtype", std::string(name_of(to))}});
    Tensor& made = g_.tensor(it->second);
    made.name = g_.op(made.producer).name = fmt::format("{}.{}", g_.tensor(id).name, name_of(to));
    return it->second;
  }
  void cast_operands(size_t i, DType from, DType to, size_t least_rank = 0) {
    for (TensorId& id : r_.old[i].inputs)
      if (id != kNone && g_.tensor(id).dtype == from && g_.tensor(id).dims.size() >= least_rank) id = cast(i, id, to);
  }

  void rewrite(size_t i) {
    Op& op = r_.old[i];
    bool low = false, wide = false, f32 = false;
    for (TensorId& id : op.inputs) {
      id = r_.now(id);
      low |= is_low(id);
      f32 |= is_f32(id);
      wide |= wide_.contains(id);
    }
    const uint32_t flags = def(op.code).flags;
    if ((flags & kRoundOutput) && narrow_variable(op.inputs[0])) return look_up_narrow(i);
    const bool to_scalar = low && is_scalar_float(op);
    if (low && !to_scalar && of_mean_[i]) return sum_wide(i);
    if (op.code == OpCode::k_mul && sums_.contains(op.inputs[0])) return round_mean(i);
    if (flags & kComputeLow) {
      cast_operands(i, DType::kF32, low_, 2);  // a bias may stay as it is
      if (!fits(op)) cast_operands(i, DType::kF32, low_);
    } else if (low && ((flags & kComputeWide) || to_scalar)) {
      cast_operands(i, low_, DType::kF32);
    } else if (low && f32 && ((flags & kElementwise) || !fits(op))) {
      // Mixed: computed f32 values win; parameters, constants and inputs are rounded.
      if (wide)
        cast_operands(i, low_, DType::kF32);
      else
        cast_operands(i, DType::kF32, low_);
    }
    const bool weak = !(flags & kComputeWide) && !to_scalar && !wide && !low;
    r_.keep(i, true);
    for (const TensorId y : r_.old[i].outputs)
      if (is_f32(y) && !weak && !narrow_variable(y)) wide_.insert(y);
    if ((flags & kRoundOutput) && is_f32(op.outputs[0])) r_.replace(op.outputs[0], cast(i, op.outputs[0], low_));
  }

  // A variable that is stored in this type, where the model reads it as f32: rounding it again changes nothing.
  bool narrow_variable(TensorId id) const {
    const Op* cast = is_f32(id) ? r_.producer(id) : nullptr;
    return cast && cast->code == OpCode::k_cast && is_low(cast->inputs[0]) && is_variable(g_, cast->inputs[0]);
  }
  // Rows of such a table, without an f32 copy of all of it.
  void look_up_narrow(size_t i) {
    r_.old[i].inputs[0] = r_.producer(r_.old[i].inputs[0])->inputs[0];
    r_.keep(i, true);
  }

  // A mean, as canonicalise makes it, is a sum that only a product with a constant reads. The sum may be beyond the
  // range that its mean fits in: it stays f32, and what is rounded is the mean.
  void find_means() {
    std::vector<int> uses(g_.tensors.size(), 0), maker(g_.tensors.size(), kNone);
    for (size_t i = 0; i < r_.old.size(); ++i) {
      for (const TensorId y : r_.old[i].outputs) maker[y] = static_cast<int>(i);
      for (const TensorId x : r_.old[i].inputs)
        if (x != kNone) ++uses[x];
    }
    for (const NamedTensor& y : g_.outputs) ++uses[y.tensor];
    const auto made_by = [&](TensorId id, OpCode code) {
      const int by = maker[id];
      return by != kNone && r_.old[by].code == code;
    };
    of_mean_.assign(r_.old.size(), 0);
    for (const Op& op : r_.old)
      if (op.code == OpCode::k_mul && made_by(op.inputs[0], OpCode::k_reduce_sum) &&
          made_by(op.inputs[1], OpCode::k_fill) && uses[op.inputs[0]] == 1)
        of_mean_[maker[op.inputs[0]]] = 1;
  }
  void sum_wide(size_t i) {
    r_.old[i].attrs["out_dtype"] = std::string(name_of(DType::kF32));
    r_.keep(i, true);
    sums_.insert(r_.old[i].outputs[0]);
  }
  void round_mean(size_t i) {
    r_.keep(i, true);
    const TensorId mean = r_.old[i].outputs[0];
    r_.replace(mean, cast(i, mean, low_));
  }

  bool is_scalar_float(const Op& op) const {
    for (const TensorId y : op.outputs)
      if (g_.tensor(y).dims.empty() && is_float(g_.tensor(y).dtype)) return true;
    return false;
  }
  bool fits(const Op& op) const {  // does the op take these types as they are (a norm with f32 scales does)
    try {
      const OpView view = view_of(g_, op);
      infer(op.code, op.attrs, view.inputs, view.present);
      return true;
    } catch (const Error&) {
      return false;
    }
  }
};

// Everything that is floating point becomes f64.
void widen(Graph& graph) {
  for (Tensor& t : graph.tensors)
    if (is_float(t.dtype)) t.dtype = DType::kF64;
  Rewriter r(graph);
  for (size_t i = 0; i < r.old.size(); ++i) {
    for (const char* name : {"dtype", "out_dtype"}) {
      const auto it = r.old[i].attrs.find(name);
      if (it == r.old[i].attrs.end()) continue;
      const std::string& given = std::get<std::string>(it->second);
      if (!given.empty() && is_float(parse_dtype(given))) it->second = std::string(name_of(DType::kF64));
    }
    r.keep(i, true);
  }
  r.finish();
}

}  // namespace

void apply_precision(Graph& graph) {
  if (graph.training.precision == Precision::kBFloat16) LowPass(graph, DType::kBF16).run();
  if (graph.training.precision == Precision::kFloat16) LowPass(graph, DType::kF16).run();
  if (graph.training.precision == Precision::kFloat64) widen(graph);
}

}  // namespace whale
