// Scaled dot-product attention, one query row at a time: scores, softmax, weighted sum of values. The gradient
// recomputes the probabilities from lse.
#include <algorithm>

#include "base/philox.h"
#include "device/global_index.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

// The heads of one operand inside [b, t, heads, d]; packed operands hold q, k and v heads side by side.
struct Heads {
  int64_t time, heads, first, d;
  int64_t at(int64_t b, int64_t t, int64_t h) const { return ((b * time + t) * heads + first + h) * d; }
};

// Shapes, masks and numbers that forward and backward share. `q` is the index of the operand q in the spec.
struct Problem {
  int64_t batch, heads, kv_heads, tq, tk, d, dv;
  int64_t keys, key_begin;  // k and v may be a piece of all keys
  Heads q, k, v;
  bool packed, causal;
  double scale, rate;
  uint64_t key;
  Dims bias;  // empty: none
  GlobalIndex box;
  int64_t all_heads, all_queries;  // global extents, for the dropout index
  const StepParameters* step;
  const RowContext* row;

  Problem(const KernelSpec& spec, size_t first, const Operand& bias_operand)
      : box(spec.box, spec.out[0].dims), step(spec.step), row(spec.row) {
    const Dims& qs = spec.in[first].dims;
    packed = !input(spec, first + 1).present();
    batch = qs[0], tq = qs[1], d = qs[3];
    if (packed) {
      kv_heads = attr_int(*spec.attrs, "kv_heads");
      if (kv_heads == 0) kv_heads = qs[2] / 3;
      heads = qs[2] - 2 * kv_heads, tk = tq, dv = d;
      q = {tq, qs[2], 0, d};
      k = {tq, qs[2], heads, d};
      v = {tq, qs[2], heads + kv_heads, d};
    } else {
      const Dims& ks = spec.in[first + 1].dims;
      const Dims& vs = spec.in[first + 2].dims;
      heads = qs[2], kv_heads = ks[2], tk = ks[1], dv = vs[3];
      q = {tq, heads, 0, d};
      k = {tk, kv_heads, 0, d};
      v = {tk, kv_heads, 0, dv};
    }
    keys = attr_int(*spec.attrs, "keys");
    if (keys == 0) keys = tk;
    key_begin = attr_int(*spec.attrs, "key_begin");
    causal = attr_bool(*spec.attrs, "causal");
    scale = attr_float(*spec.attrs, "scale");
    if (scale == 0) scale = 1 / std::sqrt(static_cast<double>(d));
    rate = attr_float(*spec.attrs, "dropout");
    key = spec.key != 0 ? spec.key : static_cast<uint64_t>(attr_int(*spec.attrs, "key"));
    if (bias_operand.present()) bias = bias_operand.dims;
    const bool packed_result = packed && spec.out[0].dims[2] != heads;  // the box is of dq, with the k and v heads
    all_heads = packed_result ? box.global(2) * heads / spec.out[0].dims[2] : box.global(2);
    all_queries = box.global(1);
  }

  int64_t kv_head(int64_t h) const { return h / (heads / kv_heads); }
  // Keys that query i sees: [0, visible).
  int64_t visible(int64_t i) const {
    if (!causal) return tk;
    const int64_t position = box.coordinate(1, i, row ? row->batch_begin : 0);
    return std::clamp<int64_t>(position + keys - all_queries + 1 - key_begin, 0, tk);
  }
  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return (((bias[0] == 1 ? 0 : b) * bias[1] + (bias[1] == 1 ? 0 : h)) * tq + i) * keys + key_begin + j;
  }
  // What a probability is multiplied with: 0 or 1 / (1 - rate); index ((b H + h) Tq + q) Tk + k in global numbers.
  double keep(const RandomStream& random, int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (rate == 0) return 1;
    const int64_t begin = row->batch_begin;
    const int64_t row = (box.coordinate(0, b, begin) * all_heads + box.coordinate(2, h, begin)) * all_queries +
                        box.coordinate(1, i, begin);
    return random.word(static_cast<uint64_t>(row * keys + key_begin + j)) >= drop_threshold(rate) ? 1 / (1 - rate) : 0;
  }
  RandomStream random() const {
    return step ? RandomStream(step->seed, key, static_cast<uint64_t>(step->iteration)) : RandomStream(0, key, 0);
  }
};

