// Scaled dot-product attention, computed in blocks: memory is linear in the sequence length (Dao et al.,
// FlashAttention, 2022).
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

// The sizes of an attention, packed or not. `first` is the number of the operand q (0 forward, 1 in the gradient).
struct Sizes {
  int64_t b = 0, tq = 0, tk = 0, heads = 0, kv_heads = 0, d = 0, dv = 0;
  bool packed = false;
};

Sizes sizes_of(const OpView& v, int q) {
  need_float(v, q, "q");
  need_rank(v, q, "q", 4);
  const Dims& dq = in_dims(v, q);
  const int64_t kv = attr_int(*v.attrs, "kv_heads");
  Sizes s{.b = dq[0], .tq = dq[1], .tk = dq[1], .heads = dq[2], .kv_heads = kv, .d = dq[3], .dv = dq[3]};
  if (has(v, q + 1) != has(v, q + 2)) throw invalid("operands 'k' and 'v' come together, or neither when q is packed");
  s.packed = !has(v, q + 1);
  if (s.packed) {
    s.heads = dq[2] - 2 * kv;
    if (kv <= 0 || s.heads <= 0 || s.heads % kv)
      throw invalid(
          "packed q has shape {} and 'kv_heads' is {}: expected [b, t, heads + 2 kv_heads, d] with heads a multiple of "
          "kv_heads > 0",
          to_string(dq), kv);
  } else {
    need_rank(v, q + 1, "k", 4);
    need_rank(v, q + 2, "v", 4);
    const Dims &dk = in_dims(v, q + 1), &dv = in_dims(v, q + 2);
    s.tk = dk[1], s.kv_heads = dk[2], s.dv = dv[3];
    need_dims(v, q + 1, "k", {s.b, s.tk, s.kv_heads, s.d}, "batch and head dimension of q");
    need_dims(v, q + 2, "v", {s.b, s.tk, s.kv_heads, s.dv}, "batch, length and heads of k");
    need_dtype(v, q + 1, "k", in(v, q).dtype);
    need_dtype(v, q + 2, "v", in(v, q).dtype);
    if (s.kv_heads <= 0 || s.heads % s.kv_heads)
      throw invalid("q has {} heads and k has {}: expected a multiple", s.heads, s.kv_heads);
    if (kv != 0 && kv != s.kv_heads) throw invalid("attribute 'kv_heads' is {}, but k has {} heads", kv, s.kv_heads);
  }
  return s;
}

void check_bias(const OpView& v, int i, const Sizes& s, DType q) {
  if (!has(v, i)) return;
  need_rank(v, i, "bias", 4);
  const Dims& d = in_dims(v, i);
  if ((d[0] != 1 && d[0] != s.b) || (d[1] != 1 && d[1] != s.heads) || d[2] != s.tq || d[3] != s.tk)
    throw invalid("operand 'bias' has shape {}, expected [{} or 1, {} or 1, {}, {}]", to_string(d), s.b, s.heads, s.tq,
                  s.tk);
  need_scale_dtype(v, i, "bias", q);
}

void check_attrs(const OpView& v) {
  const double rate = attr_float(*v.attrs, "dropout");
  if (!(rate >= 0 && rate < 1)) throw invalid("attribute 'dropout' is {}, expected 0 <= dropout < 1", rate);
}

std::vector<TensorType> infer_attention(const OpView& v) {
  const Sizes s = sizes_of(v, 0);
  check_bias(v, 3, s, in(v, 0).dtype);
  check_attrs(v);
  return {{in(v, 0).dtype, {s.b, s.tq, s.heads, s.dv}}, {accumulate_dtype(in(v, 0).dtype), {s.b, s.heads, s.tq}}};
}

void gradient_attention(GradBuilder& b) {
  if (b.grad(1) != kNone) throw unimplemented("attention: the result 'lse' has no gradient");
  const Op op = b.op();
  const bool packed = b.input(1) == kNone, bias = b.wants(3);
  Attrs attrs = op.attrs;
  attrs["bias_grad"] = bias;
  const auto r =
      b.emit_all(OpCode::k_attention_grad,
                 {b.grad(0), b.input(0), b.input(1), b.input(2), b.output(0), b.output(1), b.input(3)}, attrs);
  b.graph.op(b.graph.tensor(r[0]).producer).key = op.key;
  if (b.wants(0)) b.set(0, r[0]);
  if (!packed && b.wants(1)) b.set(1, r[1]);
  if (!packed && b.wants(2)) b.set(2, r[2]);
  if (bias) b.set(3, r[packed ? 1 : 3]);
}

