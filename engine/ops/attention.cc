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
  int64_t keys = 0;  // of all pieces
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
  const int64_t all = attr_int(*v.attrs, "keys"), begin = attr_int(*v.attrs, "key_begin");
  s.keys = all != 0 ? all : s.tk;
  if (all == 0 && begin != 0)
    throw invalid("attribute 'key_begin' is {}, which only a piece of the keys has; give 'keys' with it", begin);
  if (all != 0 && (s.packed || begin < 0 || begin + s.tk > all))
    throw invalid("keys [{}, {}) are no piece of {} keys; expected k and v apart from q", begin, begin + s.tk, all);
  return s;
}
bool is_piece(const OpView& v) { return attr_int(*v.attrs, "keys") != 0; }
DType result_dtype(const OpView& v, DType q) { return is_piece(v) ? accumulate_dtype(q) : q; }

void check_bias(const OpView& v, int i, const Sizes& s, DType q) {
  if (!has(v, i)) return;
  need_rank(v, i, "bias", 4);
  const Dims& d = in_dims(v, i);
  if ((d[0] != 1 && d[0] != s.b) || (d[1] != 1 && d[1] != s.heads) || d[2] != s.tq || d[3] != s.keys)
    throw invalid("operand 'bias' has shape {}, expected [{} or 1, {} or 1, {}, {}]", to_string(d), s.b, s.heads, s.tq,
                  s.keys);
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
  return {{result_dtype(v, in(v, 0).dtype), {s.b, s.tq, s.heads, s.dv}},
          {accumulate_dtype(in(v, 0).dtype), {s.b, s.heads, s.tq}}};
}

