// Batch norm and the pieces that canonicalise makes of it. Statistics are sums and sums of squares in float64, so that
// devices can add theirs; `count` is the global number of elements behind each channel.
#include <algorithm>

#include "device/batch_norm_groups.h"
#include "device/ref/table.h"

namespace whale::ref {
namespace {

struct Moments {
  double mean, variance, rstd;
  Moments(double sum, double squares, double count, double epsilon)
      : mean(sum / count),
        variance(std::max(squares / count - mean * mean, 0.0)),
        rstd(1 / std::sqrt(variance + epsilon)) {}
};

// Channel statistics as a function of the channel.
struct Statistics {
  In stats;
  int64_t channels;
  double count, epsilon;
  Statistics(const KernelSpec& spec, size_t operand)
      : stats(in(spec, operand)),
        channels(spec.in[operand].dims.back()),
        count(static_cast<double>(attr_int(*spec.attrs, "count"))),
        epsilon(attr_float(*spec.attrs, "epsilon", 1e-5)) {}
  Moments at(int64_t c) const { return Moments(stats[c], stats[channels + c], count, epsilon); }
};

Body bind_batch_norm(const KernelSpec& spec) {
  const In x = in(spec, 0), gamma = in(spec, 1), beta = in(spec, 2);
  const Out y = out(spec, 0);
  const RowShape shape(spec.in[0].dims);
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-5);
  const int64_t groups = std::max<int64_t>(attr_int(*spec.attrs, "groups", 1), 1), rows = shape.rows / groups;
  return [=] {
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t c = 0; c < shape.width; ++c) {
        const auto at = [&](int64_t r) { return (g * rows + r) * shape.width + c; };
        double sum = 0, squares = 0;
        for (int64_t r = 0; r < rows; ++r) {
          sum += x[at(r)];
          squares += x[at(r)] * x[at(r)];
        }
        const Moments m(sum, squares, static_cast<double>(rows), epsilon);
        for (int64_t r = 0; r < rows; ++r) y.set(at(r), (x[at(r)] - m.mean) * m.rstd * gamma[c] + beta[c]);
      }
    }
  };
}

Body bind_stats(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out stats = out(spec, 0);
  const int64_t channels = spec.in[0].dims.back();
  return [=, sums = room(2 * channels)]() mutable {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (int64_t i = 0; i < x.count; ++i) {
      const auto c = static_cast<size_t>(i % channels);
      sums[c] += x[i];
      sums[c + static_cast<size_t>(channels)] += x[i] * x[i];
    }
    write(stats, sums);
  };
}

Body bind_apply(const KernelSpec& spec) {
  const In x = in(spec, 0), gamma = in(spec, 2), beta = in(spec, 3), residual = in(spec, 4);
  const Out y = out(spec, 0);
  const Statistics statistics(spec, 1);
  const bool relu = attr_bool(*spec.attrs, "relu");
  return [=] {
    for (int64_t c = 0; c < statistics.channels; ++c) {
      const Moments m = statistics.at(c);
      for (int64_t i = c; i < x.count; i += statistics.channels) {
        double value = (x[i] - m.mean) * m.rstd * gamma[c] + beta[c];
        if (residual.present()) value += residual[i];
        y.set(i, relu && value < 0 ? 0 : value);
      }
    }
  };
}

// dy where the relu behind the norm let it through.
struct MaskedGradient {
  In dy, y;
  bool relu;
  double operator[](int64_t i) const { return relu && y[i] <= 0 ? 0 : dy[i]; }
};

Body bind_grad_stats(const KernelSpec& spec) {
  const In x = in(spec, 1);
  const MaskedGradient dy{in(spec, 0), in(spec, 3), attr_bool(*spec.attrs, "relu")};
  const Statistics statistics(spec, 2);
  const Out sums = out(spec, 0);
  return [=] {
    for (int64_t c = 0; c < statistics.channels; ++c) {
      const Moments m = statistics.at(c);
      double sum = 0, sum_xhat = 0;
      for (int64_t i = c; i < x.count; i += statistics.channels) {
        sum += dy[i];
        sum_xhat += dy[i] * (x[i] - m.mean) * m.rstd;
      }
      sums.set(c, sum);
      sums.set(statistics.channels + c, sum_xhat);
    }
  };
}

