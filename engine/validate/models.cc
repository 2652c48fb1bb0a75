// Steps of whole models, composed of the ops of cost/curve.h: what an eager framework runs for a transformer of
// float32, kernel by kernel. No constants but those of the GPU.
#include <algorithm>
#include <array>
#include <cmath>

#include "base/error.h"
#include "cost/curve.h"
#include "validate/csv.h"
#include "validate/errors.h"
#include "validate/gpu_forms.h"
#include "validate/left_out.h"
#include "validate/sheets.h"

namespace whale {
namespace {

constexpr double kFloat32 = 4;
constexpr double kMask = 0.25;  // of a float32: a byte an element, which dropout and where write and read again

enum class Family { kGpt, kBert, kOpt };

struct Transformer {
  std::string_view name;
  Family family;
  double layers, hidden, heads, inner, vocabulary;
};
constexpr std::array kTransformers{
    Transformer{"bert_large", Family::kBert, 24, 1024, 16, 4096, 30522},
    Transformer{"gpt2_large", Family::kGpt, 36, 1280, 20, 5120, 50257},
    Transformer{"gpt3_xl", Family::kGpt, 24, 3072, 24, 12288, 50257},
    Transformer{"gpt3_27", Family::kGpt, 32, 2560, 32, 10240, 50257},
    Transformer{"opt_13", Family::kOpt, 24, 2048, 32, 8192, 50272},
};

// Passes over memory (in tensors of that many elements, read or written) and kernels that make them.
struct Pass {
  double forward, backward;
  double forward_kernels = 1, backward_kernels = 1;
};
constexpr Pass kCopy{2, 2};
constexpr Pass kHeadsApart{2, 2, 3, 3};  // queries, keys, values
constexpr Pass kScale{2, 2};
constexpr Pass kCausal{2 + kMask, 2 + kMask};  // where
constexpr Pass kAddMask{2, 0};                 // of each sample, whose gradient nobody asks for
constexpr Pass kAddWholeMask{2 + kMask, 0};
constexpr Pass kDropout{2 + kMask, 2 + kMask};
constexpr Pass kResidual{3, 3};
constexpr Pass kActivation{2, 3};          // one kernel
constexpr Pass kTanhGelu{18, 28, 8, 12};   // power, tanh, sums and products, a kernel each
constexpr double kSoftmaxBackward = 1.25;  // of forward: reads result and gradient, writes one
constexpr double kNormBackward = 3;        // more passes than forward: gradients of scale and shift

class Step {
 public:
  Step(const DeviceCurve& curve, bool training) : curve_(curve), training_(training) {}

  double forward() const { return forward_; }
  double backward() const { return training_ ? backward_ : 0; }

  void linear(double rows, double in, double out, bool bias = true) {
    queue(forward_, device(product_seconds({1, rows, out, in}, curve_)), 1);
    queue(backward_,
          device(product_seconds({1, rows, in, out}, curve_)) + device(product_seconds({1, in, out, rows}, curve_)) +
              (bias ? passes(rows * out) : 0),
          bias ? 3 : 2);
  }
  void batched(double batch, double m, double n, double k) {
    queue(forward_, device(product_seconds({batch, m, n, k}, curve_)), 1);
    queue(backward_,
          device(product_seconds({batch, m, k, n}, curve_)) + device(product_seconds({batch, k, n, m}, curve_)), 2);
  }
  void pass(double elements, const Pass& p) {
    queue(forward_, passes(p.forward * elements), p.forward_kernels);
    if (p.backward > 0) queue(backward_, passes(p.backward * elements), p.backward_kernels);
  }
  void dropout(double elements) {
    if (training_) pass(elements, kDropout);
  }
  void softmax(double rows, double columns) {
    const double seconds = device(softmax_seconds(rows, columns, kFloat32, curve_));
    queue(forward_, seconds, 1);
    queue(backward_, kSoftmaxBackward * seconds, 1);
  }
  void layer_norm(double rows, double columns) {
    const double seconds = device(layer_norm_seconds(rows, columns, kFloat32, curve_));
    queue(forward_, seconds, 1);
    queue(backward_, seconds + passes(kNormBackward * rows * columns), 2);
  }

