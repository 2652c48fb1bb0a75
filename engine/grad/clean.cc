// Dead code, common subexpressions, and rewrites that are always right and always smaller (the table kRules).
#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/bf16.h"
#include "base/f16.h"
#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale {
namespace {

struct Cleaner {
  Rewriter& r;
};

bool has_in_place(const Op& op, const Graph& g) {
  if (has_flag(op.code, kUpdateOp)) return true;
  for (const Alias& a : aliases_of(g, op))
    if (a.must) return true;
  return false;
}

// ---- rules: each returns the tensor that replaces the result of old op i, or kNone ---------------------------------
using SimplifyRule = TensorId (*)(Cleaner& c, size_t i, const TensorIds& in);

const Tensor& result(const Cleaner& c, size_t i) { return c.r.graph.tensor(c.r.old[i].outputs[0]); }

// The value of a constant tensor.
const double* fill_value(const Cleaner& c, TensorId id) {
  const Op* op = c.r.producer(id);
  return op && op->code == OpCode::k_fill ? &std::get<double>(op->attrs.find("value")->second) : nullptr;
}
// That value as a tensor of the type holds it. What is folded keeps all digits, which a plan in float64 has; so a
// constant may take an op's place only where it is held as what the op makes of its operands as they are held.
double held(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::kF32: return static_cast<double>(single);
    case DType::kBF16: return static_cast<double>(bf16_to_float(float_to_bf16(single)));
    case DType::kF16: return static_cast<double>(f16_to_float(float_to_f16(single)));
    default: return value;  // f64; integers, which a fill has whole and within their range
  }
}
TensorId fill(Cleaner& c, size_t i, double value) {
  const Tensor& y = result(c, i);
  return c.r.emit(i, OpCode::k_fill, {},
                  {{"shape", y.dims}, {"value", value}, {"dtype", std::string(name_of(y.dtype))}});
}

// Every value of `from` is one of `to`.
bool widens(DType from, DType to) {
  if (from == to || to == DType::kF64)
    return is_float(from) || from == to || from == DType::kI32 || from == DType::kU8 || from == DType::kI8 ||
           from == DType::kBool;
  if (to == DType::kF32)
    return from == DType::kBF16 || from == DType::kF16 || from == DType::kU8 || from == DType::kI8 ||
           from == DType::kBool;
  return false;
}

TensorId simplify_cast(Cleaner& c, size_t i, const TensorIds& in) {
  Graph& g = c.r.graph;
  const DType from = g.tensor(in[0]).dtype, to = result(c, i).dtype;
  if (from == to) return in[0];
  if (const double* value = fill_value(c, in[0]);
      value && is_float(to) && held(to, *value) == held(to, held(from, *value)))
    return fill(c, i, *value);
  const Op* op = c.r.producer(in[0]);
  if (!op || op->code != OpCode::k_cast) return kNone;
  const TensorId x = op->inputs[0];
  if (!widens(g.tensor(x).dtype, g.tensor(in[0]).dtype)) return kNone;
  if (g.tensor(x).dtype == to) return x;
  if (is_integer(g.tensor(x).dtype) && is_integer(to)) return kNone;  // wraps, where a float between them saturates
  return c.r.emit(i, OpCode::k_cast, {x}, {{"dtype", std::string(name_of(to))}});
}

TensorId simplify_reshape(Cleaner& c, size_t i, const TensorIds& in) {
  const Dims to = result(c, i).dims;
  if (c.r.graph.tensor(in[0]).dims == to) return in[0];
  if (const double* value = fill_value(c, in[0])) return fill(c, i, *value);
  const Op* op = c.r.producer(in[0]);
  if (!op || op->code != OpCode::k_reshape) return kNone;
  const TensorId x = op->inputs[0];
  if (c.r.graph.tensor(x).dims == to) return x;
  return c.r.emit(i, OpCode::k_reshape, {x}, {{"shape", to}});
}

