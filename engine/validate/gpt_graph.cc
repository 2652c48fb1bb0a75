#include "validate/gpt_graph.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/format.h"
#include "ops/op.h"

namespace whale {
namespace {

class GptBuilder {
 public:
  GptBuilder(const GptSizes& sizes, const GptCuts& cuts) : s_(sizes), cuts_(cuts) {}

  Graph run() {
    g_.name = "gpt";
    const TensorId tokens = input("tokens"), targets = input("targets");
    const size_t stages = cuts_.layers.size();
    Scope pipeline;
    pipeline.kind = ScopeKind::kPipeline, pipeline.micro_batches = cuts_.micro_batches;
    std::vector<int64_t> depths;  // the usual warm-up, as what was measured had it
    for (size_t k = 0; k < stages; ++k)
      depths.push_back(std::min(static_cast<int64_t>(stages - k), cuts_.micro_batches));
    if (stages > 1) pipeline.schedule = fmt::format("1f1b[{}]", fmt::join(depths, ","));
    Scope replica;  // equal shares, on unlike devices too
    replica.kind = ScopeKind::kReplica, replica.count = cuts_.replicas;
    replica.shares.assign(static_cast<size_t>(cuts_.replicas), 1.0);
    enter(std::move(replica));
    enter(std::move(pipeline));
    const ScopeId around = scope_;
    TensorId x = kNone;
    int64_t layer = 0;
    for (size_t k = 0; k < stages; ++k) {
      scope_ = around;
      enter(ScopeKind::kStage, cuts_.ways);
      stage_ = scope_;
      if (cuts_.ways > 1) enter(ScopeKind::kSplit, cuts_.ways);
      if (k == 0) x = embed(tokens);
      for (int64_t l = 0; l < cuts_.layers[k]; ++l, ++layer) x = block(x, "block" + std::to_string(layer));
      if (k + 1 < stages) continue;
      x = norm(x, "norm");
      const TensorId logits = product(x, "classifier", s_.hidden, s_.vocabulary, "columns");
      g_.training.loss = op("reduce_mean", {op("cross_entropy", {logits, targets})}, {}, "loss");
    }
    g_.training.optimizer.kind = OptimizerKind::kAdam;
    g_.training.precision = Precision::kBFloat16;
    return std::move(g_);
  }

 private:
  void enter(Scope scope) {
    scope.parent = scope_;
    g_.scopes.push_back(std::move(scope));
    scope_ = static_cast<ScopeId>(g_.scopes.size()) - 1;
  }
  void enter(ScopeKind kind, int64_t count) {
    Scope scope;
    scope.kind = kind, scope.count = count;
    enter(std::move(scope));
  }

  void enter_name(const std::string& name) {
    Scope scope;
    scope.kind = ScopeKind::kName, scope.name = name;
    enter(std::move(scope));
  }