 private:
  double device(double seconds) const { return seconds - curve_.constants.start_seconds; }
  double passes(double elements) const { return device(pass_seconds(kFloat32 * elements, curve_)); }
  // The host starts kernels while earlier ones run: a step waits for whichever is slower.
  void queue(double& total, double seconds, double kernels) const {
    total += std::max(seconds, kernels * curve_.constants.start_seconds);
  }
  const DeviceCurve& curve_;
  bool training_;
  double forward_ = 0, backward_ = 0;
};

void attention(Step& step, const Transformer& t, double batch, double sequence) {
  const double rows = batch * sequence, scores = batch * t.heads * sequence * sequence;
  if (t.family == Family::kGpt)
    step.linear(rows, t.hidden, 3 * t.hidden);
  else
    for (int i = 0; i < 3; ++i) step.linear(rows, t.hidden, t.hidden);
  step.pass(3 * rows * t.hidden, kHeadsApart);
  step.batched(batch * t.heads, sequence, sequence, t.hidden / t.heads);
  if (t.family != Family::kOpt) step.pass(scores, kScale);
  if (t.family == Family::kBert) step.pass(scores, kAddMask);
  if (t.family == Family::kOpt) step.pass(scores, kAddWholeMask);
  if (t.family != Family::kBert) step.pass(scores, kCausal);
  step.softmax(batch * t.heads * sequence, sequence);
  step.dropout(scores);
  step.batched(batch * t.heads, sequence, t.hidden / t.heads, sequence);
  step.pass(rows * t.hidden, kCopy);
  step.linear(rows, t.hidden, t.hidden);
  step.dropout(rows * t.hidden);
  step.pass(rows * t.hidden, kResidual);
  step.layer_norm(rows, t.hidden);
}

void feed_forward(Step& step, const Transformer& t, double rows) {
  step.linear(rows, t.hidden, t.inner);
  step.pass(rows * t.inner, t.family == Family::kGpt ? kTanhGelu : kActivation);
  step.linear(rows, t.inner, t.hidden);
  step.dropout(rows * t.hidden);
  step.pass(rows * t.hidden, kResidual);
  step.layer_norm(rows, t.hidden);
}

Step step_of(const Transformer& t, double batch, double sequence, bool training, const DeviceCurve& curve) {
  Step step(curve, training);
  const double rows = batch * sequence;
  for (int i = 0; i < static_cast<int>(t.layers); ++i) {
    attention(step, t, batch, sequence);
    feed_forward(step, t, rows);
  }
  if (t.family == Family::kBert) {
    if (!training) return step;  // a classifier of the first token
    step.linear(rows, t.hidden, t.hidden);
    step.pass(rows * t.hidden, kActivation);
  }
  step.layer_norm(rows, t.hidden);
  step.linear(rows, t.hidden, t.vocabulary, t.family == Family::kBert);
  return step;
}

double count(const Csv& csv, size_t row, std::string_view column) {
  const int64_t value = csv.whole(row, column);
  if (value < 1 || value > (1 << 20))
    throw invalid("{}, row {}: column '{}' is {}, expected 1 to {}", csv.path, row + 1, column, value, 1 << 20);
  return static_cast<double>(value);
}

}  // namespace

bool is_models(const std::string& path) {
  return has_columns(path, {"gpu", "model", "mode", "seq", "batch", "strategy", "fw_ms", "bwall_ms", "e2e_ms"});
}

Json validate_models(const std::string& path, const ValidateOptions& options) {
  const Csv csv = read_csv(path);
  Curves curves(options.profiles);
  Errors errors;
  LeftOut left_out;
  for (size_t row = 0; row < csv.rows.size(); ++row) {
    const std::string &gpu = csv.text(row, "gpu"), &name = csv.text(row, "model"), &mode = csv.text(row, "mode");
    const std::string& strategy = csv.text(row, "strategy");
    if (mode != "train" && mode != "inf")
      throw invalid("{}, row {}: mode is '{}', expected train or inf", path, row + 1, mode);
    const double measured = csv.number(row, "e2e_ms") * 1e-3;
    if (measured <= 0) throw invalid("{}, row {}: e2e_ms is 0, expected a time above it", path, row + 1);
    if (!strategy.empty()) {
      left_out.add("of strategy " + strategy);
      continue;
    }
    const auto* model = std::ranges::find_if(kTransformers, [&](const Transformer& t) { return t.name == name; });
    if (model == kTransformers.end()) {
      left_out.add("of model " + name);
      continue;
    }
    const bool training = mode == "train";
    const DeviceCurve& curve = curves.of(gpu);
    const Step step = step_of(*model, count(csv, row, "batch"), count(csv, row, "seq"), training, curve);
    const std::string what = training ? "training" : "inference";
    errors.add({what, what + (curve.note.empty() ? ", GPUs with constants" : ", GPUs without constants"), name, gpu,
                fmt::format("{} of {}", what, gpu)},
               step.forward() + step.backward(), measured);
  }
  if (!errors.rows()) throw invalid("{} has no row of one GPU and a model that is known: {}", path, left_out.line(0));
  Json out;
  errors.write(out);
  left_out.write(out);
  out["notes"] = curves.note_list();
  out["text"] =
      "steps of whole models, composed of their ops\n" + left_out.line(errors.rows()) + errors.table() + curves.notes();
  return out;
}

}  // namespace whale