double dot(const Values& a, int64_t i, const Values& b, int64_t j, int64_t d) {
  double sum = 0;
  for (int64_t e = 0; e < d; ++e) sum += a[i + e] * b[j + e];
  return sum;
}

// to[i..] += x * from[j..]
void add_scaled(Values& to, int64_t i, double x, const Values& from, int64_t j, int64_t d) {
  for (int64_t e = 0; e < d; ++e) to[i + e] += x * from[j + e];
}

// q, k and v as numbers; packed operands are read once.
struct Sources {
  In q, k, v, bias;
  Values qs, ks, vs;
  bool packed;
  Sources(const KernelSpec& spec, size_t first, size_t bias_operand, bool packed_)
      : q(in(spec, first)),
        k(in(spec, first + 1)),
        v(in(spec, first + 2)),
        bias(in(spec, bias_operand)),
        qs(room(q.count)),
        ks(room(k.count)),
        vs(room(v.count)),
        packed(packed_) {}
  void load() {
    read(q, qs);
    if (packed) return;
    read(k, ks);
    read(v, vs);
  }
  const Values& keys() const { return packed ? qs : ks; }
  const Values& values() const { return packed ? qs : vs; }
  double score(const Problem& p, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const double s = dot(qs, p.q.at(b, i, h), keys(), p.k.at(b, j, p.kv_head(h)), p.d) * p.scale;
    return bias.present() ? s + bias[p.bias_at(b, h, i, j)] : s;
  }
};

Body bind_attention(const KernelSpec& spec) {
  const Problem p(spec, 0, input(spec, 3));
  const Out y = out(spec, 0), lses = out(spec, 1);
  return [=, source = Sources(spec, 0, 3, p.packed), scores = room(p.tk), row = room(p.dv)]() mutable {
    source.load();
    const RandomStream random = p.random();
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t i = 0; i < p.tq; ++i) {
          const int64_t visible = p.visible(i);
          double top = -std::numeric_limits<double>::infinity(), sum = 0;
          for (int64_t j = 0; j < visible; ++j) {
            scores[j] = source.score(p, b, h, i, j);
            top = max_nan(top, scores[j]);
          }
          std::fill(row.begin(), row.end(), 0.0);
          const bool any = !(std::isinf(top) && top < 0);  // no key at all: zeros
          for (int64_t j = 0; any && j < visible; ++j) {
            const double e = std::exp(scores[j] - top);
            sum += e;
            add_scaled(row, 0, e * p.keep(random, b, h, i, j), source.values(), p.v.at(b, j, p.kv_head(h)), p.dv);
          }
          for (int64_t e = 0; e < p.dv; ++e) y.set(((b * p.tq + i) * p.heads + h) * p.dv + e, any ? row[e] / sum : 0);
          if (lses.present()) lses.set((b * p.heads + h) * p.tq + i, any ? top + std::log(sum) : top);
        }
      }
    }
  };
}

