// Split weights (Kalamkar et al., "Optimizing deep learning recommender systems training on CPU cluster architectures",
// 2020): the upper half of an fp32 weight's bits is the model's bf16 weight, the lower half is state that only the
// update reads. After differentiation, so that gradients are those of fp32 parameters.
#include "grad/passes.h"
#include "grad/rewrite.h"
#include "ops/op.h"

namespace whale {
namespace {

bool is_bf16_cast(const Graph& g, const Op& op) {
  return op.code == OpCode::k_cast && g.tensor(op.outputs[0]).dtype == DType::kBF16;
}

class SplitPass {
 public:
  explicit SplitPass(Graph& graph) : r_(graph), g_(graph), wide_(graph.tensors.size(), kNone) {}

  void run() {
    std::vector<bool> split(g_.tensors.size());
    for (const Variable& v : g_.variables) {
      Tensor& t = g_.tensor(v.tensor);
      if (v.role != Role::kParameter || !v.trainable || t.dtype != DType::kF32) continue;
      split[v.tensor] = true;
      t.dtype = DType::kBF16;
    }
    for (size_t i = 0; i < r_.old.size(); ++i) {
      Op& op = r_.old[i];
      const auto reads = [&](TensorId id) {
        return id != kNone && static_cast<size_t>(id) < split.size() && split[id];
      };
      if (is_bf16_cast(g_, op) && reads(op.inputs[0])) {
        r_.replace(op.outputs[0], op.inputs[0]);
        continue;
      }
      if (has_flag(op.code, kRoundOutput) && reads(op.inputs[0])) {
        r_.keep(i, true);
        const TensorId y = g_.ops.back().outputs[0];
        r_.replace(op.outputs[0], r_.emit(i, OpCode::k_cast, {y}, {{"dtype", std::string("f32")}}));
        continue;
      }
      for (TensorId& id : op.inputs)
        if (reads(id)) id = widened(i, id);
      r_.keep(i);
    }
    r_.finish();
    clean(g_);
  }

 private:
  TensorId widened(size_t i, TensorId id) {
    TensorId& wide = wide_[id];
    if (wide == kNone) wide = r_.emit(i, OpCode::k_cast, {id}, {{"dtype", std::string("f32")}});
    return wide;
  }

  Rewriter r_;
  Graph& g_;
  std::vector<TensorId> wide_;  // an fp32 copy of the parameter, made at its first use
};

}  // namespace

void split_weights(Graph& graph) {
  if (graph.training.optimizer.split_master_weights && graph.training.precision == Precision::kBFloat16)
    SplitPass(graph).run();
}

}  // namespace whale