TensorId simplify_transpose(Cleaner& c, size_t i, const TensorIds& in) {
  const auto identity = [](const Ints& perm) {
    for (size_t k = 0; k < perm.size(); ++k)
      if (perm[k] != static_cast<int64_t>(k)) return false;
    return true;
  };
  const auto normal = [](Ints perm) {
    for (int64_t& p : perm)
      if (p < 0) p += static_cast<int64_t>(perm.size());
    return perm;
  };
  Ints perm = normal(attr_ints(c.r.old[i].attrs, "perm"));
  if (identity(perm)) return in[0];
  const Op* op = c.r.producer(in[0]);
  if (!op || op->code != OpCode::k_transpose) return kNone;
  const Ints before = normal(attr_ints(op->attrs, "perm"));
  const TensorId x = op->inputs[0];
  for (int64_t& p : perm) p = before[p];
  if (identity(perm)) return x;
  return c.r.emit(i, OpCode::k_transpose, {x}, {{"perm", perm}});
}

TensorId simplify_broadcast(Cleaner& c, size_t i, const TensorIds& in) {
  if (c.r.graph.tensor(in[0]).dims == result(c, i).dims) return in[0];
  if (const double* value = fill_value(c, in[0])) return fill(c, i, *value);
  return kNone;
}

TensorId simplify_neg(Cleaner& c, size_t i, const TensorIds& in) {
  if (const double* value = fill_value(c, in[0]); value && is_float(result(c, i).dtype)) return fill(c, i, -*value);
  const Op* op = c.r.producer(in[0]);
  return op && op->code == OpCode::k_neg ? op->inputs[0] : kNone;
}

// a (op) b of constants; and a neutral element, where the other operand already has the result's shape.
template <class F>
TensorId fold(Cleaner& c, size_t i, const double* a, const double* b, F evaluate) {
  const DType dtype = result(c, i).dtype;
  if (!a || !b || !is_float(dtype)) return kNone;
  const double value = evaluate(*a, *b);
  return held(dtype, value) == held(dtype, evaluate(held(dtype, *a), held(dtype, *b))) ? fill(c, i, value) : kNone;
}
TensorId unless_broadcast(Cleaner& c, size_t i, TensorId x) {
  return c.r.graph.tensor(x).dims == result(c, i).dims ? x : kNone;
}

TensorId simplify_mul(Cleaner& c, size_t i, const TensorIds& in) {
  const double *a = fill_value(c, in[0]), *b = fill_value(c, in[1]);
  if (a && *a == 1 && !b) return unless_broadcast(c, i, in[1]);
  if (b && *b == 1 && !a) return unless_broadcast(c, i, in[0]);
  return fold(c, i, a, b, [](double x, double y) { return x * y; });
}
TensorId simplify_div(Cleaner& c, size_t i, const TensorIds& in) {
  const double *a = fill_value(c, in[0]), *b = fill_value(c, in[1]);
  if (b && *b == 1 && !a) return unless_broadcast(c, i, in[0]);
  return b && *b != 0 ? fold(c, i, a, b, [](double x, double y) { return x / y; }) : kNone;
}
TensorId simplify_add(Cleaner& c, size_t i, const TensorIds& in) {
  const double *a = fill_value(c, in[0]), *b = fill_value(c, in[1]);
  if (a && *a == 0 && !b) return unless_broadcast(c, i, in[1]);
  if (b && *b == 0 && !a) return unless_broadcast(c, i, in[0]);
  return fold(c, i, a, b, [](double x, double y) { return x + y; });
}
TensorId simplify_sub(Cleaner& c, size_t i, const TensorIds& in) {
  const double *a = fill_value(c, in[0]), *b = fill_value(c, in[1]);
  if (b && *b == 0 && !a) return unless_broadcast(c, i, in[0]);
  return fold(c, i, a, b, [](double x, double y) { return x - y; });
}
// Only once the graph is differentiated: until then the op is what stops gradients.
TensorId simplify_stop(Cleaner& c, size_t, const TensorIds& in) {
  return c.r.graph.gradients.empty() && c.r.graph.training.loss != kNone ? kNone : in[0];
}

