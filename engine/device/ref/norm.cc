// Layer norm and RMS norm over the last dimension.
#include <algorithm>

#include "device/ref/table.h"

namespace whale::ref {
namespace {

Body bind_layer_norm(const KernelSpec& spec) {
  const In x = in(spec, 0), gamma = in(spec, 1), beta = in(spec, 2);
  const Out y = out(spec, 0), means = out(spec, 1), rstds = out(spec, 2);
  const RowShape shape(spec.in[0].dims);
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-5), d = static_cast<double>(shape.width);
  return [=] {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      double mean = 0, variance = 0;
      for (int64_t j = 0; j < shape.width; ++j) mean += x[row + j] / d;
      for (int64_t j = 0; j < shape.width; ++j) variance += (x[row + j] - mean) * (x[row + j] - mean) / d;
      const double rstd = 1 / std::sqrt(variance + epsilon);
      for (int64_t j = 0; j < shape.width; ++j) {
        const double xhat = (x[row + j] - mean) * rstd;
        y.set(row + j, xhat * (gamma.present() ? gamma[j] : 1) + (beta.present() ? beta[j] : 0));
      }
      if (means.present()) means.set(r, mean);
      if (rstds.present()) rstds.set(r, rstd);
    }
  };
}

// g = dy gamma; dx = rstd (g - mean(g) - xhat mean(g xhat)); dgamma = sum(dy xhat); dbeta = sum(dy).
Body bind_layer_norm_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0), x = in(spec, 1), means = in(spec, 2), rstds = in(spec, 3), gamma = in(spec, 4);
  Results results(spec);
  const Out dx = results.take(), dgamma = results.take(gamma.present()),
            dbeta = results.take(attr_bool(*spec.attrs, "bias"));
  const RowShape shape(spec.in[0].dims);
  const double d = static_cast<double>(shape.width);
  return [=, gamma_sum = room(shape.width), beta_sum = room(shape.width)]() mutable {
    std::fill(gamma_sum.begin(), gamma_sum.end(), 0.0);
    std::fill(beta_sum.begin(), beta_sum.end(), 0.0);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      const double mean = means[r], rstd = rstds[r];
      const auto scaled = [&](int64_t j) { return dy[row + j] * (gamma.present() ? gamma[j] : 1); };
      const auto xhat = [&](int64_t j) { return (x[row + j] - mean) * rstd; };
      double g = 0, gx = 0;
      for (int64_t j = 0; j < shape.width; ++j) {
        g += scaled(j) / d;
        gx += scaled(j) * xhat(j) / d;
      }
      for (int64_t j = 0; j < shape.width; ++j) {
        gamma_sum[j] += dy[row + j] * xhat(j);
        beta_sum[j] += dy[row + j];
        dx.set(row + j, rstd * (scaled(j) - g - xhat(j) * gx));
      }
    }
    if (dgamma.present()) write(dgamma, gamma_sum);
    if (dbeta.present()) write(dbeta, beta_sum);
  };
}

Body bind_rms_norm(const KernelSpec& spec) {
  const In x = in(spec, 0), gamma = in(spec, 1);
  const Out y = out(spec, 0), rstds = out(spec, 1);
  const RowShape shape(spec.in[0].dims);
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-6), d = static_cast<double>(shape.width);
  return [=] {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      double square = 0;
      for (int64_t j = 0; j < shape.width; ++j) square += x[row + j] * x[row + j] / d;
      const double rstd = 1 / std::sqrt(square + epsilon);
      for (int64_t j = 0; j < shape.width; ++j) y.set(row + j, x[row + j] * rstd * (gamma.present() ? gamma[j] : 1));
      if (rstds.present()) rstds.set(r, rstd);
    }
  };
}

// As layer norm without the mean: dx = rstd (g - xhat mean(g xhat)).
Body bind_rms_norm_grad(const KernelSpec& spec) {
  const In dy = in(spec, 0), x = in(spec, 1), rstds = in(spec, 2), gamma = in(spec, 3);
  Results results(spec);
  const Out dx = results.take(), dgamma = results.take(gamma.present());
  const RowShape shape(spec.in[0].dims);
  const double d = static_cast<double>(shape.width);
  return [=, gamma_sum = room(shape.width)]() mutable {
    std::fill(gamma_sum.begin(), gamma_sum.end(), 0.0);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      const double rstd = rstds[r];
      const auto scaled = [&](int64_t j) { return dy[row + j] * (gamma.present() ? gamma[j] : 1); };
      double gx = 0;
      for (int64_t j = 0; j < shape.width; ++j) gx += scaled(j) * x[row + j] * rstd / d;
      for (int64_t j = 0; j < shape.width; ++j) {
        const double xhat = x[row + j] * rstd;
        gamma_sum[j] += dy[row + j] * xhat;
        dx.set(row + j, rstd * (scaled(j) - xhat * gx));
      }
    }
    if (dgamma.present()) write(dgamma, gamma_sum);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_layer_norm, bind_layer_norm},
    {OpCode::k_layer_norm_grad, bind_layer_norm_grad},
    {OpCode::k_rms_norm, bind_rms_norm},
    {OpCode::k_rms_norm_grad, bind_rms_norm_grad},
};

}  // namespace

Rows norm_rows() { return kRows; }

}  // namespace whale::ref