// With P = exp(S - lse), the softmax of S, and dropout factors Z: dv = (P Z)' dout; dP = Z (dout v'); dS = P (dP -
// rowsum(P dP)), where the sum over all keys is dout' out.
Body bind_attention_grad(const KernelSpec& spec) {
  const Problem p(spec, 1, input(spec, 6));
  const In dout = in(spec, 0), y = in(spec, 4), lses = in(spec, 5);
  Results results(spec);
  const Out dq = results.take(), dk = results.take(!p.packed), dv = results.take(!p.packed);
  const Out dbias = results.take(attr_bool(*spec.attrs, "bias_grad") && input(spec, 6).present());
  return
      [=, source = Sources(spec, 1, 6, p.packed), douts = room(dout.count), dqs = room(dq.count), dks = room(dk.count),
       dvs = room(dv.count), dbiases = room(dbias.count), ps = room(p.tk), dps = room(p.tk)]() mutable {
        source.load();
        read(dout, douts);
        for (Values* sums : {&dqs, &dks, &dvs, &dbiases}) std::fill(sums->begin(), sums->end(), 0.0);
        Values& dkeys = p.packed ? dqs : dks;
        Values& dvalues = p.packed ? dqs : dvs;
        const RandomStream random = p.random();
        for (int64_t b = 0; b < p.batch; ++b) {
          for (int64_t h = 0; h < p.heads; ++h) {
            for (int64_t i = 0; i < p.tq; ++i) {
              const double lse = lses[(b * p.heads + h) * p.tq + i];
              const int64_t visible = std::isinf(lse) && lse < 0 ? 0 : p.visible(i);
              const int64_t out_row = ((b * p.tq + i) * p.heads + h) * p.dv, q_row = p.q.at(b, i, h);
              double total = 0;
              for (int64_t e = 0; e < p.dv; ++e) total += douts[out_row + e] * y[out_row + e];
              for (int64_t j = 0; j < visible; ++j) ps[j] = source.score(p, b, h, i, j);
              double top = lse, sum = 1;
              if (p.tk == p.keys && std::abs(lse) >= kExactLse) {
                top = -std::numeric_limits<double>::infinity(), sum = 0;
                for (int64_t j = 0; j < visible; ++j) top = max_nan(top, ps[j]);
                for (int64_t j = 0; j < visible; ++j) sum += std::exp(ps[j] - top);
              }
              for (int64_t j = 0; j < visible; ++j) {
                const int64_t v_row = p.v.at(b, j, p.kv_head(h));
                const double probability = std::exp(ps[j] - top) / sum, z = p.keep(random, b, h, i, j);
                add_scaled(dvalues, v_row, probability * z, douts, out_row, p.dv);
                ps[j] = probability;
                dps[j] = z * dot(douts, out_row, source.values(), v_row, p.dv);
              }
              for (int64_t j = 0; j < visible; ++j) {
                const double ds = ps[j] * (dps[j] - total);
                const int64_t k_row = p.k.at(b, j, p.kv_head(h));
                add_scaled(dqs, q_row, ds * p.scale, source.keys(), k_row, p.d);
                add_scaled(dkeys, k_row, ds * p.scale, source.qs, q_row, p.d);
                if (dbias.present()) dbiases[p.bias_at(b, h, i, j)] += ds;
              }
            }
          }
        }
        write(dq, dqs);
        if (dk.present()) write(dk, dks);
        if (dv.present()) write(dv, dvs);
        if (dbias.present()) write(dbias, dbiases);
      };
}

Body bind_attention_merge(const KernelSpec& spec) {
  const In outs[] = {in(spec, 0), in(spec, 2)}, lses[] = {in(spec, 1), in(spec, 3)};
  const Out y = out(spec, 0), lse = out(spec, 1);
  const Dims& dims = spec.in[0].dims;
  return [=] {
    const int64_t times = dims[1], heads = dims[2], width = dims[3];
    for (int64_t row = 0; row < dims[0] * heads * times; ++row) {
      const int64_t b = row / (heads * times), h = row / times % heads, t = row % times;
      const double x[] = {lses[0][row], lses[1][row]}, top = max_nan(x[0], x[1]);
      const bool any = !(std::isinf(top) && top < 0);
      const double w[] = {any ? std::exp(x[0] - top) : 0, any ? std::exp(x[1] - top) : 0}, sum = w[0] + w[1];
      for (int64_t at = ((b * times + t) * heads + h) * width, end = at + width; at < end; ++at)
        y.set(at, any ? (w[0] * outs[0][at] + w[1] * outs[1][at]) / sum : 0);
      lse.set(row, any ? top + std::log(sum) : top);
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_attention, bind_attention},
    {OpCode::k_attention_grad, bind_attention_grad},
    {OpCode::k_attention_merge, bind_attention_merge},
};

}  // namespace

Rows attention_rows() { return kRows; }

}  // namespace whale::ref