const std::map<OpCode, SimplifyRule> kRules = {{OpCode::k_cast, simplify_cast},
                                               {OpCode::k_reshape, simplify_reshape},
                                               {OpCode::k_transpose, simplify_transpose},
                                               {OpCode::k_broadcast_to, simplify_broadcast},
                                               {OpCode::k_neg, simplify_neg},
                                               {OpCode::k_mul, simplify_mul},
                                               {OpCode::k_div, simplify_div},
                                               {OpCode::k_add, simplify_add},
                                               {OpCode::k_sub, simplify_sub},
                                               {OpCode::k_stop_gradient, simplify_stop}};

// An elementwise op broadcasts by itself: it reads what was broadcast for it, where another operand has the full shape.
TensorId read_through_broadcast(Cleaner& c, size_t i, const TensorIds& operands) {
  const Op& op = c.r.old[i];
  if (!has_flag(op.code, kElementwise) || has_flag(op.code, kInternal) || has_flag(op.code, kRandom)) return kNone;
  const auto is_broadcast = [&](TensorId id) {
    const Op* maker = c.r.producer(id);
    return maker && maker->code == OpCode::k_broadcast_to;
  };
  if (std::none_of(operands.begin(), operands.end(), is_broadcast)) return kNone;
  TensorIds in = operands;
  const Dims& whole = result(c, i).dims;
  bool full = false;
  for (TensorId& id : in) {
    if (is_broadcast(id))
      id = c.r.producer(id)->inputs[0];
    else
      full |= id != kNone && c.r.graph.tensor(id).dims == whole;
  }
  if (!full) return kNone;
  const TensorId y = c.r.emit(i, op.code, std::move(in), op.attrs);
  c.r.graph.tensor(y).name = c.r.graph.tensor(op.outputs[0]).name;
  return y;
}

// ---- casts into and out of ops that choose the dtype of their result -----------------------------------------------
// An op with `out_dtype` sums in f32 and rounds once: reading low operands directly, and writing wide results directly,
// is both faster and more exact than casting around it.
// A plain sum takes no wider type than sums are kept in (keeps_sums_of), which devices have for statistics alone.

// The move that makes `id`, where nothing else reads it; nullptr: there is none.
Op* move_into(Graph& g, const std::vector<int>& uses, TensorId id) {
  const OpId maker = g.tensor(id).producer;
  if (maker == kNone || uses[id] != 1) return nullptr;
  const OpCode code = g.op(maker).code;
  const bool moves = code == OpCode::k_reshape || code == OpCode::k_transpose || code == OpCode::k_neg;
  return moves ? &g.op(maker) : nullptr;
}

// A gradient that is summed, then moved, then cast is cast before it is moved: next to the sum, which then gives the
// wide type. From the last op to the first, so that a cast passes a chain of moves.
void cast_next_to_sums(Graph& g) {
  const std::vector<int> uses = use_counts(g);
  const auto is_sum = [&](TensorId id) {
    while (Op* move = move_into(g, uses, id)) id = move->inputs[0];
    const OpId maker = g.tensor(id).producer;
    return maker != kNone && g.op(maker).attrs.contains("out_dtype") && uses[id] == 1;
  };
  for (size_t i = g.ops.size(); i-- > 0;) {
    Op& cast = g.ops[i];
    if (cast.code != OpCode::k_cast || cast.phase != Phase::kBackward) continue;
    const TensorId between = cast.inputs[0];
    Op* move = move_into(g, uses, between);
    const DType want = g.tensor(cast.outputs[0]).dtype;
    if (!move || !keeps_sums_of(want, g.tensor(between).dtype) || !is_sum(between)) continue;
    std::swap(cast.code, move->code);
    std::swap(cast.attrs, move->attrs);
    g.tensor(between).dtype = want;
    g.tensor(between).dims = g.tensor(move->inputs[0]).dims;
  }
}