void gradient_attention(GradBuilder& b) {
  if (b.grad(1) != kNone) throw unimplemented("attention: the result 'lse' has no gradient");
  if (attr_int(b.op().attrs, "keys") != 0)
    throw unimplemented("attention over a piece of the keys has no gradient; leave out the attribute 'keys'");
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
SubAxis head_sub_axis(const Sizes& s, int dim) { return sub_axis(dim, 1, s.heads / s.kv_heads); }

// The last factor cuts heads: an attribute that repeats their number follows.
void local_heads(Factors& f, const OpView& v) {
  Factor& last = f.list.back();
  if (last.name == "heads" && attr_int(*v.attrs, "kv_heads") != 0) last.size_attrs = {"kv_heads"};
}

// Keys and values may come a piece after the other: each piece's (out, lse) is merged with those before.
void add_key_stream(Factors& f, const OpView& v, const Sizes& s, std::vector<SubAxis> in, std::vector<SubAxis> out) {
  if (s.packed) return;
  add_factor(f, v, "tk", FactorKind::kStream, s.tk, std::move(in), std::move(out));
  f.list.back().piece_attr = "keys";
  f.list.back().begin_attr = "key_begin";
}

Factors factors_attention(const OpView& v) {
  Factors f;
  const Sizes s = sizes_of(v, 0);
  const bool bias_b = has(v, 3) && in_dims(v, 3)[0] != 1, bias_h = has(v, 3) && in_dims(v, 3)[1] != 1;
  add_factor(f, v, "b", FactorKind::kMap, s.b, {sub_axis(0), sub_axis(0), sub_axis(0), bias_b ? sub_axis(0) : kAbsent},
             {sub_axis(0), sub_axis(0)});
  if (!s.packed || s.heads == s.kv_heads)
    add_factor(f, v, "heads", FactorKind::kMap, s.kv_heads,
               {s.packed ? sub_axis(2, 3, 1) : head_sub_axis(s, 2), sub_axis(2), sub_axis(2),
                bias_h ? head_sub_axis(s, 1) : kAbsent},
               {head_sub_axis(s, 2), head_sub_axis(s, 1)});
  local_heads(f, v);
  if (!s.packed)  // a causal mask counts queries by the box
    add_factor(f, v, "tq", FactorKind::kMap, s.tq, {sub_axis(1), kAbsent, kAbsent, sub_axis(2)},
               {sub_axis(1), sub_axis(2)});
  add_key_stream(f, v, s, {kAbsent, sub_axis(1), sub_axis(1)}, {});
  if (!s.packed) f.list.back().merge = OpCode::k_attention_merge;
  return f;
}

TensorIds unpack_attention(Graph& graph, const Op& op) {
  if (op.inputs.size() > 2 && op.inputs[1] != kNone) return {};
  const OpView view = view_of(graph, op);
  const Sizes s = sizes_of(view, 0);
  TensorIds parts;
  int64_t begin = 0;
  for (const int64_t heads : {s.heads, s.kv_heads, s.kv_heads}) {
    Dims limits = in_dims(view, 0), starts(4, 0);
    starts[2] = begin, limits[2] = begin += heads;
    const OpId made = append_op(graph, OpCode::k_slice, {op.inputs[0]}, {{"starts", starts}, {"limits", limits}},
                                op.scope, fmt::format("{}.{}", op.name, "qkv"[parts.size()]));
    parts.push_back(graph.op(made).outputs[0]);
  }
  Attrs attrs = op.attrs;
  attrs["kv_heads"] = int64_t{0};
  parts.push_back(op.inputs.size() > 3 ? op.inputs[3] : kNone);
  const OpId made = append_op(graph, op.code, parts, attrs, op.scope, op.name);
  graph.op(made).key = op.key;
  return graph.op(made).outputs;
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
  for (TensorType& x : out) x.dtype = result_dtype(v, t);
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
  const auto outputs = [&](SubAxis q, SubAxis kv, SubAxis bias) {
    std::vector<SubAxis> out{q};
    if (!s.packed) out.push_back(kv), out.push_back(kv);
    if (dbias) out.push_back(bias);
    return out;
  };
  const auto add = [&](const char* name, int64_t extent, std::vector<SubAxis> in, std::vector<SubAxis> out,
                       bool bias_partial) {
    if (dbias && bias_partial)
      add_factor(f, v, name, FactorKind::kReduce, extent, std::move(in), std::move(out), {at});
    else
      add_factor(f, v, name, FactorKind::kMap, extent, std::move(in), std::move(out));
  };
  const SubAxis zero = sub_axis(0), bb = bias_b ? sub_axis(0) : kAbsent;
  add("b", s.b, {zero, zero, zero, zero, zero, zero, bb}, outputs(zero, zero, bb), !bias_b);
  if (!s.packed || s.heads == s.kv_heads) {
    const SubAxis q = s.packed ? sub_axis(2, 3, 1) : head_sub_axis(s, 2), bh = bias_h ? head_sub_axis(s, 1) : kAbsent;
    add("heads", s.kv_heads,
        {head_sub_axis(s, 2), q, sub_axis(2), sub_axis(2), head_sub_axis(s, 2), head_sub_axis(s, 1), bh},
        outputs(q, sub_axis(2), bh), has(v, 6) && !bias_h);
    local_heads(f, v);
  }
  if (!s.packed)
    add_factor(f, v, "tq", FactorKind::kReduce, s.tq,
               {sub_axis(1), sub_axis(1), kAbsent, kAbsent, sub_axis(1), sub_axis(2), sub_axis(2)},
               outputs(sub_axis(1), kAbsent, sub_axis(2)), {1, 2});
  add_key_stream(f, v, s, {kAbsent, kAbsent, sub_axis(1), sub_axis(1)}, outputs(kAbsent, sub_axis(1), kAbsent));
  f.linear = {{0}};
  return f;
}

// Multiply-adds of scores and values; causal: only the keys that are seen.
double forward_flops(const OpView& v, const Sizes& s) {
  double pairs = static_cast<double>(s.tq) * static_cast<double>(s.tk);
  const bool causal = attr_bool(*v.attrs, "causal");
  if (causal && is_piece(v)) {  // all of it, or nothing: on average half
    pairs /= 2;
  } else if (causal) {
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
     .doc = "of the probabilities; indexed (batch, head, query, key)",
     .role = AttrRole::kTraining},
    {.name = "key",
     .type = AttrType::kInt,
     .fallback = int64_t{0},
     .doc = "id of the random stream; 0: given when the graph is sealed"},
    {.name = "keys",
     .type = AttrType::kInt,
     .fallback = int64_t{0},
     .doc =
         "number of all keys when k and v are a piece of them (0: they are all); out is then of the accumulate dtype"},
    {.name = "key_begin",
     .type = AttrType::kInt,
     .fallback = int64_t{0},
     .doc = "where the piece begins: what `causal` and the masks of dropout count from; without either it changes "
            "nothing"}};

std::vector<AttrSpec> with_bias_grad(std::vector<AttrSpec> attrs) {
  attrs.push_back({.name = "bias_grad", .type = AttrType::kBool, .fallback = false, .doc = "return dbias"});
  return attrs;
}

// ---- two pieces -------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_merge(const OpView& v) {
  need_float(v, 0, "out");
  need_rank(v, 0, "out", 4);
  const Dims& d = in_dims(v, 0);
  const Dims rows{d[0], d[2], d[1]};
  need_dims(v, 1, "lse", rows, "[b, h, tq] of out");
  need_dims(v, 2, "out2", d, "the shape of out");
  need_dims(v, 3, "lse2", rows, "[b, h, tq] of out");
  for (const int i : {1, 2, 3}) need_dtype(v, i, "of a piece", in(v, 0).dtype);
  return {{out_dtype(v, in(v, 0).dtype), d}, in(v, 1)};
}
Factors factors_merge(const OpView& v) {
  Factors f;
  const Dims& d = in_dims(v, 0);
  const auto add = [&](const char* name, int at, int row) {
    add_factor(f, v, name, FactorKind::kMap, d[at], {sub_axis(at), sub_axis(row), sub_axis(at), sub_axis(row)},
               {sub_axis(at), sub_axis(row)});
  };
  add("b", 0, 0);
  add("tq", 1, 2);
  add("heads", 2, 1);
  return f;
}

// The causal mask counts from the first query; dropout is numbered by all of batch, head, query and key.
uint32_t placed_dims_attention(const OpView& view) {
  return attr_float(*view.attrs, "dropout") > 0 ? ~uint32_t{0} : uint32_t{1} << 1;
}

}  // namespace

extern const OpDef op_def_attention, op_def_attention_grad, op_def_attention_merge;

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
    .unpack = unpack_attention,
    .unpacked_factor = "tq",
    .placed_dims = placed_dims_attention,
    .score_products = 2,
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
    .placed_dims = placed_dims_attention,
    .score_products = 4,
};
const OpDef op_def_attention_merge = {
    .name = "attention_merge",
    .doc =
        "Attention over the keys of two pieces, from what attention gives for each: the weights are exp(lse) of each "
        "piece (Milakov and Gimelshein, 2018).\nout, lse, out2, lse2 as attention gives them for pieces -> out "
        "(out_dtype), lse.",
    .inputs = {{"out"}, {"lse"}, {"out2"}, {"lse2"}},
    .outputs = {{"out"}, {"lse"}},
    .attrs = {{.name = "out_dtype", .type = AttrType::kString, .fallback = std::string(), .doc = "empty: that of out"}},
    .infer = infer_merge,
    .factors = factors_merge,
    .aliases = {{0, 0}, {1, 1}},
    .flags = kInternal,
};

}  // namespace whale
