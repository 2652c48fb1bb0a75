// Cross entropy with label smoothing e: (1 - e) (lse - x[label]) + e (lse - mean(x)). A label that is neither in the
// vocabulary nor ignore_index gives NaN, so that it cannot pass unseen.
#include "device/ref/table.h"

namespace whale::ref {
namespace {

struct Labels {
  In labels;
  int64_t width, begin, all, ignore;  // the columns [begin, begin + width) of all
  double smoothing;
  Labels(const KernelSpec& spec, size_t operand, int64_t vocabulary)
      : labels(in(spec, operand)),
        width(vocabulary),
        begin(attr_int(*spec.attrs, "label_begin")),
        all(attr_int(*spec.attrs, "vocabulary") != 0 ? attr_int(*spec.attrs, "vocabulary") : vocabulary),
        ignore(attr_int(*spec.attrs, "ignore_index", -100)),
        smoothing(attr_float(*spec.attrs, "label_smoothing")) {}
  int64_t label(int64_t r) const { return labels.integer(r); }
  int64_t at(int64_t r) const { return label(r) - begin; }  // its column, which may be elsewhere
  bool here(int64_t r) const { return at(r) >= 0 && at(r) < width; }
  bool ignored(int64_t r) const { return label(r) == ignore; }
  bool valid(int64_t r) const { return label(r) >= 0 && label(r) < all; }
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
      const RowSum s(logits, row, shape.width);
      const double log_sum = std::log(s.sum), e = labels.smoothing;
      double loss = kNan, below = 0;  // the mean of top - x
      for (int64_t j = 0; j < shape.width; ++j) below += (s.top - logits[row + j]) / static_cast<double>(shape.width);
      if (labels.ignored(r))
        loss = 0;
      else if (labels.valid(r))
        loss = (1 - e) * (log_sum + (s.top - logits[row + labels.at(r)])) + (e > 0 ? e * (log_sum + below) : 0);
      losses.set(r, loss);
      if (lses.present()) lses.set(r, s.top + log_sum);
    }
  };
}

Body bind_cross_entropy_grad(const KernelSpec& spec) {
  const In dloss = in(spec, 0), logits = in(spec, 1), lses = in(spec, 3);
  const Out dlogits = out(spec, 0);
  const RowShape shape(spec.in[1].dims);
  const Labels labels(spec, 2, shape.width);
  return [=] {
    const double e = labels.smoothing, uniform = e / static_cast<double>(labels.all);
    for (int64_t r = 0; r < shape.rows; ++r) {
      const double scale = labels.ignored(r) ? 0 : labels.valid(r) ? dloss[r] : kNan;
      double top = lses[r], sum = 1;
      if (shape.width == labels.all && std::abs(top) >= kExactLse) {
        const RowSum s(logits, r * shape.width, shape.width);
        top = s.top, sum = s.sum;
      }
      for (int64_t j = 0; j < shape.width; ++j) {
        const double target = (j == labels.at(r) ? 1 - e : 0) + uniform;
        const double p = std::exp(logits[r * shape.width + j] - top) / sum;
        dlogits.set(r * shape.width + j, labels.ignored(r) ? 0 : scale * (p - target));
      }
    }
  };
}

Body bind_cross_entropy_stats(const KernelSpec& spec) {
  const In logits = in(spec, 0);
  const Out lses = out(spec, 0), picked = out(spec, 1);
  const RowShape shape(spec.in[0].dims);
  const Labels labels(spec, 1, shape.width);
  return [=] {
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t row = r * shape.width;
      const RowSum s(logits, row, shape.width);
      const bool none = std::isinf(s.top) && s.top < 0;  // nothing here: another part has the sum
      double total = 0;
      for (int64_t j = 0; j < shape.width; ++j) total += logits[row + j] / static_cast<double>(labels.all);
      lses.set(r, none ? s.top : s.top + std::log(s.sum));
      const double e = labels.smoothing;
      double value = kNan;
      if (labels.ignored(r))
        value = 0;
      else if (labels.valid(r))
        value = (labels.here(r) ? (1 - e) * logits[row + labels.at(r)] : 0) + (e > 0 ? e * total : 0);
      picked.set(r, value);
    }
  };
}

Body bind_cross_entropy_finish(const KernelSpec& spec) {
  const In lses = in(spec, 0), picked = in(spec, 1), labels = in(spec, 2);
  const Out losses = out(spec, 0);
  const int64_t ignore = attr_int(*spec.attrs, "ignore_index", -100);
  return [=] {
    for (int64_t r = 0; r < losses.count; ++r) losses.set(r, labels.integer(r) == ignore ? 0 : lses[r] - picked[r]);
  };
}

constexpr Row kRows[] = {
    {OpCode::k_cross_entropy, bind_cross_entropy},
    {OpCode::k_cross_entropy_grad, bind_cross_entropy_grad},
    {OpCode::k_cross_entropy_stats, bind_cross_entropy_stats},
    {OpCode::k_cross_entropy_finish, bind_cross_entropy_finish},
};

}  // namespace

Rows loss_rows() { return kRows; }

}  // namespace whale::ref