void widen_results(Graph& g) {
  cast_next_to_sums(g);
  const std::vector<int> uses = use_counts(g);
  std::vector<std::vector<OpId>> casts(g.tensors.size());  // that read it
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (g.ops[i].code == OpCode::k_cast) casts[g.ops[i].inputs[0]].push_back(static_cast<OpId>(i));
  std::set<TensorId> gradients;  // of the parameter's type, whatever an update computes in
  for (const NamedTensor& t : g.gradients) gradients.insert(t.tensor);
  for (Op& op : g.ops) {
    if (!op.attrs.contains("out_dtype")) continue;
    // Operands: all floating-point ones widened from one type.
    TensorIds narrow = op.inputs;
    std::optional<DType> from;
    bool all = op.code != OpCode::k_reduce_sum;  // what it reads is the end of a chain, which casts as it goes
    for (TensorId& id : narrow) {
      if (id == kNone || !is_float(g.tensor(id).dtype)) continue;
      const OpId maker = g.tensor(id).producer;
      const bool cast = maker != kNone && g.op(maker).code == OpCode::k_cast &&
                        is_float(g.tensor(g.op(maker).inputs[0]).dtype) &&
                        g.tensor(g.op(maker).inputs[0]).dtype != g.tensor(id).dtype &&
                        widens(g.tensor(g.op(maker).inputs[0]).dtype, g.tensor(id).dtype);
      if (!cast) {
        all = false;
        break;
      }
      const TensorId x = g.op(maker).inputs[0];
      if (from && *from != g.tensor(x).dtype) all = false;
      from = g.tensor(x).dtype;
      id = x;
    }
    if (all && from) {
      op.attrs["out_dtype"] = std::string(name_of(g.tensor(op.outputs[0]).dtype));
      op.inputs = narrow;
    }
    // Results: every use of every result is a cast to one wider type.
    std::optional<DType> to;
    bool only_casts = true;
    for (const TensorId y : op.outputs) {
      only_casts &= !gradients.contains(y);
      only_casts &= uses[y] == static_cast<int>(casts[y].size());
      for (const OpId cast : casts[y]) {
        const DType want = g.tensor(g.op(cast).outputs[0]).dtype;
        only_casts &= is_float(want) && widens(g.tensor(y).dtype, want) && (!to || *to == want);
        if (op.code == OpCode::k_reduce_sum) only_casts &= keeps_sums_of(want, g.tensor(y).dtype);
        to = want;
      }
    }
    if (!only_casts || !to || *to == g.tensor(op.outputs[0]).dtype) continue;
    op.attrs["out_dtype"] = std::string(name_of(*to));
    for (const TensorId y : op.outputs)
      g.tensor(y).dtype = *to;  // the casts are now from a type to itself: simplify_cast drops them
  }
}