Body bind_grad(const KernelSpec& spec) {
  const In x = in(spec, 1), gamma = in(spec, 3), sums = in(spec, 4);
  const MaskedGradient dy{in(spec, 0), in(spec, 5), attr_bool(*spec.attrs, "relu")};
  const Statistics statistics(spec, 2);
  Results results(spec);
  const Out dx = results.take(), dresidual = results.take(attr_bool(*spec.attrs, "residual"));
  return [=] {
    for (int64_t c = 0; c < statistics.channels; ++c) {
      const Moments m = statistics.at(c);
      const double mean_dy = sums[c] / statistics.count,
                   mean_dy_xhat = sums[statistics.channels + c] / statistics.count;
      for (int64_t i = c; i < x.count; i += statistics.channels) {
        const double g = dy[i], xhat = (x[i] - m.mean) * m.rstd;
        if (dresidual.present()) dresidual.set(i, g);
        dx.set(i, gamma[c] * m.rstd * (g - mean_dy - xhat * mean_dy_xhat));
      }
    }
  };
}

Body bind_moments(const KernelSpec& spec) {
  const In stats = in(spec, 0);
  const Out moments = out(spec, 0);
  const int64_t here = spec.in[0].dims[0], channels = spec.in[0].dims.back();
  const auto count = static_cast<double>(attr_int(*spec.attrs, "count"));
  const auto groups = static_cast<double>(attr_int(*spec.attrs, "groups", 1));
  return [=] {
    for (int64_t c = 0; c < channels; ++c) {
      double mean = 0, unbiased = 0;
      for (int64_t g = 0; g < here; ++g) {
        const Moments m(stats[2 * g * channels + c], stats[(2 * g + 1) * channels + c], count, 0);
        mean += m.mean, unbiased += m.variance * count / std::max(count - 1, 1.0);
      }
      moments.set(c, mean / groups);
      moments.set(channels + c, unbiased / groups);
    }
  };
}

Body bind_running(const KernelSpec& spec) {
  const In means = in(spec, 0), variances = in(spec, 1), moments = in(spec, 2), scale = in(spec, 3);
  const Out new_means = out(spec, 0), new_variances = out(spec, 1);
  const int64_t channels = spec.in[2].dims.back();
  const double momentum = attr_float(*spec.attrs, "momentum", 0.1);
  return [=] {
    if (scale.present() && std::isnan(scale[0])) return;
    for (int64_t c = 0; c < channels; ++c) {
      new_means.set(c, (1 - momentum) * means[c] + momentum * moments[c]);
      new_variances.set(c, (1 - momentum) * variances[c] + momentum * moments[channels + c]);
    }
  };
}

Body bind_inference(const KernelSpec& spec) {
  const In x = in(spec, 0), gamma = in(spec, 1), beta = in(spec, 2), means = in(spec, 3), variances = in(spec, 4);
  const Out y = out(spec, 0);
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-5);
  const int64_t channels = spec.in[0].dims.back();
  return [=] {
    for (int64_t i = 0; i < x.count; ++i) {
      const int64_t c = i % channels;
      y.set(i, (x[i] - means[c]) / std::sqrt(variances[c] + epsilon) * gamma[c] + beta[c]);
    }
  };
}

// Group after group: `bind` sees one of them.
template <Body (*bind)(const KernelSpec&), const GroupOperands& operands>
Body each_group(const KernelSpec& spec) {
  std::vector<Body> bodies;
  for (const KernelSpec& group : by_group(spec, operands)) bodies.push_back(bind(group));
  return [bodies = std::move(bodies)]() mutable {
    for (Body& body : bodies) body();
  };
}

constexpr Row kRows[] = {
    {OpCode::k_batch_norm, bind_batch_norm},
    {OpCode::k_batch_stats, each_group<bind_stats, kStatsGroups>},
    {OpCode::k_batch_norm_apply, each_group<bind_apply, kApplyGroups>},
    {OpCode::k_batch_norm_grad_stats, each_group<bind_grad_stats, kGradStatsGroups>},
    {OpCode::k_batch_norm_grad, each_group<bind_grad, kGradGroups>},
    {OpCode::k_batch_norm_moments, bind_moments},
    {OpCode::k_batch_norm_running, bind_running},
    {OpCode::k_batch_norm_inference, bind_inference},
};

}  // namespace

Rows batch_norm_rows() { return kRows; }

}  // namespace whale::ref
