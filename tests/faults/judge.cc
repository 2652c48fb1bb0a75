#include "judge.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "compile/source_check.h"
#include "plan/in_float64.h"
#include "process.h"
#include "trainer.h"

namespace whale::test {
namespace {

constexpr int kSteps = 20;
constexpr int64_t kIds = 3;         // integers are below
constexpr double kCounts = 1e-6;    // of the movement of a variable, of the size of an output
constexpr double kNothing = 1e-12;  // outputs are no closer: gradients that are truly zero are rounding
constexpr double kUnstable = 1e-9;  // of the movement: a variable whose rounding moves it more is no ground

std::vector<std::vector<double>> first_copies(const Trainer& t, const Plan& plan) {
  std::vector<std::vector<double>> out;
  for (size_t v = 0; v < plan.variables.size(); ++v) {
    auto& values = out.emplace_back(static_cast<size_t>(element_count(plan.variables[v].dims)));
    std::vector<char> known(values.size());
    t.each_copy(v, [&](int32_t, size_t at, double x) {
      if (!known[at]) values[at] = x, known[at] = 1;
    });
  }
  return out;
}

// Of what is handed out; the same infinity is no difference.
double apart(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    const double d = a[i] - b[i];
    sum += std::isfinite(d) ? d * d : std::numeric_limits<double>::infinity();
  }
  return std::sqrt(sum);
}

// What a child sends back.
void put(std::string& to, const void* data, size_t bytes) { to.append(static_cast<const char*>(data), bytes); }
void put(std::string& to, double x) { put(to, &x, sizeof x); }
double take(const std::string& from, size_t& at) {
  double x = 0;
  if (at + sizeof x <= from.size()) std::memcpy(&x, from.data() + at, sizeof x);
  at += sizeof x;
  return x;
}

// Judged is in float64, whatever the precision that it was made for.
Plan as_judged(const Plan& plan) { return plan.precision == Precision::kFloat64 ? plan : in_float64(plan); }

std::string trained(const Plan& given, const Case& c) {
  const Plan plan = as_judged(given);
  Trainer plain(plan, c.seed), nudged(plan, c.seed);
  const std::vector<std::vector<double>> start = first_copies(plain, plan);
  Dice dice(c.seed), sides(1);
  double first = 0;
  std::string handed;
  for (int step = 0; step < kSteps; ++step) {
    const Values inputs = random_inputs(c.graph, c.batch, dice, kIds);
    Values moved = inputs;
    for (const TensorId id : c.graph.inputs)
      if (const Tensor& t = c.graph.tensor(id); is_float(t.dtype))
        for (double& x : moved[t.name]) x *= 1 + 0x1p-51 * sides.real();
    const std::vector<std::vector<double>> of_plain = plain.step(inputs), of_nudged = nudged.step(moved);
    for (size_t k = 0; k < of_plain.size(); ++k) {
      put(handed, apart(of_nudged[k], of_plain[k]));
      put(handed, of_plain[k].data(), of_plain[k].size() * sizeof(double));
    }
    const double loss = plain.loss(of_plain);
    if (step == 0) first = std::abs(loss);
    if (!(std::abs(loss) < 1e4 * (1 + first))) return "Xthe loss grows";
  }
  std::string out = "T";
  const std::vector<std::vector<double>> a = first_copies(plain, plan), b = first_copies(nudged, plan);
  for (size_t v = 0; v < a.size(); ++v) {
    bool same = true;
    plain.each_copy(v, [&](int32_t, size_t at, double x) { same &= x == a[v][at]; });
    if (!same) return fmt::format("Xcopies of '{}' differ", plan.variables[v].name);
    const double movement = distance(a[v], start[v]), rounding = distance(a[v], b[v]);
    // A parameter that only rounding moves is left out by its bound; one that is moved, and by rounding too, is no
    // ground.
    if (movement > 1e-9 && rounding > kUnstable * movement)
      return fmt::format("X'{}' is moved by rounding", plan.variables[v].name);
    put(out, movement), put(out, rounding);
    put(out, a[v].data(), a[v].size() * sizeof(double));
  }
  return out + handed;
}

std::string judged(const Plan& damaged, const Case& c, const Trained& whole) {
  std::shared_ptr<const Plan> plan;
  try {
    const std::vector<uint8_t> bytes = serialize(damaged);
    const Plan whole_plan = deserialize(bytes.data(), bytes.size());
    verify_source(whole_plan);
    plan = std::make_shared<const Plan>(as_judged(whole_plan));
  } catch (const Error& e) {
    return std::string("R") + e.what();
  }
  std::optional<Trainer> trainer;
  try {
    trainer.emplace(*plan, c.seed);
  } catch (const Error& e) {
    return std::string("U") + e.what();
  }
  Dice dice(c.seed);
  double worst = 0;
  std::string name;
  try {
    for (int step = 0; step < kSteps; ++step) {
      const std::vector<std::vector<double>> handed = trainer->step(random_inputs(c.graph, c.batch, dice, kIds));
      for (size_t k = 0; k < handed.size() && k < whole.outputs.size(); ++k) {
        const Trained::Output& want = whole.outputs[k];
        const size_t at = static_cast<size_t>(step);
        const double by = apart(handed[k], want.elements[at]);
        const double ratio = by / std::max({want.size * kCounts, 1000 * want.rounding, kNothing});
        if (ratio > worst)
          worst = ratio, name = fmt::format("output '{}' of step {} is {:.2e} off, its size {:.2e}",
                                            trainer->outputs()[k].name, step, by, want.size);
      }
    }
  } catch (const Error& e) {
    return std::string("F") + e.what();
  }
  for (size_t v = 0; v < plan->variables.size(); ++v) {
    const Trained::Value& want = whole.variables[v];
    std::vector<double> off(plan->devices.size());
    trainer->each_copy(v, [&](int32_t device, size_t at, double x) {
      const double d = x - want.elements[at];
      off[device] += std::isfinite(d) ? d * d : std::numeric_limits<double>::infinity();
    });
    const double bound = std::max(want.movement * kCounts, 1000 * want.rounding);
    for (size_t d = 0; d < off.size(); ++d) {
      const double by = std::sqrt(off[d]);
      if (by == 0) continue;
      const double ratio = bound > 0 ? by / bound : std::numeric_limits<double>::infinity();
      if (ratio > worst)
        worst = ratio, name = fmt::format("'{}' on device {} is {:.2e} off, moved {:.2e}", plan->variables[v].name, d,
                                          by, want.movement);
    }
  }
  std::string out = worst > 1 ? "D" : "S";
  put(out, worst * kCounts);
  return out + name;
}

}  // namespace