// Cuts of heads fall on groups that share a key/value head; a packed q can be cut so only when each head has its own
// (three places: q, k and v), since otherwise its dimension is no product.
Digit head_digit(const Sizes& s, int dim) { return digit(dim, 1, s.heads / s.kv_heads); }

// The last factor cuts heads: an attribute that repeats their number follows.
void local_heads(Factors& f, const OpView& v) {
  Factor& last = f.list.back();
  if (last.name == "heads" && attr_int(*v.attrs, "kv_heads") != 0) last.size_attrs = {"kv_heads"};
}

Factors factors_attention(const OpView& v) {
  Factors f;
  const Sizes s = sizes_of(v, 0);
  const bool bias_b = has(v, 3) && in_dims(v, 3)[0] != 1, bias_h = has(v, 3) && in_dims(v, 3)[1] != 1;
  add_factor(f, v, "b", FactorKind::kMap, s.b, {digit(0), digit(0), digit(0), bias_b ? digit(0) : kAbsent},
             {digit(0), digit(0)});
  if (!s.packed || s.heads == s.kv_heads)
    add_factor(f, v, "heads", FactorKind::kMap, s.kv_heads,
               {s.packed ? digit(2, 3, 1) : head_digit(s, 2), digit(2), digit(2), bias_h ? head_digit(s, 1) : kAbsent},
               {head_digit(s, 2), head_digit(s, 1)});
  local_heads(f, v);
  if (!s.packed)  // a causal mask counts queries by the box
    add_factor(f, v, "tq", FactorKind::kMap, s.tq, {digit(1), kAbsent, kAbsent, digit(2)}, {digit(1), digit(2)});
  return f;
}

std::vector<TensorType> infer_attention_grad(const OpView& v) {
  const Sizes s = sizes_of(v, 1);
  const DType t = in(v, 1).dtype;
  need_dims(v, 0, "dout", {s.b, s.tq, s.heads, s.dv});
  need_dtype(v, 0, "dout", t);
  need_dims(v, 4, "out", {s.b, s.tq, s.heads, s.dv});
  need_dtype(v, 4, "out", t);
  need_dims(v, 5, "lse", {s.b, s.heads, s.tq});
  need_dtype(v, 5, "lse", accumulate_dtype(t));
  check_bias(v, 6, s, t);
  check_attrs(v);
  std::vector<TensorType> out{in(v, 1)};
  if (!s.packed) out.push_back(in(v, 2)), out.push_back(in(v, 3));
  if (attr_bool(*v.attrs, "bias_grad")) {
    if (!has(v, 6)) throw invalid("operand 'bias' is missing: bias_grad needs it");
    out.push_back(in(v, 6));
  }
  return out;
}

Factors factors_attention_grad(const OpView& v) {
  Factors f;
  const Sizes s = sizes_of(v, 1);
  const bool bias_b = has(v, 6) && in_dims(v, 6)[0] != 1, bias_h = has(v, 6) && in_dims(v, 6)[1] != 1;
  const bool dbias = attr_bool(*v.attrs, "bias_grad");
  const int at = s.packed ? 1 : 3;  // the output dbias
  const auto outputs = [&](Digit q, Digit kv, Digit bias) {
    std::vector<Digit> out{q};
    if (!s.packed) out.push_back(kv), out.push_back(kv);
    if (dbias) out.push_back(bias);
    return out;
  };
  const auto add = [&](const char* name, int64_t extent, std::vector<Digit> in, std::vector<Digit> out,
                       bool bias_partial) {
    if (dbias && bias_partial)
      add_factor(f, v, name, FactorKind::kReduce, extent, std::move(in), std::move(out), {at});
    else
      add_factor(f, v, name, FactorKind::kMap, extent, std::move(in), std::move(out));
  };
  const Digit zero = digit(0), bb = bias_b ? digit(0) : kAbsent;
  add("b", s.b, {zero, zero, zero, zero, zero, zero, bb}, outputs(zero, zero, bb), !bias_b);
  if (!s.packed || s.heads == s.kv_heads) {
    const Digit q = s.packed ? digit(2, 3, 1) : head_digit(s, 2), bh = bias_h ? head_digit(s, 1) : kAbsent;
    add("heads", s.kv_heads, {head_digit(s, 2), q, digit(2), digit(2), head_digit(s, 2), head_digit(s, 1), bh},
        outputs(q, digit(2), bh), has(v, 6) && !bias_h);
    local_heads(f, v);
  }
  if (!s.packed)
    add_factor(f, v, "tq", FactorKind::kReduce, s.tq,
               {digit(1), digit(1), kAbsent, kAbsent, digit(1), digit(2), digit(2)},
               outputs(digit(1), kAbsent, digit(2)), {1, 2});
  f.linear = {{0}};
  return f;
}

