// A gradient that is reduced into parts as it arrives (ZeRO 2) is whole until then. A large one is made in pieces of
// columns instead, each a product of its own with a sum of its own: no more than a piece or two are whole, and what is
// joined are parts. Columns, as parts are of rows.
#include <algorithm>
#include <map>

#include "grad/passes.h"
#include "grad/rewrite.h"
#include "ops/op.h"

namespace whale {
namespace {

constexpr int64_t kMostPieces = 32;

// What makes a gradient that may be large, and has a factor for its columns.
bool makes_columns(OpCode code) {
  return code == OpCode::k_matmul_weight_grad || code == OpCode::k_matmul || code == OpCode::k_embedding_grad;
}

bool is_dim(const SubAxis& d, size_t dim) { return d == SubAxis{static_cast<int>(dim), 1, 1}; }

class Cutter {
 public:
  Cutter(Graph& graph, const GradientPieces& how) : r_(graph), g_(graph), how_(how) {}

  void run() {
    std::vector<char> gradient(g_.tensors.size());
    for (const NamedTensor& t : g_.gradients) gradient[t.tensor] = 1;
    for (const Op& op : r_.old)  // float16 takes the scale of the loss out before the update
      if (has_flag(op.code, kPreparesUpdate) && gradient[op.outputs[0]]) gradient[op.inputs[0]] = 1;
    find_terms(gradient);
    for (size_t i = 0; i < r_.old.size(); ++i) {
      Op& op = r_.old[i];
      if (const auto term = terms_.find(op.outputs.empty() ? kNone : op.outputs[0]); term != terms_.end()) {
        for (TensorId& id : op.inputs) id = r_.now(id);
        cut(i, term->second);
        continue;
      }
      if (op.code == OpCode::k_add && terms_.contains(op.inputs[0])) {
        add(i);
        continue;
      }
      const bool made = op.phase == Phase::kBackward && makes_columns(op.code) && gradient[op.outputs[0]];
      for (TensorId& id : op.inputs) id = r_.now(id);
      if (const int64_t n = made ? pieces(op) : 1; n > 1)
        cut(i, n);
      else
        r_.keep(i);
    }
    r_.finish();
  }

 private:
  // Of a gradient that is the sum of two (a table that is looked up, and multiplied with): in how many pieces each is
  // made. Then neither waits for the other.
  void find_terms(const std::vector<char>& gradient) {
    std::vector<const Op*> maker(g_.tensors.size());
    std::vector<int> uses(g_.tensors.size());
    for (const Op& op : r_.old) {
      for (const TensorId id : op.outputs)
        if (id != kNone) maker[id] = &op;
      for (const TensorId id : op.inputs)
        if (id != kNone) ++uses[id];
    }
    for (const NamedTensor& o : g_.outputs) ++uses[o.tensor];
    for (const Op& op : r_.old) {
      if (op.code != OpCode::k_add || op.phase != Phase::kBackward || !gradient[op.outputs[0]]) continue;
      int64_t n = kMostPieces;
      for (const TensorId id : op.inputs) {
        const Op* term = maker[id];
        const bool cut = term && makes_columns(term->code) && term->phase == Phase::kBackward &&
                         term->outputs[0] == id && uses[id] == 1 && g_.tensor(id).dims == g_.tensor(op.outputs[0]).dims;
        n = cut ? std::min(n, pieces(*term)) : 1;
        if (n == 1) break;
      }
      if (n > 1)
        for (const TensorId id : op.inputs) terms_[id] = n;
    }
  }

  void add(size_t i) {
    const Op op = r_.old[i];
    const TensorIds &a = pieces_.at(op.inputs[0]), &b = pieces_.at(op.inputs[1]);
    TensorIds sums;
    for (size_t k = 0; k < a.size(); ++k) sums.push_back(r_.emit(i, OpCode::k_add, {a[k], b[k]}));
    const int64_t last = std::ssize(g_.tensor(op.outputs[0]).dims) - 1;
    const TensorId whole = r_.emit(i, OpCode::k_concat, sums, {{"axis", last}});
    g_.tensor(whole).name = g_.tensor(op.outputs[0]).name;
    r_.replace(op.outputs[0], whole);
    r_.moved(i, g_.tensor(whole).producer);
  }

  // The factor of the last dimension; null: none that is all of it.
  const Factor* columns(const Op& op) {
    factors_ = def(op.code).factors(view_of(g_, op));
    const Dims& dims = g_.tensor(op.outputs[0]).dims;
    for (const Factor& f : factors_.list)
      if (f.kind == FactorKind::kMap && f.extent == dims.back() && f.size_attrs.empty() && !f.begin_attr &&
          is_dim(f.outputs[0], dims.size() - 1) &&
          std::all_of(op.inputs.begin(), op.inputs.end(), [&](const TensorId& id) {
            const SubAxis& d = f.inputs[&id - op.inputs.data()];
            return !d.present() || (id != kNone && d.outer == 1 && d.inner == 1);
          }))
        return &f;
    return nullptr;
  }

  int64_t pieces(const Op& op) {
    const Tensor& t = g_.tensor(op.outputs[0]);
    if (t.dims.size() < 2 || !how_.may_be_cut(op, t.dims) || !columns(op)) return 1;
    const int64_t bytes = element_count(t.dims) * size_of(t.dtype);
    return std::min({(bytes + how_.bytes - 1) / how_.bytes, kMostPieces, t.dims.back() / how_.columns});
  }

  void cut(size_t i, int64_t n) {
    const Op op = r_.old[i];
    const Factor f = *columns(op);
    std::vector<TensorIds> made(op.outputs.size());
    for (int64_t k = 0; k < n; ++k) {
      const int64_t begin = f.extent * k / n, end = f.extent * (k + 1) / n;
      TensorIds inputs = op.inputs;
      for (size_t x = 0; x < inputs.size(); ++x)
        if (f.inputs[x].present()) inputs[x] = slice(i, inputs[x], static_cast<size_t>(f.inputs[x].dim), begin, end);
      const TensorId first = r_.emit(i, op.code, std::move(inputs), op.attrs);
      const TensorIds outputs = g_.op(g_.tensor(first).producer).outputs;
      for (size_t o = 0; o < outputs.size(); ++o) made[o].push_back(outputs[o]);
    }
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      if (terms_.contains(op.outputs[o])) {
        pieces_[op.outputs[o]] = made[o];
        r_.moved(i, g_.tensor(made[o].back()).producer);
        continue;
      }
      const bool joined = f.outputs[o].present();
      const TensorId whole =
          joined ? r_.emit(i, OpCode::k_concat, made[o], {{"axis", int64_t{f.outputs[o].dim}}}) : made[o][0];
      g_.tensor(whole).name = g_.tensor(op.outputs[o]).name;
      r_.replace(op.outputs[o], whole);
      r_.moved(i, g_.tensor(whole).producer);
    }
  }

  TensorId slice(size_t i, TensorId id, size_t dim, int64_t begin, int64_t end) {
    Dims limits = g_.tensor(id).dims, starts(limits.size(), 0);
    starts[dim] = begin, limits[dim] = end;
    return r_.emit(i, OpCode::k_slice, {id}, {{"starts", starts}, {"limits", limits}});
  }

  Rewriter r_;
  Graph& g_;
  const GradientPieces& how_;
  Factors factors_;
  std::map<TensorId, int64_t> terms_;
  std::map<TensorId, TensorIds> pieces_;  // of a term
};

}  // namespace

void cut_gradients(Graph& graph, const GradientPieces& how) { Cutter(graph, how).run(); }

}  // namespace whale