std::optional<Trained> train(const Plan& plan, const Case& c, std::string& why) {
  const Ended ended = in_process([&] { return trained(plan, c); });
  if (ended.how != Ended::How::kWell || ended.said[0] != 'T') {
    why = ended.how == Ended::How::kWell ? ended.said.substr(1) : "crash or hang: " + ended.said;
    return std::nullopt;
  }
  Trained out;
  size_t at = 1;
  for (const PlanVariable& v : plan.variables) {
    Trained::Value value;
    value.movement = take(ended.said, at), value.rounding = take(ended.said, at);
    for (int64_t k = 0; k < element_count(v.dims); ++k) value.elements.push_back(take(ended.said, at));
    out.variables.push_back(std::move(value));
  }
  const Entry& entry = train_entry(plan);
  out.outputs.resize(entry.outputs.size());
  for (int step = 0; step < kSteps; ++step)
    for (size_t k = 0; k < entry.outputs.size(); ++k) {
      Trained::Output& output = out.outputs[k];
      output.rounding = std::max(output.rounding, take(ended.said, at));
      auto& values = output.elements.emplace_back();
      double square = 0;
      for (int64_t i = 0; i < element_count(entry.outputs[k].dims); ++i) {
        values.push_back(take(ended.said, at));
        if (std::isfinite(values.back())) square += values.back() * values.back();
      }
      output.size = std::max(output.size, std::sqrt(square));
    }
  return out;
}

Finding judge(const Plan& damaged, const Case& c, const Trained& whole) {
  const Ended ended = in_process([&] { return judged(damaged, c, whole); });
  Finding v;
  if (ended.how != Ended::How::kWell) {
    v.judgement = ended.how == Ended::How::kHang ? Judgement::kHang : Judgement::kCrash;
    v.text = ended.said;
    return v;
  }
  v.text = ended.said.substr(1);
  switch (ended.said[0]) {
    case 'R': v.judgement = Judgement::kRefused; return v;
    case 'U': v.judgement = Judgement::kUnbound; return v;
    case 'F': v.judgement = Judgement::kFailed; return v;
    case 'D': v.judgement = Judgement::kDiffers; break;
    case 'S': v.judgement = Judgement::kSame; break;
    default: v.judgement = Judgement::kCrash; return v;  // an exception that is no Error
  }
  size_t at = 1;
  v.worst = take(ended.said, at);
  v.text = ended.said.substr(at);
  return v;
}

}  // namespace whale::test
