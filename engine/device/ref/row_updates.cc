// Updates of the rows of tables that a step looked up, and of split weights.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "device/pad_to_batch.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

double scalar(const In& x, double otherwise) { return x.present() ? x[0] : otherwise; }

// A parameter and its states, element by element; a split weight's state is the lower half of its bits.
struct Cells {
  std::vector<In> in;
  std::vector<Out> out;
  bool split;
  double parameter(int64_t i) const {
    if (!split) return in[0][i];
    const uint32_t high = static_cast<const uint16_t*>(in[0].data)[i];
    return std::bit_cast<float>(high << 16 | static_cast<const uint16_t*>(in[1].data)[i]);
  }
  void set_parameter(int64_t i, double x) const {
    if (!split) return out[0].set(i, x);
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
    static_cast<uint16_t*>(out[0].data)[i] = static_cast<uint16_t>(bits >> 16);
    static_cast<uint16_t*>(out[1].data)[i] = static_cast<uint16_t>(bits);
  }
};

struct Numbers {
  double rate, clip, updates, decay;
};
// Updates element i of the cells by the gradient g.
using Rule = void (*)(const Cells& c, int64_t i, double g, const Numbers& n, const Attrs& attrs);

void sgd(const Cells& c, int64_t i, double g, const Numbers& n, const Attrs&) {
  const double p = c.parameter(i);
  c.set_parameter(i, p - n.rate * (n.clip * g + n.decay * p));
}

void adagrad(const Cells& c, int64_t i, double grad, const Numbers& n, const Attrs& attrs) {
  const double p = c.parameter(i), g = n.clip * grad + n.decay * p, h = c.in[1][i] + g * g;
  c.set_parameter(i, p - n.rate * g / (std::sqrt(h) + attr_float(attrs, "epsilon", 1e-10)));
  c.out[1].set(i, h);
}

void adam(const Cells& c, int64_t i, double grad, const Numbers& n, const Attrs& attrs) {
  const double beta1 = attr_float(attrs, "beta1", 0.9), beta2 = attr_float(attrs, "beta2", 0.999);
  const bool decoupled = attr_bool(attrs, "decoupled");
  const double p = c.parameter(i), g = n.clip * grad + (decoupled ? 0 : n.decay * p);
  const double m = beta1 * c.in[1][i] + (1 - beta1) * g, v = beta2 * c.in[2][i] + (1 - beta2) * g * g;
  const double mhat = m / (1 - std::pow(beta1, n.updates + 1)), vhat = v / (1 - std::pow(beta2, n.updates + 1));
  const double u = mhat / (std::sqrt(vhat) + attr_float(attrs, "epsilon", 1e-8));
  c.set_parameter(i, p - n.rate * (u + (decoupled ? n.decay * p : 0)));
  c.out[1].set(i, m);
  c.out[2].set(i, v);
}

struct Table {
  Cells cells;
  In ids, dy;
  int64_t rows, width, bag;
  double decay;
  Values sums;  // room for a whole gradient: the obvious way
  std::vector<char> named;
};

void update_rows(Table& t, Rule rule, Numbers n, double scale, const Attrs& attrs) {
  const int64_t begin = attr_int(attrs, "row_begin");
  n.decay = t.decay;
  for (size_t k = 0; k < t.cells.in.size(); ++k) {  // rows that are not named stay; in a plan they are in place
    const In& from = t.cells.in[k];
    if (from.data != t.cells.out[k].data)
      std::memcpy(t.cells.out[k].data, from.data, static_cast<size_t>(from.count * size_of(from.dtype)));
  }
  if (std::isnan(n.clip)) return;
  std::fill(t.sums.begin(), t.sums.end(), 0.0);  // of each row, in order of occurrence
  std::fill(t.named.begin(), t.named.end(), 0);
  for (int64_t i = 0; i < t.ids.count; ++i) {
    const int64_t id = t.ids.integer(i) - begin;
    if (id < 0 || id >= t.rows) continue;
    t.named[id] = 1;
    for (int64_t e = 0; e < t.width; ++e) t.sums[id * t.width + e] += scale * t.dy[i / t.bag * t.width + e];
  }
  for (int64_t i = 0; i < t.rows * t.width; ++i)
    if (t.named[i / t.width]) rule(t.cells, i, t.sums[i], n, attrs);
}

