// Adafactor (Shazeer and Stern, 2018) without relative step and parameter scale, as optax.adafactor(learning_rate,
// multiply_by_parameter_scale=False, momentum=None, min_dim_size_to_factor=1) computes it. Parameters of rank >= 2 keep
// the factored second moment of their last two dimensions: "row" (mean over the last) and "col" (mean over the one
// before); others keep it whole in "v". Weight decay is not multiplied by the learning rate. Parameters of 16 bits are
// computed on in 32, as their factors are.
#include <numeric>

#include "grad/updates.h"

namespace whale {
namespace {

struct Math {
  UpdateBuilder& b;
  DType dtype;

  TensorId c(double value) { return b.constant(value, dtype); }
  TensorId add(TensorId x, TensorId y) { return b.emit(OpCode::k_add, {x, y}); }
  TensorId sub(TensorId x, TensorId y) { return b.emit(OpCode::k_sub, {x, y}); }
  TensorId mul(TensorId x, TensorId y) { return b.emit(OpCode::k_mul, {x, y}); }
  TensorId div(TensorId x, TensorId y) { return b.emit(OpCode::k_div, {x, y}); }
  TensorId as(TensorId x, DType type) {
    return b.g.tensor(x).dtype == type ? x : b.emit(OpCode::k_cast, {x}, {{"dtype", std::string(name_of(type))}});
  }
  TensorId rsqrt(TensorId x) { return b.emit(OpCode::k_rsqrt, {x}); }
  TensorId mean(TensorId x, Ints axes, bool keep) {
    const Dims dims = b.g.tensor(x).dims;
    double count = 1;
    if (axes.empty()) count = static_cast<double>(element_count(dims));
    for (const int64_t a : axes) count *= static_cast<double>(dims[dims.size() - static_cast<size_t>(-a)]);
    return mul(b.emit(OpCode::k_reduce_sum, {x}, {{"axes", std::move(axes)}, {"keep_dims", keep}}),
               c(count > 0 ? 1 / count : 0));
  }
  // decay * old + (1 - decay) * value
  TensorId average(TensorId decay, TensorId rest, TensorId old, TensorId value) {
    return add(mul(decay, old), mul(rest, value));
  }
};

}  // namespace

void adafactor(UpdateBuilder& b, TensorId p, TensorId grad, bool decays, const Optimizer& o) {
  const DType dtype = accumulate_dtype(b.g.tensor(p).dtype);
  const Dims dims = b.g.tensor(p).dims;
  Math m{b, dtype};
  TensorId g = m.as(grad, dtype);
  if (b.scale != kNone) g = m.mul(g, b.scale);
  const TensorId count = m.add(m.as(b.updates(), dtype), m.c(1));
  const TensorId rest = b.emit(OpCode::k_pow, {count, m.c(o.decay_rate)});  // 1 - decay
  const TensorId decay = m.sub(m.c(1), rest);
  const TensorId squared = m.add(b.emit(OpCode::k_square, {g}), m.c(o.epsilon));

  TensorId u;
  if (dims.size() < 2) {
    const TensorId v = b.state(p, "v", dims);
    const TensorId next = m.average(decay, rest, v, squared);
    b.set_next(v, next);
    u = m.mul(g, m.rsqrt(next));
  } else {
    Dims row_dims(dims.begin(), dims.end() - 1), col_dims(dims.begin(), dims.end() - 2), spread_row = row_dims,
                                                                                         spread_col = col_dims;
    col_dims.push_back(dims.back());
    spread_row.push_back(1);
    spread_col.push_back(1);
    spread_col.push_back(dims.back());
    std::vector<int> of_row(dims.size() - 1), of_col;
    std::iota(of_row.begin(), of_row.end(), 0);
    of_col = of_row;
    of_col.back() = static_cast<int>(dims.size()) - 1;
    const TensorId row = b.state(p, "row", row_dims, of_row), col = b.state(p, "col", col_dims, of_col);
    const TensorId new_row = m.average(decay, rest, row, m.mean(squared, {-1}, false));
    const TensorId new_col = m.average(decay, rest, col, m.mean(squared, {-2}, false));
    b.set_next(row, new_row);
    b.set_next(col, new_col);
    const TensorId by_row = m.rsqrt(m.div(new_row, m.mean(new_row, {-1}, true)));
    const TensorId by_col = m.rsqrt(new_col);
    u = m.mul(m.mul(g, b.emit(OpCode::k_reshape, {by_row}, {{"shape", spread_row}})),
              b.emit(OpCode::k_reshape, {by_col}, {{"shape", spread_col}}));
  }
  // u / max(1, rms(u) / threshold)
  const TensorId rms = b.emit(OpCode::k_sqrt, {m.mean(b.emit(OpCode::k_square, {u}), {}, false)});
  u = m.div(u, b.emit(OpCode::k_maximum, {m.c(1), m.mul(rms, m.c(1 / o.clip_threshold))}));
  TensorId step = m.mul(u, b.rate);
  const TensorId wide = m.as(p, dtype);
  if (decays && o.weight_decay != 0) step = m.add(step, m.mul(wide, m.c(o.weight_decay)));
  b.set_next(p, m.as(m.sub(wide, step), b.g.tensor(p).dtype));
}

}  // namespace whale