// Multiply-adds of scores and values; causal: only the keys that are seen.
double forward_flops(const OpView& v, const Sizes& s) {
  double pairs = static_cast<double>(s.tq) * static_cast<double>(s.tk);
  if (attr_bool(*v.attrs, "causal")) {
    const auto tq = static_cast<double>(s.tq), tk = static_cast<double>(s.tk);
    pairs = tk >= tq ? tq * (tk - tq) + tq * (tq + 1) / 2 : tk * (tk + 1) / 2;
  }
  return 2 * static_cast<double>(s.b * s.heads) * pairs * static_cast<double>(s.d + s.dv);
}
OpCost cost_attention(const OpView& v) { return {forward_flops(v, sizes_of(v, 0)), bytes_of(v)}; }
OpCost cost_attention_grad(const OpView& v) { return {2.5 * forward_flops(v, sizes_of(v, 1)), bytes_of(v)}; }

const std::vector<AttrSpec> kAttrs = {
    {.name = "causal", .type = AttrType::kBool, .fallback = false, .doc = "query i sees keys j <= i + tk - tq"},
    {.name = "scale", .type = AttrType::kFloat, .fallback = 0.0, .doc = "of the scores; 0: 1 / sqrt(d)"},
    {.name = "kv_heads", .type = AttrType::kInt, .fallback = int64_t{0}, .doc = "key/value heads of a packed q"},
    {.name = "dropout",
     .type = AttrType::kFloat,
     .fallback = 0.0,
     .doc = "of the probabilities; indexed (batch, head, query, key)"},
    {.name = "key",
     .type = AttrType::kInt,
     .fallback = int64_t{0},
     .doc = "id of the random stream; 0: given when the graph is sealed"}};

std::vector<AttrSpec> with_bias_grad(std::vector<AttrSpec> attrs) {
  attrs.push_back({.name = "bias_grad", .type = AttrType::kBool, .fallback = false, .doc = "return dbias"});
  return attrs;
}

}  // namespace

extern const OpDef op_def_attention, op_def_attention_grad;

const OpDef op_def_attention = {
    .name = "attention",
    .doc =
        "softmax(scale * q k^T + bias) v per head, with causal mask, grouped-query heads and dropout; memory linear in "
        "the length.\n"
        "q [b, tq, h, d], k [b, tk, hk, d], v [b, tk, hk, dv], bias [b|1, h|1, tq, tk]? -> out [b, tq, h, dv], lse [b, "
        "h, tq]. Head i reads "
        "k/v head i / (h / hk). Without k and v, q is packed: [b, t, h + 2 kv_heads, d]. A bias of -inf masks; rows "
        "without keys give 0.",
    .inputs = {{"q"}, {"k", PortKind::kOptional}, {"v", PortKind::kOptional}, {"bias", PortKind::kOptional}},
    .outputs = {{"out"}, {"lse"}},
    .attrs = kAttrs,
    .infer = infer_attention,
    .gradient = gradient_attention,
    .factors = factors_attention,
    .cost = cost_attention,
    .flags = kRandom | kOffsetAware | kComputeLow,
};
const OpDef op_def_attention_grad = {
    .name = "attention_grad",
    .doc =
        "Gradient of attention; probabilities are recomputed from lse, dropout from the same key.\n"
        "dout, q, k?, v?, out, lse, bias? -> dq (packed when q is), dk and dv unless packed, dbias when `bias_grad`.",
    .inputs = {{"dout"},
               {"q"},
               {"k", PortKind::kOptional},
               {"v", PortKind::kOptional},
               {"out"},
               {"lse"},
               {"bias", PortKind::kOptional}},
    .outputs = {{"dq"}, {"dk", PortKind::kOptional}, {"dv", PortKind::kOptional}, {"dbias", PortKind::kOptional}},
    .attrs = with_bias_grad(kAttrs),
    .infer = infer_attention_grad,
    .factors = factors_attention_grad,
    .cost = cost_attention_grad,
    .flags = kRandom | kOffsetAware | kInternal,
};

}  // namespace whale
