// Updates of parameters, in place. One op updates many parameters: operands and results are tuples behind the scalars.
#include <algorithm>
#include <cstring>

#include "device/ref/table.h"

namespace whale::ref {
namespace {

// Tuple i of a variadic update: operands first + i * width ..., results i * results ....
struct Tuples {
  std::vector<In> in;
  std::vector<Out> out;
  size_t width, results, count;
  std::vector<double> decays;  // weight decay of each tuple
  Tuples(const KernelSpec& spec, size_t first, size_t width_, size_t results_) : width(width_), results(results_) {
    if (spec.in.size() < first || (spec.in.size() - first) % width != 0)
      throw internal("op '{}' has {} operands, which are not tuples of {}", spec.name, spec.in.size(), width);
    count = (spec.in.size() - first) / width;
    for (size_t i = first; i < spec.in.size(); ++i) in.push_back(In(spec.in[i]));
    for (size_t i = 0; i < spec.out.size(); ++i) out.push_back(Out(spec.out[i]));
    const Ints& flags = attr_ints(*spec.attrs, "decays");
    const double decay = attr_float(*spec.attrs, "weight_decay");
    for (size_t i = 0; i < count; ++i) decays.push_back(i < flags.size() && flags[i] == 0 ? 0 : decay);
  }
  const In& x(size_t tuple, size_t i) const { return in[tuple * width + i]; }
  const Out& y(size_t tuple, size_t i) const { return out[tuple * results + i]; }
};

// A scale that is NaN: results are the operands that they replace (-1: zero).
bool skips(double scale, const Tuples& tuples, std::initializer_list<int> which) {
  if (!std::isnan(scale)) return false;
  for (size_t t = 0; t < tuples.count; ++t) {
    size_t result = 0;
    for (const int k : which) {
      const Out& to = tuples.y(t, result++);
      const auto bytes = static_cast<size_t>(to.count * size_of(to.dtype));
      if (k < 0)
        std::memset(to.data, 0, bytes);
      else if (const In& from = tuples.x(t, static_cast<size_t>(k)); from.data != to.data && bytes != 0)
        std::memmove(to.data, from.data, bytes);
    }
  }
  return true;
}

double scalar(const In& x, double otherwise) { return x.present() ? x[0] : otherwise; }

Body bind_sgd(const KernelSpec& spec) {
  const In lr = in(spec, 0), scale = in(spec, 1);
  const double momentum = attr_float(*spec.attrs, "momentum");
  const bool nesterov = attr_bool(*spec.attrs, "nesterov");
  const size_t width = momentum != 0 ? 3 : 2;
  const Tuples tuples(spec, 2, width, width - 1);
  return [=] {
    const double rate = lr[0], clip = scalar(scale, 1);
    if (momentum != 0 ? skips(clip, tuples, {0, 2}) : skips(clip, tuples, {0})) return;
    for (size_t t = 0; t < tuples.count; ++t) {
      for (int64_t i = 0; i < tuples.x(t, 0).count; ++i) {
        const double p = tuples.x(t, 0)[i], g = clip * tuples.x(t, 1)[i] + tuples.decays[t] * p;
        double step = g;
        if (momentum != 0) {
          const double m = momentum * tuples.x(t, 2)[i] + g;
          tuples.y(t, 1).set(i, m);
          step = nesterov ? g + momentum * m : m;
        }
        tuples.y(t, 0).set(i, p - rate * step);
      }
    }
  };
}

// First and second moments, bias-corrected.
struct Adam {
  double beta1, beta2, epsilon;
  explicit Adam(const Attrs& attrs)
      : beta1(attr_float(attrs, "beta1", 0.9)),
        beta2(attr_float(attrs, "beta2", 0.999)),
        epsilon(attr_float(attrs, "epsilon", 1e-8)) {}
  double m(double old, double g) const { return beta1 * old + (1 - beta1) * g; }
  double v(double old, double g) const { return beta2 * old + (1 - beta2) * g * g; }
  double direction(double m, double v, double updates) const {
    return m / (1 - std::pow(beta1, updates + 1)) / (std::sqrt(v / (1 - std::pow(beta2, updates + 1))) + epsilon);
  }
};

Body bind_adam(const KernelSpec& spec) {
  const In lr = in(spec, 0), updates = in(spec, 1), scale = in(spec, 2);
  const Adam adam(*spec.attrs);
  const bool decoupled = attr_bool(*spec.attrs, "decoupled");
  const Tuples tuples(spec, 3, 4, 3);
  return [=] {
    const double rate = lr[0], clip = scalar(scale, 1), before = updates[0];
    if (skips(clip, tuples, {0, 2, 3})) return;
    for (size_t t = 0; t < tuples.count; ++t) {
      const double decay = tuples.decays[t];
      for (int64_t i = 0; i < tuples.x(t, 0).count; ++i) {
        const double p = tuples.x(t, 0)[i], g = clip * tuples.x(t, 1)[i] + (decoupled ? 0 : decay * p);
        const double m = adam.m(tuples.x(t, 2)[i], g), v = adam.v(tuples.x(t, 3)[i], g);
        tuples.y(t, 0).set(i, p - rate * (adam.direction(m, v, before) + (decoupled ? decay * p : 0)));
        tuples.y(t, 1).set(i, m);
        tuples.y(t, 2).set(i, v);
      }
    }
  };
}

Body bind_adagrad(const KernelSpec& spec) {
  const In lr = in(spec, 0), scale = in(spec, 1);
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-10);
  const Tuples tuples(spec, 2, 3, 2);
  return [=] {
    const double rate = lr[0], clip = scalar(scale, 1);
    if (skips(clip, tuples, {0, 2})) return;
    for (size_t t = 0; t < tuples.count; ++t) {
      for (int64_t i = 0; i < tuples.x(t, 0).count; ++i) {
        const double p = tuples.x(t, 0)[i], g = clip * tuples.x(t, 1)[i] + tuples.decays[t] * p;
        const double h = tuples.x(t, 2)[i] + g * g;
        tuples.y(t, 0).set(i, p - rate * g / (std::sqrt(h) + epsilon));
        tuples.y(t, 1).set(i, h);
      }
    }
  };
}

Body bind_lamb_direction(const KernelSpec& spec) {
  const In updates = in(spec, 0), scale = in(spec, 1);
  const Adam adam(*spec.attrs);
  const Tuples tuples(spec, 2, 4, 3);
  return [=] {
    const double clip = scalar(scale, 1), before = updates[0];
    if (skips(clip, tuples, {-1, 2, 3})) return;
    for (size_t t = 0; t < tuples.count; ++t) {
      for (int64_t i = 0; i < tuples.x(t, 0).count; ++i) {
        const double p = tuples.x(t, 0)[i], g = clip * tuples.x(t, 1)[i];
        const double m = adam.m(tuples.x(t, 2)[i], g), v = adam.v(tuples.x(t, 3)[i], g);
        tuples.y(t, 0).set(i, adam.direction(m, v, before) + tuples.decays[t] * p);
        tuples.y(t, 1).set(i, m);
        tuples.y(t, 2).set(i, v);
      }
    }
  };
}

Body bind_lamb_apply(const KernelSpec& spec) {
  const In lr = in(spec, 0);
  const Tuples tuples(spec, 1, 4, 1);
  return [=] {
    for (size_t t = 0; t < tuples.count; ++t) {
      const double pn = tuples.x(t, 2)[0], un = tuples.x(t, 3)[0];
      const double ratio = pn > 0 && un > 0 ? std::sqrt(pn) / std::sqrt(un) : 1;
      for (int64_t i = 0; i < tuples.x(t, 0).count; ++i)
        tuples.y(t, 0).set(i, tuples.x(t, 0)[i] - lr[0] * ratio * tuples.x(t, 1)[i]);
    }
  };
}

Body bind_clip_factor(const KernelSpec& spec) {
  std::vector<In> sums;
  for (size_t i = 0; i < spec.in.size(); ++i) sums.push_back(in(spec, i));
  const Out scale = out(spec, 0);
  const double max_norm = attr_float(*spec.attrs, "max_norm");
  return [=] {
    double sum = 0;
    for (const In& x : sums) sum += x[0];
    scale.set(0, std::min(1.0, max_norm / (std::sqrt(sum) + 1e-6)));
  };
}

Body bind_unscale(const KernelSpec& spec) {
  const In x = in(spec, 0), scale = in(spec, 1);
  const Out y = out(spec, 0), overflow = out(spec, 1);
  return [=] {
    bool finite = true;
    const double factor = 1 / scale[0];
    for (int64_t i = 0; i < x.count; ++i) {
      const double value = rounded(y.dtype, x[i] * factor);
      finite &= std::isfinite(value);
      y.set(i, value);
    }
    overflow.set(0, finite ? 0 : std::numeric_limits<double>::infinity());
  };
}

Body bind_overflow(const KernelSpec& spec) {
  std::vector<In> all;
  for (size_t i = 0; i < spec.in.size(); ++i) all.push_back(in(spec, i));
  const Out scale = out(spec, 0);
  return [=] {
    const bool finite = std::all_of(all.begin(), all.end(), [](const In& x) { return std::isfinite(x[0]); });
    scale.set(0, finite ? 1 : std::numeric_limits<double>::quiet_NaN());
  };
}

constexpr Row kRows[] = {
    {OpCode::k_sgd, bind_sgd},
    {OpCode::k_adam, bind_adam},
    {OpCode::k_adagrad, bind_adagrad},
    {OpCode::k_lamb_direction, bind_lamb_direction},
    {OpCode::k_lamb_apply, bind_lamb_apply},
    {OpCode::k_clip_factor, bind_clip_factor},
    {OpCode::k_unscale, bind_unscale},
    {OpCode::k_overflow, bind_overflow},
};

}  // namespace

Rows optimizer_rows() { return kRows; }

}  // namespace whale::ref
