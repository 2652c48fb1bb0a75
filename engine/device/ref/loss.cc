// Cross entropy with label smoothing e: (1 - e) (lse - x[label]) + e (lse - mean(x)). A label that is neither in the
// vocabulary nor ignore_index gives NaN, so that it cannot pass unseen.
#include "device/ref/table.h"

namespace whale::ref {
namespace {

struct Labels {
  In labels;
  int64_t width, ignore;
  double smoothing;
  Labels(const KernelSpec& spec, size_t operand, int64_t vocabulary)
      : labels(in(spec, operand)),
        width(vocabulary),
        ignore(attr_int(*spec.attrs, "ignore_index", -100)),
        smoothing(attr_float(*spec.attrs, "label_smoothing")) {}
  int64_t at(int64_t r) const { return labels.integer(r); }
  bool ignored(int64_t r) const { return at(r) == ignore; }
  bool valid(int64_t r) const { return at(r) >= 0 && at(r) < width; }
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Body bind_cross_entropy(const KernelSpec& spec) {
  const In logits = in(spec, 0);
  const Out losses = out(spec, 0), lses = out(spec, 1);
  const RowShape shape(spec.in[0].dims);
  const Labels labels(spec, 1, shape.width);
  return [=] {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      double top = -std::numeric_limits<double>::infinity(), sum = 0, mean = 0;
      for (int64_t j = 0; j < shape.width; ++j) top = std::fmax(top, logits[row + j]);
      for (int64_t j = 0; j < shape.width; ++j) {
        sum += std::exp(logits[row + j] - top);
        mean += logits[row + j] / static_cast<double>(shape.width);
      }
      const double lse = top + std::log(sum), e = labels.smoothing;
      double loss = kNan;
      if (labels.ignored(r))
        loss = 0;
      else if (labels.valid(r))
        loss = (1 - e) * (lse - logits[row + labels.at(r)]) + (e > 0 ? e * (lse - mean) : 0);
      losses.set(r, loss);
      if (lses.present()) lses.set(r, lse);
    }
  };
}

Body bind_cross_entropy_grad(const KernelSpec& spec) {
  const In dloss = in(spec, 0), logits = in(spec, 1), lses = in(spec, 3);
  const Out dlogits = out(spec, 0);
  const RowShape shape(spec.in[1].dims);
  const Labels labels(spec, 2, shape.width);
  return [=] {
    const double e = labels.smoothing, uniform = e / static_cast<double>(shape.width);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const double scale = labels.ignored(r) ? 0 : labels.valid(r) ? dloss[r] : kNan;
      for (int64_t j = 0; j < shape.width; ++j) {
        const double target = (j == labels.at(r) ? 1 - e : 0) + uniform;
        const double p = std::exp(logits[r * shape.width + j] - lses[r]);
        dlogits.set(r * shape.width + j, labels.ignored(r) ? 0 : scale * (p - target));
      }
    }
  };
}

constexpr Row kRows[] = {
    {OpCode::k_cross_entropy, bind_cross_entropy},
    {OpCode::k_cross_entropy_grad, bind_cross_entropy_grad},
};

}  // namespace

Rows loss_rows() { return kRows; }

}  // namespace whale::ref