  TensorId input(const char* name) {
    Tensor t;
    t.name = name, t.dtype = DType::kI32, t.dims = {s_.batch, s_.sequence};
    t.kind = TensorKind::kInput, t.batch_dim = 0;
    g_.tensors.push_back(std::move(t));
    g_.inputs.push_back(static_cast<TensorId>(g_.tensors.size()) - 1);
    return g_.inputs.back();
  }
  TensorId parameter(const std::string& name, Dims dims) {
    Tensor t;
    t.name = name, t.dims = std::move(dims), t.kind = TensorKind::kVariable;
    g_.tensors.push_back(std::move(t));
    Variable v;
    v.tensor = static_cast<TensorId>(g_.tensors.size()) - 1;
    v.init = {.kind = InitKind::kNormal, .a = 0, .b = 0.02, .file = {}, .key = {}};
    g_.variables.push_back(v);
    return v.tensor;
  }
  TensorId op(const char* code, TensorIds inputs, Attrs attrs = {}, std::string name = {}) {
    return g_.op(append_op(g_, code_of(code), std::move(inputs), std::move(attrs), scope_, std::move(name))).outputs[0];
  }
  // Along the split, by this factor; what stands outside is cut as the planner likes.
  TensorId cut(const char* factor, const char* code, TensorIds inputs, Attrs attrs = {}, std::string name = {}) {
    const ScopeId around = scope_;
    if (cuts_.ways > 1) {
      scope_ = stage_;
      if (!block_.empty()) enter_name(block_);
      enter(ScopeKind::kSplit, cuts_.ways);
      g_.scopes.back().factor = factor;
    }
    const TensorId made = op(code, std::move(inputs), std::move(attrs), std::move(name));
    scope_ = around;
    return made;
  }
  TensorId product(TensorId x, const std::string& name, int64_t from, int64_t to, const char* factor) {
    return cut(factor, "matmul", {x, parameter(name + ".weight", {from, to})}, {}, name);
  }
  TensorId linear(TensorId x, const std::string& name, int64_t from, int64_t to, const char* factor) {
    return op("add", {product(x, name, from, to, factor), parameter(name + ".bias", {to})});
  }
  TensorId norm(TensorId x, const std::string& name) {
    return op("layer_norm", {x, parameter(name + ".weight", {s_.hidden}), parameter(name + ".bias", {s_.hidden})}, {},
              name);
  }
  TensorId reshape(TensorId x, Dims dims) { return op("reshape", {x}, {{"shape", Ints(dims)}}); }
  TensorId dropped(TensorId x) {
    return s_.dropout > 0 ? op("dropout", {x}, {{"rate", s_.dropout}, {"key", ++keys_}}) : x;
  }

  TensorId embed(TensorId tokens) {
    const TensorId found =
        cut("vocabulary", "embedding", {parameter("tokens.weight", {s_.vocabulary, s_.hidden}), tokens});
    return dropped(op("add", {found, parameter("positions.weight", {s_.sequence, s_.hidden})}));
  }

  TensorId fused(TensorId packed, const std::string& name) {
    const TensorId heads = reshape(packed, {s_.batch, s_.sequence, 3 * s_.heads, s_.hidden / s_.heads});
    return cut("heads", "attention", {heads},
               {{"causal", true}, {"kv_heads", s_.heads}, {"dropout", s_.dropout}, {"key", ++keys_}}, name);
  }
  // The mask costs nothing beside the softmax, and is left out.
  TensorId with_scores(TensorId packed) {
    const int64_t b = s_.batch, t = s_.sequence, d = s_.hidden / s_.heads;
    packed = reshape(packed, {b, t, s_.heads, 3 * d});
    const auto part = [&](int64_t k) {
      const TensorId x =
          op("slice", {packed}, {{"starts", Ints{0, 0, 0, k * d}}, {"limits", Ints{b, t, s_.heads, (k + 1) * d}}});
      return op("transpose", {x}, {{"perm", Ints{0, 2, 1, 3}}});
    };
    const TensorId scores = op("softmax", {op("matmul", {part(0), part(1)}, {{"transpose_b", true}})});
    return op("transpose", {op("matmul", {scores, part(2)})}, {{"perm", Ints{0, 2, 1, 3}}});
  }

  TensorId block(TensorId x, const std::string& name) {
    const ScopeId around = scope_;
    enter_name(block_ = name);
    const int64_t b = s_.batch, t = s_.sequence, h = s_.hidden;
    TensorId a = linear(norm(x, name + ".norm1"), name + ".qkv", h, 3 * h, "columns");
    a = s_.keeps_scores ? with_scores(a) : fused(a, name + ".attention");
    x = op("add", {x, dropped(linear(reshape(a, {b, t, h}), name + ".out", h, h, "rows"))});
    TensorId f = op("gelu", {linear(norm(x, name + ".norm2"), name + ".up", h, 4 * h, "columns")});
    x = op("add", {x, dropped(linear(f, name + ".down", 4 * h, h, "rows"))});
    scope_ = around, block_.clear();
    return x;
  }

  const GptSizes& s_;
  const GptCuts& cuts_;
  Graph g_;
  ScopeId scope_ = 0, stage_ = 0;
  std::string block_;
  int64_t keys_ = 0;
};

}  // namespace

Graph gpt_graph(const GptSizes& sizes, const GptCuts& cuts) { return GptBuilder(sizes, cuts).run(); }

}  // namespace whale
