// Blocks as people write them: an expression once more where it is read again, values with a row for every sample that
// no input feeds (first states, masks), one parameter for all samples.
#include "plan_blocks.h"

#include "base/error.h"

namespace whale::test {
namespace {

using enum OpCode;

const Attrs kOverFeatures{{"axes", Dims{-1}}, {"keep_dims", true}};

TensorId spread(BlockGraph& m, TensorId x, Dims shape) {
  return m.op(k_broadcast_to, {x}, {{"shape", std::move(shape)}});
}
TensorId fill(BlockGraph& m, Dims shape, double value) {
  return m.op(k_fill, {}, {{"shape", std::move(shape)}, {"value", value}, {"dtype", std::string("f32")}});
}
TensorId iota(BlockGraph& m, Dims shape, int64_t dim, const char* dtype = "f32") {
  return m.op(k_iota, {}, {{"shape", std::move(shape)}, {"dim", dim}, {"dtype", std::string(dtype)}});
}

// ---- expressions that are written again -------------------------------------------------------------------------
void hand_norm(BlockGraph& m) {
  const Dims d{m.features(m.h)};
  const bool shared = m.dice.below(4) == 0;
  const TensorId mean = m.op(k_reduce_mean, {m.h}, kOverFeatures);
  const auto off = [&] { return m.op(k_sub, {m.h, shared ? mean : m.op(k_reduce_mean, {m.h}, kOverFeatures)}); };
  const TensorId squares = m.dice.coin() ? m.op(k_square, {off()}) : m.op(k_mul, {off(), off()});
  const TensorId deviation =
      m.op(k_sqrt, {m.op(k_add, {m.op(k_reduce_mean, {squares}, kOverFeatures), m.constant(0.1)})});
  m.h = m.op(k_add, {m.op(k_mul, {m.op(k_div, {off(), deviation}), m.ones("gamma", d)}), m.parameter("beta", d)});
}

// What makes `id`, written once more, and perhaps what makes its operands.
TensorId written_again(BlockGraph& m, TensorId id, int depth) {
  const OpId made = m.g.tensor(id).producer;
  if (made == kNone || depth == 0) return id;
  Op op = m.g.op(made);
  if (has_flag(op.code, kRandom) || op.outputs.size() != 1 || op.code == k_batch_norm) return id;
  for (TensorId& x : op.inputs)
    if (x != kNone && m.dice.coin()) x = written_again(m, x, depth - 1);
  // In the scope where it was written first, or here.
  const ScopeId scope = m.dice.below(4) ? op.scope : m.scope;
  return m.g.op(append_op(m.g, op.code, op.inputs, op.attrs, scope)).outputs[0];
}
void again(BlockGraph& m) {
  std::vector<TensorId> alike;
  for (const Op& op : m.g.ops)
    if (op.outputs.size() == 1 && m.dims(op.outputs[0]) == m.dims(m.h) &&
        m.g.tensor(op.outputs[0]).dtype == m.g.tensor(m.h).dtype)
      alike.push_back(op.outputs[0]);
  const auto pick = [&] { return alike.empty() ? m.op(k_tanh, {m.h}) : alike[m.dice.below(std::ssize(alike))]; };
  const TensorId x = pick();
  const int depth = static_cast<int>(m.dice.between(1, 3));
  const TensorId y = m.op(k_mul, {m.op(k_tanh, {m.h}), written_again(m, x, depth)});
  m.h = m.op(k_add, {m.h, m.op(k_mul, {m.op(k_add, {y, written_again(m, x, depth)}), m.constant(0.25)})});
}

// ---- rows for every sample that no input feeds --------------------------------------------------------------------
TensorId first_state(BlockGraph& m, const Dims& dims, TensorId weight) {
  switch (m.dice.below(5)) {
    case 0: return fill(m, dims, 0);
    case 1: return fill(m, dims, 0.5);
    case 2: return spread(m, m.parameter("first", {dims.back()}), dims);
    case 3: return m.op(k_sin, {iota(m, dims, m.dice.below(2))});
    default: return m.op(k_tanh, {m.op(k_matmul, {fill(m, dims, 0.5), weight})});
  }
}
void recurrent(BlockGraph& m) {
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const int64_t n = m.dice.between(1, 4);
  const TensorId input = m.parameter("input", {d[2], n}), weight = m.parameter("weight", {n, n});
  const bool gated = m.dice.coin();
  TensorId state = first_state(m, {m.batch, n}, weight);
  std::vector<TensorId> all;
  for (int64_t t = 0; t < d[1]; ++t) {
    const TensorId x = m.op(k_slice, {m.h}, {{"starts", Dims{0, t, 0}}, {"limits", Dims{m.batch, t + 1, d[2]}}});
    const TensorId sum =
        m.op(k_add, {m.op(k_matmul, {m.reshape(x, {m.batch, d[2]}), input}), m.op(k_matmul, {state, weight})});
    const TensorId next = m.op(k_tanh, {sum});
    const TensorId gate = gated ? m.op(k_sigmoid, {sum}) : kNone;
    state = gated ? m.op(k_add, {m.op(k_mul, {gate, state}), m.op(k_mul, {m.op(k_sub, {m.constant(1), gate}), next})})
                  : next;
    all.push_back(m.reshape(state, {m.batch, 1, n}));
  }
  m.h = m.dice.coin() ? state : all.size() == 1 ? all[0] : m.op(k_concat, all, {{"axis", int64_t{1}}});
}
void mask(BlockGraph& m) {
  const Dims d = m.dims(m.h);
  const auto rank = std::ssize(d);
  const TensorId places = iota(m, d, m.dice.below(rank));
  const TensorId keep = m.op(k_less, {places, m.dice.coin() ? m.constant(1.5) : fill(m, d, 1.5)});
  m.h = m.op(k_where, {keep, m.h, m.dice.coin() ? fill(m, d, 0.25) : m.op(k_mul, {m.h, fill(m, d, 0.5)})});
}
void token(BlockGraph& m) {  // one more place, the same for every sample
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const TensorId one = m.parameter("token", m.dice.coin() ? Dims{1, 1, d[2]} : Dims{d[2]});
  std::vector<TensorId> both{spread(m, one, {m.batch, 1, d[2]}), m.h};
  if (m.dice.below(4) == 0) std::swap(both[0], both[1]);
  m.h = m.op(k_concat, both, {{"axis", int64_t{1}}});
}
void for_all(BlockGraph& m) {  // a parameter for all samples, spread before it is used
  const Dims d = m.dims(m.h);
  const TensorId x = m.parameter("all", m.dice.coin() ? Dims{d.back()} : Dims(d.begin() + 1, d.end()));
  const TensorId rows = spread(m, x, d);
  m.h = m.dice.coin() ? m.op(k_add, {m.h, rows}) : m.op(k_mul, {m.h, m.activation(rows)});
}
void queries(BlockGraph& m) {  // the samples' places asked by learned queries
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const int64_t n = m.dice.between(1, 3), t = m.dims(m.h)[1];
  const TensorId asked = spread(m, m.parameter("queries", {n, 1, d[2]}), {m.batch, n, 1, d[2]});
  const Dims of{m.batch, t, 1, d[2]};
  m.h = m.reshape(m.op(k_attention, {asked, m.reshape(m.h, of), m.reshape(m.linear("values", m.h, d[2]), of)}),
                  {m.batch, n, d[2]});
}

// ---- gathers --------------------------------------------------------------------------------------------------------
void chosen(BlockGraph& m) {  // some places or features
  const Dims d = m.dims(m.h);
  const int64_t axis = m.dice.coin() ? 1 : std::ssize(d) - 1;
  const TensorId ids = iota(m, {m.dice.between(1, d[axis])}, 0, "i32");
  m.h = m.op(k_gather, {m.h, ids}, {{"axis", axis}});
}
void looked_up(BlockGraph& m) {  // rows of a table by an input
  Dims d = m.dims(m.h);
  const int64_t n = d.back();
  for (size_t k = 1; k + 1 < d.size(); ++k) d[k] = 1;
  const TensorId ids = m.input(m.name + "ids", {m.batch}, DType::kI32);
  const TensorId rows = m.op(k_gather, {m.parameter("table", {m.dice.between(3, 6), n}), ids}, {{"axis", int64_t{0}}});
  m.h = m.op(k_add, {m.h, m.reshape(rows, d)});
}

// ---- losses ---------------------------------------------------------------------------------------------------------
void plain_mean(BlockGraph& m) {  // whose gradient is the same for every sample
  const TensorId y = m.linear("head", m.h, m.dice.between(1, 3));
  m.loss = m.op(k_reduce_mean, {m.dice.below(3) ? y : m.activation(y)});
}
void weighted(BlockGraph& m) {  // by constant weights
  const TensorId y = m.linear("head", m.h, m.dice.between(1, 3));
  const Dims d = m.dims(y);
  const TensorId each = m.op(k_squared_difference, {y, m.dice.coin() ? fill(m, d, 0.5) : m.input(m.name + "y", d)});
  const TensorId weights = m.dice.coin() ? fill(m, d, 0.5) : m.op(k_cos, {iota(m, d, 0)});
  const TensorId sum = m.op(k_reduce_sum, {m.op(k_mul, {each, weights})});
  m.loss = m.dice.coin() ? m.op(k_mul, {sum, m.constant(1.0 / static_cast<double>(element_count(d)))})
                         : m.op(k_div, {sum, m.op(k_reduce_sum, {m.op(k_square, {weights})})});
}

constexpr BlockRow kMiddle[] = {{"hand_norm", hand_norm}, {"again", again},   {"recurrent", recurrent},
                                {"mask", mask},           {"token", token},   {"for_all", for_all},
                                {"queries", queries},     {"chosen", chosen}, {"looked_up", looked_up}};
constexpr BlockRow kLast[] = {{"plain_mean", plain_mean}, {"weighted", weighted}};

}  // namespace

std::span<const BlockRow> written_middle_blocks() { return kMiddle; }
std::span<const BlockRow> written_last_blocks() { return kLast; }

}  // namespace whale::test