// The sum of a product and a bias that only casts to one wider type read is made in that type, like the product that
// has the bias within it: one device has that one where a split takes them apart.
void widen_biased(Graph& g) {
  const std::vector<int> uses = use_counts(g);
  std::vector<std::vector<OpId>> casts(g.tensors.size());  // that read it
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (g.ops[i].code == OpCode::k_cast) casts[g.ops[i].inputs[0]].push_back(static_cast<OpId>(i));
  std::map<OpId, size_t> widened;  // sums, and which operand is the bias
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& sum = g.ops[i];
    if (sum.code != OpCode::k_add) continue;
    const auto& readers = casts[sum.outputs[0]];
    if (readers.empty() || uses[sum.outputs[0]] != static_cast<int>(readers.size())) continue;
    const DType from = g.tensor(sum.outputs[0]).dtype, to = g.tensor(g.op(readers[0]).outputs[0]).dtype;
    if (!widens(from, to) ||
        !std::ranges::all_of(readers, [&](OpId cast) { return g.tensor(g.op(cast).outputs[0]).dtype == to; }))
      continue;
    for (const size_t at : {size_t{0}, size_t{1}}) {
      const TensorId y = sum.inputs[at], bias = sum.inputs[1 - at];
      const OpId maker = g.tensor(y).producer;
      if (maker == kNone || !has_flag(g.op(maker).code, kProduct) || uses[y] != 1 || g.tensor(bias).dims.size() != 1 ||
          g.tensor(y).dims != g.tensor(sum.outputs[0]).dims)
        continue;
      g.op(maker).attrs["out_dtype"] = std::string(name_of(to));
      g.tensor(y).dtype = g.tensor(sum.outputs[0]).dtype = to;
      widened.emplace(static_cast<OpId>(i), 1 - at);
      break;
    }
  }
  if (widened.empty()) return;
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i) {
    if (const auto sum = widened.find(static_cast<OpId>(i)); sum != widened.end()) {
      const TensorId bias = r.now(r.old[i].inputs[sum->second]);
      const Op* cast = r.producer(bias);
      const DType to = g.tensor(r.old[i].outputs[0]).dtype;
      const bool was_wide = cast && cast->code == OpCode::k_cast && g.tensor(cast->inputs[0]).dtype == to;
      r.old[i].inputs[sum->second] =
          was_wide ? cast->inputs[0] : r.emit(i, OpCode::k_cast, {bias}, {{"dtype", std::string(name_of(to))}});
    }
    r.keep(i);
  }
  r.finish();
}

}  // namespace

void drop_dead(Graph& g) {
  std::vector<bool> live(g.tensors.size());
  const auto mark = [&](TensorId id) {
    if (id != kNone) live[id] = true;
  };
  for (const NamedTensor& t : g.outputs) mark(t.tensor);
  for (const NamedTensor& t : g.gradients) mark(t.tensor);
  for (const Variable& v : g.variables) mark(v.next);
  mark(g.training.loss);
  std::vector<bool> keep(g.ops.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    keep[i] = std::any_of(g.ops[i].outputs.begin(), g.ops[i].outputs.end(), [&](TensorId id) { return live[id]; });
    if (!keep[i]) continue;
    for (const TensorId id : g.ops[i].inputs) mark(id);
  }
  if (std::find(keep.begin(), keep.end(), false) == keep.end()) {
    drop_unmade_tensors(g);
    return;
  }
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i)
    if (keep[i]) r.keep(i);
  r.finish();
}

namespace {

// ---- one round -----------------------------------------------------------------------------------------------------
// Numbers by their bits: what is no number has no place among others, and -0 is not 0.
std::strong_ordering by_bits(double a, double b) { return std::bit_cast<uint64_t>(a) <=> std::bit_cast<uint64_t>(b); }
std::strong_ordering order(const Attr& a, const Attr& b) {
  if (a.index() != b.index()) return a.index() <=> b.index();
  if (const auto* x = std::get_if<double>(&a)) return by_bits(*x, std::get<double>(b));
  if (const auto* x = std::get_if<std::vector<double>>(&a)) {
    const auto& y = std::get<std::vector<double>>(b);
    return std::lexicographical_compare_three_way(x->begin(), x->end(), y.begin(), y.end(), by_bits);
  }
  return a < b ? std::strong_ordering::less : b < a ? std::strong_ordering::greater : std::strong_ordering::equal;
}
std::strong_ordering order(const Attrs& a, const Attrs& b) {
  return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end(),
                                                [](const auto& x, const auto& y) {
                                                  const auto names = x.first <=> y.first;
                                                  return names != 0 ? names : order(x.second, y.second);
                                                });
}

// The ops of a graph, those together that may be one: they compute the same from the same, in the same scope as written
// and at the same time (a pipeline may be cut between them: then the first one's stage passes it on). Backward and
// forward stay apart (sharing would keep the forward value alive), except for constants.
class Alike {
 public:
  using is_transparent = void;
  struct Candidate {  // not in the graph yet, where it would read `in`
    const Op& op;
    const TensorIds& in;
  };
  Alike(const Graph& graph, const std::vector<ScopeId>& written) : g_(graph), written_(written) {}