double decay_of(const KernelSpec& spec, size_t tuple) {
  const Ints& flags = attr_ints(*spec.attrs, "decays");
  return tuple < flags.size() && flags[tuple] == 0 ? 0 : attr_float(*spec.attrs, "weight_decay");
}

Cells cells_of(const KernelSpec& spec, size_t at, size_t result, size_t states, bool split) {
  Cells c{{}, {}, split};
  for (size_t k = 0; k <= states; ++k) c.in.push_back(in(spec, at + k)), c.out.push_back(out(spec, result + k));
  return c;
}

Body bind_rows(const KernelSpec& spec, Rule rule, size_t first, size_t states, bool split) {
  std::vector<Table> tables;
  const size_t width = states + 3;
  for (size_t at = first, t = 0; at + width <= spec.in.size(); at += width, ++t) {
    const size_t ids = at + states + 1;
    const Dims &table = spec.in[at].dims, &id_dims = spec.in[ids].dims;
    const bool bags = !id_dims.empty() && id_dims.size() == spec.in[ids + 1].dims.size();
    tables.push_back({cells_of(spec, at, t * (states + 1), states, split), in(spec, ids), in(spec, ids + 1), table[0],
                      table[1], bags ? std::max<int64_t>(id_dims.back(), 1) : 1, decay_of(spec, t),
                      room(table[0] * table[1]), std::vector<char>(static_cast<size_t>(table[0]))});
  }
  const In lr = in(spec, 0), updates = first == 3 ? in(spec, 1) : In{}, scale = in(spec, first - 1);
  return [=, attrs = *spec.attrs, mean = attr_bool(*spec.attrs, "mean")]() mutable {
    const Numbers now{lr[0], scalar(scale, 1), scalar(updates, 0), 0};
    for (Table& t : tables) update_rows(t, rule, now, mean ? 1 / static_cast<double>(t.bag) : 1, attrs);
  };
}

Body bind_sgd_rows(const KernelSpec& spec) { return bind_rows(spec, sgd, 2, 0, false); }
Body bind_adagrad_rows(const KernelSpec& spec) { return bind_rows(spec, adagrad, 2, 1, false); }
Body bind_adam_rows(const KernelSpec& spec) { return bind_rows(spec, adam, 3, 2, false); }
Body bind_split_sgd_rows(const KernelSpec& spec) { return bind_rows(spec, sgd, 2, 1, true); }

Body bind_split_sgd(const KernelSpec& spec) {
  struct Tuple {
    Cells cells;
    In g;
    double decay;
  };
  std::vector<Tuple> tuples;
  for (size_t at = 2, t = 0; at + 3 <= spec.in.size(); at += 3, ++t)
    tuples.push_back({cells_of(spec, at, 2 * t, 1, true), in(spec, at + 2), decay_of(spec, t)});
  const In lr = in(spec, 0), scale = in(spec, 1);
  return [=, attrs = *spec.attrs] {
    for (const Tuple& t : tuples)
      for (int64_t i = 0; i < t.g.count; ++i) sgd(t.cells, i, t.g[i], {lr[0], scalar(scale, 1), 0, t.decay}, attrs);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_pad_to_batch, [](const KernelSpec& spec) -> Body { return PadToBatch(spec); }},
    {OpCode::k_sgd_rows, bind_sgd_rows},
    {OpCode::k_adagrad_rows, bind_adagrad_rows},
    {OpCode::k_adam_rows, bind_adam_rows},
    {OpCode::k_split_sgd, bind_split_sgd},
    {OpCode::k_split_sgd_rows, bind_split_sgd_rows},
};

}  // namespace

Rows row_update_rows() { return kRows; }

}  // namespace whale::ref