  bool operator()(OpId a, OpId b) const { return before(kept(a), kept(b)); }
  bool operator()(const Candidate& a, OpId b) const { return before(a, kept(b)); }
  bool operator()(OpId a, const Candidate& b) const { return before(kept(a), b); }

 private:
  Candidate kept(OpId id) const { return {g_.op(id), g_.op(id).inputs}; }
  ScopeId scope_of(const Op& op) const {
    const auto at = static_cast<size_t>(op.scope);
    return at < written_.size() ? written_[at] : op.scope;
  }
  Phase phase_of(const Op& op) const {
    const bool constant = op.inputs.empty() && element_count(g_.tensor(op.outputs[0]).dims) == 1;
    return constant ? Phase::kForward : op.phase;
  }
  bool before(const Candidate& a, const Candidate& b) const {
    if (const auto inputs = a.in <=> b.in; inputs != 0) return inputs < 0;
    const auto place = [&](const Op& op) { return std::tuple(op.code, scope_of(op), op.region, phase_of(op)); };
    if (const auto places = place(a.op) <=> place(b.op); places != 0) return places < 0;
    return order(a.op.attrs, b.op.attrs) < 0;
  }

  const Graph& g_;
  const std::vector<ScopeId>& written_;
};

// One number's gradient for many elements. Two of them cost nothing, and one for a loss of samples and a loss of
// parameters, which have as many elements by chance, would be cut as the samples are.
bool spreads_gradient(const Op& op, const TensorIds& in, const Graph& g) {
  const bool spreads =
      op.code == OpCode::k_fill || (op.code == OpCode::k_broadcast_to && element_count(g.tensor(in[0]).dims) == 1);
  return spreads && op.phase == Phase::kBackward && element_count(g.tensor(op.outputs[0]).dims) > 1;
}

void simplify(Graph& g, const std::vector<ScopeId>& written) {
  Rewriter r(g);
  Cleaner c{r};
  std::set<OpId, Alike> seen(Alike(g, written));
  TensorIds in;  // of one op: what its operands are now
  for (size_t i = 0; i < r.old.size(); ++i) {
    const Op& op = r.old[i];
    in.resize(op.inputs.size());
    std::transform(op.inputs.begin(), op.inputs.end(), in.begin(), [&](TensorId id) { return r.now(id); });
    if (const auto rule = kRules.find(op.code); rule != kRules.end()) {
      const TensorId by = rule->second(c, i, in);
      if (by != kNone) {
        r.replace(op.outputs[0], by);
        const OpId maker = g.tensor(by).producer;
        if (maker != kNone) r.moved(i, maker);
        continue;
      }
    }
    if (const TensorId by = read_through_broadcast(c, i, in); by != kNone) {
      r.replace(op.outputs[0], by);
      r.moved(i, g.tensor(by).producer);
      continue;
    }
    if (has_flag(op.code, kRandom) || has_flag(op.code, kCollective) || has_in_place(op, g) ||
        spreads_gradient(op, in, g)) {
      r.keep(i);
      continue;
    }
    const auto alike = seen.find(Alike::Candidate{op, in});
    if (alike == seen.end()) {
      seen.insert(r.keep(i));
      continue;
    }
    const TensorIds& first = g.op(*alike).outputs;
    for (size_t k = 0; k < op.outputs.size(); ++k) r.replace(op.outputs[k], first[k]);
    r.moved(i, *alike);
  }
  r.finish();
}

}  // namespace

void clean(Graph& graph) { clean_as_written(graph, {}); }

void clean_as_written(Graph& graph, const std::vector<ScopeId>& written) {
  for (int round = 0; round < 4; ++round) {
    const size_t before = graph.ops.size();
    drop_dead(graph);
    if (!graph.gradients.empty() || graph.training.loss == kNone) {  // gradient rules want equal dtypes
      widen_results(graph);
      widen_biased(graph);
    }
    simplify(graph, written);
    drop_dead(graph);
    if (graph.ops.size() == before) break;
  }
}

}  // namespace whale
