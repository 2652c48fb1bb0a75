#include "lockstep.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "outputs.h"

namespace tool {
namespace {

constexpr size_t kSamples = 1024;    // of a parameter, for its movement
constexpr double kFloor = 8;         // roundings of a stored tensor, and one more a step
constexpr double kFlips = 6;         // nine elements that moved the other way, each by twice its movement: to the norm
constexpr double kMostTurn = 8;      // of so many elements one may, and always one: small tensors have no nine
constexpr double kByRounding = 0.1;  // of the movement
constexpr double kNoGradient = 16;   // roundings of the largest one: one device has nothing to go by
// Elements that turn in the plan and in none of three moved runs: five do with a chance of at most
// max over l of exp(-3 l) P(Poisson(l) >= 5) = 2e-4.
constexpr double kTurned = 4;
constexpr double kLinear = 0x1p-6;  // of the norm
constexpr int64_t kFewest = 2;      // steps, or moved runs of an evaluation, that a verdict rests on

std::vector<double> samples_of(const whale_tensor* tensor) {
  const size_t n = elements(tensor), stride = std::max<size_t>(1, n / kSamples);
  std::vector<double> out;
  for (size_t i = 0; i < n; i += stride) load(tensor, i, 1, &out.emplace_back());
  return out;
}

size_t bits_of(const whale_tensor* tensor) {
  const size_t bytes = elements(tensor) * size_of(whale_tensor_dtype(tensor));
  return std::hash<std::string_view>()({static_cast<const char*>(whale_tensor_data(tensor)), bytes});
}

// How far a run went along the movement of one device since the start, in parts of that movement: what a wrong factor
// changes even where single elements are noisy. From samples, of the parameters that rounding alone does not move.
struct Along {
  std::vector<double> products;  // of each moved run with the movement, of the one in float32, and of the plan
  double square = 0, count = 0;
  explicit Along(size_t runs) : products(runs + 1, 0) {}
  void add(size_t run, double weight, const std::vector<double>& value, const std::vector<double>& one,
           const std::vector<double>& start) {
    for (size_t i = 0; i < one.size(); ++i)
      if (const double product = (value[i] - one[i]) * (one[i] - start[i]); std::isfinite(product))
        products[run] += weight * product;
  }
  void add(const Along& other) {
    for (size_t i = 0; i < products.size(); ++i) products[i] += other.products[i];
    square += other.square, count += other.count;
  }
};

struct Side {
  std::unique_ptr<Runner> runner;
  std::vector<Values> scores;
  double loss = 0;
  std::vector<Tensor> outputs;
  std::vector<InputSpec> inputs;
  int64_t updates() const { return whale_session_updates(runner->session()); }
};

class Lockstep {
 public:
  Lockstep(whale_engine* engine, const Sides& sides, const SessionArguments& arguments,
           const std::vector<Decision>& decisions, Report& report)
      : decisions_(decisions),
        report_(report),
        trained_(sides.trained),
        terms_(sides.terms),
        gradients_(sides.gradients),
        told_(sides.gradients.begin(), sides.gradients.end()),
        rounded_(report.setting.roundoff > 0x1p-24),
        wide_scale_(sides.wide_scale),
        wide_decides_(sides.wide_decides),
        outputs_(sides.outputs, report.setting),
        evaluated_(without_gradients(sides.outputs), report.setting) {
    const Setting& setting = report.setting;
    report.clip_norm = sides.clip_norm;
    plan_.runner = std::make_unique<Runner>(engine, sides.plan(), arguments);
    one_.runner = std::make_unique<Runner>(engine, sides.single(), alone(arguments));
    for (int i = 0; i < setting.runs; ++i) {
      moved_.push_back({std::make_unique<Runner>(engine, sides.single(), alone(arguments)), {}, 0, {}, {}});
      shakes_.emplace_back(setting.amplitude, static_cast<uint64_t>(i) + 1, setting.alike);
      evaluation_shakes_.emplace_back(setting.amplitude, static_cast<uint64_t>(setting.runs + i) + 1, setting.alike);
    }
    if (sides.wide)
      wide_ = Side{std::make_unique<Runner>(engine, sides.wide(), alone(without_scale(arguments))), {}, 0, {}, {}};
    inputs_ = inputs_of(one_.runner->plan(), "train");
    names_ = names_of(decisions);
    variables_ = variables_of(*plan_.runner);
    whole_ = whole_variables(variables_);
    envelope_.assign(variables_.size(), 0), wide_envelope_ = envelope_;
    score_envelope_.assign(decisions.size(), 0);
    for (const Variable& v : variables_) {
      const Tensor value = read_value(*one_.runner, v);
      start_.push_back(v.role == "parameter" ? samples_of(value.get()) : std::vector<double>{});
      start_bits_.push_back(v.role == "parameter" ? bits_of(value.get()) : 0);
      Compared& of = report_.of(v);
      ++of.tensors, of.copies += static_cast<int64_t>(v.copies.size());
    }
    report_.outputs.tensors = static_cast<int64_t>(outputs_.names().size());
    report_.evaluated.tensors = static_cast<int64_t>(evaluated_.names().size());
    for (const Variable& v : variables_)
      if (v.role == "state") has_state_.insert(owner_of(v));
    compare_variables(0, {});
  }

  // False: the sides do not go on from here, and there is nothing to evaluate.
  bool step(const Batch& given, int64_t number) {
    const Batch batch = widen(given, inputs_);
    const int64_t updates = one_.updates();
    run(one_, batch, outputs_, false);
    std::vector<OutputComparison::Apart> apart;  // of the moved runs, and of the one in float32
    for (size_t i = 0; i < moved_.size(); ++i) {
      shakes_[i].add(*moved_[i].runner, variables_);
      apart.push_back(run(moved_[i], shakes_[i].inputs(batch), outputs_, false));
      shakes_[i].take_off(*moved_[i].runner, variables_);
    }
    if (wide_) apart.push_back(shown(run(*wide_, batch, outputs_, false)));
    OutputComparison::Apart of_plan;
    try {
      of_plan = run(plan_, batch, outputs_, false);
    } catch (const Failure& failure) {
      report_.failure = "step " + std::to_string(number) + ": " + failure.what();
      return false;
    }
    ++report_.steps;
    if (ends(number, updates)) return false;
    // A step of float16 that overflows is applied by nobody. Where only one side's does, rounding decided, and from
    // then on one is an update ahead. In other precisions nothing excuses it.
    if (plan_.updates() != one_.updates()) {
      if (report_.setting.name == "float16")
        report_.overflowed_at = number;
      else
        report_.failure = unlike_updates(number, plan_.updates(), one_.updates());
      return false;
    }
    std::vector<bool> off;  // a decision flipped
    for (const Side& side : moved_) off.push_back(side.updates() != one_.updates());
    const bool flipped = decide(number, off);
    const bool wide = bring_wide_back();
    for (size_t i = 0; i < moved_.size(); ++i)
      if (off[i]) bring_back(*moved_[i].runner), ++report_.flipped_runs;
    // Without a moved run that decides alike there is nothing to judge the step by.
    if (flipped || std::find(off.begin(), off.end(), false) == off.end()) {
      bring_back(*plan_.runner);
      return report_.margins;
    }
    ++report_.compared;
    compare_losses(off, wide, number);
    // Gradients of a step of float16 that overflowed are none.
    if (one_.updates() == updates) {
      ++report_.overflowed;
    } else {
      ++report_.updated;
      look_at_gradients();
      compare_outputs(apart, of_plan, off, wide, number);
    }
    compare_variables(number, off);
    return true;
  }

  // The other program of a plan, after a step. Elements that turned are none of it: for a while the plan has the
  // variables of one device.
  void evaluate(const Batch& given, int64_t number) {
    if (report_.compared == 0) return;
    std::vector<Tensor> own;
    if (turned_) {
      for (const Variable& v : variables_) own.push_back(read_value(*plan_.runner, v));
      bring_back(*plan_.runner), turned_ = true;
    }
    compare_evaluation(widen(given, inputs_), number);
    for (size_t k = 0; k < own.size(); ++k) write_value(*plan_.runner, variables_[k], own[k].get());
  }

  void finish() {
    for (const OutputComparison* outputs : {&outputs_, &evaluated_})
      for (const std::string& name : outputs->unknown()) report_.outputs_left_out.push_back(name);
    for (size_t v = 0; v < variables_.size(); ++v) {
      if (variables_[v].role != "parameter") continue;
      const Tensor value = read_value(*one_.runner, variables_[v]);
      const double moved = movement(v, samples_of(value.get())) * root_of_elements(value.get());
      if (moved > 0 && envelope_[v] >= kByRounding * moved) report_.by_rounding.push_back(variables_[v].name);
      if (report_.updated > 0 && trained_.contains(variables_[v].name) && !felt_.contains(variables_[v].name))
        report_.unmoved.push_back(variables_[v].name);
    }
    report_.idle = !report_.moved && report_.unmoved.size() < trained_.size();
  }

 private:
  // What is not finite says nothing more, and nothing that follows does. A loss that is finite on one side only is a
  // difference, unless moved runs are of two minds as well: then rounding decides what overflows.
  bool ends(int64_t number, int64_t updates) {
    const bool one = std::isfinite(one_.loss), plan = std::isfinite(plan_.loss);
    const auto is_finite = [](const Side& side) { return std::isfinite(side.loss); };
    const auto moved = std::count_if(moved_.begin(), moved_.end(), is_finite);
    const std::string mismatch = overflows_elsewhere();
    if (one && plan && moved == std::ssize(moved_) && mismatch.empty()) return false;
    // An overflow of float16 changes nothing, and the next step is in a smaller scale.
    if (report_.setting.name == "float16" && one_.updates() == updates && plan_.updates() == updates) {
      for (Side& side : moved_)
        if (side.updates() != updates) bring_back(*side.runner), ++report_.flipped_runs;
      if (wide_ && wide_->updates() != updates) wide_.reset();
      ++report_.overflowed;
      return true;
    }
    report_.ended_at = number;
    report_.ended_by =
        !one && !plan ? "the loss of the plan and of one device is not finite"
        : !plan       ? "the loss of the plan is not finite"
        : !one        ? "the loss of one device is not finite"
        : moved < std::ssize(moved_)
            ? "the loss of one device is not finite once its numbers are moved in the last bits"
            : mismatch + " of one device has other elements that are not finite once its numbers are moved";
    if (one != plan && moved == (one ? std::ssize(moved_) : 0))
      report_.failure = "step " + std::to_string(number) + ": the loss is " + std::to_string(plan_.loss) +
                        ", one device has " + std::to_string(one_.loss);
    return true;
  }
  // The first variable that is finite elsewhere in a moved run; none.
  std::string overflows_elsewhere() const {
    for (const Variable& v : variables_) {
      const Tensor one = read_value(*one_.runner, v);
      for (const Side& side : moved_)
        if (side.updates() == one_.updates() &&
            !std::isfinite(distance(read_value(*side.runner, v).get(), one.get()).difference))
          return v.name;
    }
    return {};
  }

  // In parts of a loss of that size. What is left of terms that cancel is rounded as they are.
  double floor_of_loss(double scale) const {
    return ::tool::floor_of_loss(report_.setting) * std::max(1.0, largest_term_ / scale);
  }

  // What the run in other bits shows of rounding. Fewer tell of more as long as what they do is small; what overflows
  // in one of two ranges says nothing.
  double shown(const Distance& d) const {
    const bool tells = wide_scale_ < 1 ? d.difference <= kLinear * d.norm : std::isfinite(d.difference);
    return tells ? wide_scale_ * d.difference : 0;
  }
  OutputComparison::Apart shown(OutputComparison::Apart of_wide) const {
    for (Distance& d : of_wide) d.difference = shown(d);
    return of_wide;
  }

  // A bound that a loss of zero would pass has nothing to say of it, unless it is the difference of larger ones.
  bool has_power(const Figure& of_loss, double scale) const {
    return of_loss.bound <= std::max(1.0, largest_term_ / scale);
  }

  // The losses so far, by what moved runs show so far: what rounding does to later steps says nothing of these.
  void compare_losses(const std::vector<bool>& off, bool wide, int64_t number) {
    largest_loss_ = std::max(largest_loss_, std::abs(one_.loss));
    last_envelope_ = 0;
    for (size_t i = 0; i < moved_.size(); ++i)
      if (!off[i]) last_envelope_ = std::max(last_envelope_, std::abs(moved_[i].loss - one_.loss)), ++losses_;
    if (wide && wide_decides_)
      last_envelope_ = std::max(last_envelope_, wide_scale_ * std::abs(wide_->loss - one_.loss));
    loss_envelope_ = std::max(loss_envelope_, last_envelope_);
    const double difference = std::abs(plan_.loss - one_.loss);
    if (furthest_loss_.step == 0 || !(difference <= furthest_loss_.difference))
      furthest_loss_.difference = difference, furthest_loss_.step = number;
    const double scale = largest_loss_ > 0 ? largest_loss_ : 1;
    Figure f = furthest_loss_;
    f.name = "loss", f.norm = 1;
    f.difference /= scale, f.envelope = loss_envelope_ / scale;
    f.floor = floor_of_loss(scale);
    f.bound = factor_of(report_.setting, 1, std::max<int64_t>(1, losses_)) * f.envelope + f.floor;
    const bool power = has_power(f, scale);
    report_.losses_reach.judged(number, power);
    if (!power) return;
    worsen(report_.loss, f);
    report_.known_losses = report_.compared;
  }

  // A step or an evaluation; what is handed out is compared with what one device, which runs first, has handed out.
  OutputComparison::Apart run(Side& side, const Batch& batch, const OutputComparison& outputs, bool evaluation) {
    std::vector<std::string> names = names_;
    names.insert(names.end(), outputs.names().begin(), outputs.names().end());
    // What only one device hands out stands behind the others, where it is not one of them.
    const bool alone = &side == &one_ && !evaluation;
    const size_t shared = names.size();
    std::vector<size_t> terms, gradients;
    const auto place = [&](const std::string& name) {
      const auto at = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
      if (at == names.size()) names.push_back(name);
      return at;
    };
    if (alone) {
      for (const std::string& name : terms_.names()) terms.push_back(place(name));
      for (const std::string& name : gradients_) gradients.push_back(place("grad:" + name));
    }
    std::vector<Tensor> fetched;
    if (side.inputs.empty()) side.inputs = inputs_of(side.runner->plan(), "train");
    const Batch own = widen(batch, side.inputs);
    side.loss = evaluation ? side.runner->eval(own, names, fetched) : side.runner->step(own, names, fetched);
    side.scores.clear();
    for (size_t i = 0; i < names_.size(); ++i) side.scores.push_back(values_of(fetched[i].get()));
    if (alone) {
      std::vector<double> values;
      for (const size_t at : terms) values.push_back(values_of(fetched[at].get()).data.at(0));
      if (std::isfinite(side.loss)) largest_term_ = std::max(largest_term_, terms_.magnitude(values));
      norms_.clear();
      for (const size_t at : gradients) norms_.push_back(distance(fetched[at].get(), fetched[at].get()).norm);
    }
    fetched.resize(shared);
    fetched.erase(fetched.begin(), fetched.begin() + static_cast<std::ptrdiff_t>(names_.size()));
    if (&side != &one_) return outputs.apart(fetched, one_.outputs);
    one_.outputs = std::move(fetched);
    return {};
  }

  void look_at_gradients() {
    double square = 0;
    for (size_t i = 0; i < norms_.size(); ++i) {
      square += norms_[i] * norms_[i];
      if (norms_[i] > 0) felt_.insert(gradients_[i]);
    }
    report_.gradient_norm = std::max(report_.gradient_norm, std::sqrt(square));
  }

  // At parameters that differ by rounding. An element that turned is none: what it does to outputs no moved run shows.
  void compare_outputs(const std::vector<OutputComparison::Apart>& apart, const OutputComparison::Apart& of_plan,
                       const std::vector<bool>& off, bool wide, int64_t number) {
    if (turned_ || outputs_.names().empty()) return;
    for (size_t i = 0; i < apart.size(); ++i)
      if (i < off.size() ? !off[i] : wide) outputs_.widen(apart[i]);
    ++report_.steps_of_outputs;
    outputs_.judge(of_plan, one_.outputs, number, number, std::count(off.begin(), off.end(), false), report_.outputs);
  }

  // A decision that flips leaves it out.
  void compare_evaluation(const Batch& batch, int64_t number) {
    const auto decides_alike = [&](const Side& side) {
      Decided decided;
      for (size_t d = 0; d < decisions_.size(); ++d) compare(d, side.scores, decided);
      return decided.differ == 0;
    };
    run(one_, batch, evaluated_, true);
    const double one = one_.loss;
    Figure f{"loss", number, 0, {}, 0, last_envelope_, 0, 0, 1};
    int64_t runs = 0;
    for (size_t i = 0; i < moved_.size(); ++i) {
      evaluation_shakes_[i].add(*moved_[i].runner, variables_);
      const OutputComparison::Apart apart = run(moved_[i], evaluation_shakes_[i].inputs(batch), evaluated_, true);
      evaluation_shakes_[i].take_off(*moved_[i].runner, variables_);
      if (!decides_alike(moved_[i])) continue;
      f.envelope = std::max(f.envelope, std::abs(moved_[i].loss - one)), ++runs;
      evaluated_.widen(apart);
    }
    if (wide_ && (wide_decides_ || !evaluated_.names().empty()))
      if (const auto apart = shown(run(*wide_, batch, evaluated_, true)); decides_alike(*wide_)) {
        evaluated_.widen(apart);
        if (wide_decides_) f.envelope = std::max(f.envelope, wide_scale_ * std::abs(wide_->loss - one));
      }
    OutputComparison::Apart of_plan;
    try {
      of_plan = run(plan_, batch, evaluated_, true);
    } catch (const Failure& failure) {
      report_.failure = std::string("evaluation after step ") + std::to_string(number) + ": " + failure.what();
      return;
    }
    if (!decides_alike(plan_) || runs < std::min(kFewest, std::ssize(moved_))) return;
    f.difference = std::abs(plan_.loss - one);
    const double scale = std::abs(one) > 0 ? std::abs(one) : 1;
    f.difference /= scale, f.envelope /= scale;
    f.floor = floor_of_loss(scale);
    f.bound = factor_of(report_.setting, 1, runs) * f.envelope + f.floor;
    if (std::isfinite(one) || std::isfinite(plan_.loss)) {
      const bool power = has_power(f, scale);
      report_.evaluation_reach.judged(number, power);
      if (power) ++report_.evaluations, worsen(report_.evaluation, f);
    }
    evaluated_.judge(of_plan, one_.outputs, number, number, runs, report_.evaluated);
  }

  void compare(size_t d, const std::vector<Values>& scores, Decided& decided) const {
    compare_decisions(decisions_[d], seen(decisions_, d, scores), seen(decisions_, d, one_.scores), rounded_, decided);
  }

  // Whether a decision of the plan differs in this step; `off`: of the moved runs. What is decided behind one that
  // differs says nothing more.
  bool decide(int64_t number, std::vector<bool>& off) {
    bool wide = wide_.has_value() && wide_decides_;
    for (size_t d = 0; d < decisions_.size(); ++d) {
      if (wide) {
        Decided in_more;
        compare(d, wide_->scores, in_more);
        wide = in_more.differ == 0;
        if (wide) score_envelope_[d] = std::max(score_envelope_[d], wide_scale_ * in_more.scores);
      }
      for (size_t i = 0; i < moved_.size(); ++i) {
        if (off[i]) continue;
        Decided moved;
        compare(d, moved_[i].scores, moved);
        score_envelope_[d] = std::max(score_envelope_[d], moved.scores);
        off[i] = moved.differ > 0;
      }
      Decided plan;
      compare(d, plan_.scores, plan);
      report_.decided.made += plan.made;
      if (plan.differ == 0) continue;
      // Each of the two candidates may be off by what rounding does to scores.
      const double bound = std::max(2 * report_.setting.factor * score_envelope_[d], 4 * report_.setting.amplitude);
      report_.decided.differ += plan.differ;
      report_.margins = report_.margins && plan.margin <= bound;
      if (report_.flipped_at == 0) report_.flipped_at = number;
      if (!(plan.margin <= report_.decided.margin) || report_.decided.worst.empty())
        report_.decided.margin = plan.margin, report_.decided.worst = plan.worst, report_.margin_bound = bound;
      return true;
    }
    return false;
  }

  // The run in float32 ends where a step of float16 overflows, after which it is an update ahead. Whether it says
  // something of this step.
  bool bring_wide_back() {
    if (wide_ && (wide_->updates() != one_.updates() || !std::isfinite(wide_->loss))) wide_.reset();
    if (!wide_) return false;
    Decided decided;
    for (size_t d = 0; d < decisions_.size(); ++d) compare(d, wide_->scores, decided);
    if (decided.differ == 0) return true;
    ++report_.flipped_runs;
    for (size_t k = 0; k < whole_.size(); ++k)
      write_wide(*wide_->runner, whole_[k], read_value(*one_.runner, variables_[k]).get());
    return false;
  }

  void bring_back(Runner& runner) {
    for (const Variable& v : variables_) write_value(runner, v, read_value(*one_.runner, v).get());
    if (&runner == plan_.runner.get()) turned_ = false;
  }

  // Per element, since the start, of the samples.
  double movement(size_t variable, const std::vector<double>& values) const {
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i)
      if (const double d = values[i] - start_[variable][i]; std::isfinite(d)) sum += d * d;
    return values.empty() ? 0 : std::sqrt(sum / static_cast<double>(values.size()));
  }

  struct Found {
    size_t variable;
    bool integers;
    double size, movement;  // of its elements: the root of their number; per element
    Figure figure;
  };

  void compare_variables(int64_t number, const std::vector<bool>& off) {
    std::vector<Found> all;
    std::map<std::string, double> largest;  // of each kind of state, per element
    const size_t runs = off.size() + (wide_ ? 1 : 0);
    Along along(runs);
    for (size_t k = 0; k < variables_.size(); ++k) {
      const Variable& v = variables_[k];
      const bool parameter = v.role == "parameter";
      const Tensor one = read_value(*one_.runner, v);
      if (parameter && !report_.moved) report_.moved = bits_of(one.get()) != start_bits_[k];
      const std::vector<double> now = parameter ? samples_of(one.get()) : std::vector<double>{};
      const double weight =
          static_cast<double>(elements(one.get())) / static_cast<double>(std::max<size_t>(1, now.size()));
      Along own(runs);
      for (size_t i = 0; i < off.size(); ++i) {
        if (off[i]) continue;
        const Tensor moved = read_value(*moved_[i].runner, v);
        envelope_[k] = std::max(envelope_[k], distance(moved.get(), one.get()).difference);
        if (parameter) own.add(i, weight, samples_of(moved.get()), now, start_[k]);
      }
      if (wide_ && number > 0) {
        const Tensor wide = read_value(*wide_->runner, whole_[k]);
        if (parameter) own.add(off.size(), weight, samples_of(wide.get()), now, start_[k]);
        if (!parameter || !report_.setting.turns)
          wide_envelope_[k] = std::max(wide_envelope_[k], shown(distance(wide.get(), one.get())));
      }
      const double size = root_of_elements(one.get());
      const double moved = parameter ? movement(k, now) : 0;
      Tensor first;
      for (size_t copy = 0; copy < v.copies.size(); ++copy) {
        Tensor value = read_value(*plan_.runner, v, static_cast<int64_t>(copy));
        if (copy > 0 && same_bits(value.get(), first.get())) continue;
        if (copy > 0) report_.found_unlike(v, copy, number);
        const Distance d = distance(value.get(), one.get());
        all.push_back({k,
                       integers(one.get()),
                       size,
                       moved,
                       {v.name, number, static_cast<int64_t>(copy), v.copies[copy], d.difference,
                        std::max(envelope_[k], wide_envelope_[k]), 0, 0, d.norm}});
        if (v.role == "state") largest[kind_of(v)] = std::max(largest[kind_of(v)], d.norm / size);
        if (copy == 0 && parameter) own.add(runs, weight, samples_of(value.get()), now, start_[k]);
        if (copy == 0) first = std::move(value);
      }
      own.square = moved * moved * size * size, own.count = static_cast<double>(now.size());
      if (envelope_[k] < kByRounding * moved * size) along.add(own);
    }
    if (report_.setting.flips && number > 0) compare_along(along, off, number);
    // Those that show what this step does. Before the first step none has moved.
    const int64_t alike = std::max<int64_t>(1, std::count(off.begin(), off.end(), false));
    Figure together{"all parameters", number, 0, {}, 0, 0, 0, 0, 0};
    double elements = 0, movement = 0, furthest = 0;
    for (const Found& found : all) {
      furthest = std::max(furthest, found.movement);
      // The state of a parameter is zero until it has a gradient; one without state stays where it is.
      const Variable& v = variables_[found.variable];
      if (told_.contains(v.role == "state" ? owner_of(v) : v.name)) continue;
      if (v.role == "state" && found.figure.norm > 0) felt_.insert(owner_of(v));
      if (v.role == "parameter" && found.movement > 0 && !has_state_.contains(v.name)) felt_.insert(v.name);
    }
    const std::set<std::string> unmoved = without_gradient(all, largest, number);
    turned_ = false;
    for (Found& found : all) {
      const Variable& v = variables_[found.variable];
      Figure& f = found.figure;
      f.floor = allowed(v, found, number, v.role == "state" ? largest[kind_of(v)] : furthest);
      if (v.role == "parameter" && unmoved.contains(v.name)) f.floor += 2 * furthest * found.size;
      f.bound =
          factor_of(report_.setting, static_cast<size_t>(found.size * found.size + 0.5), alike) * f.envelope + f.floor;
      report_.of(v).judge(f);
      if (v.role == "parameter" && !unmoved.contains(v.name))
        turned_ = turned_ || f.difference > f.bound - turned_floor(report_.setting, found.size, found.movement);
      if (v.role != "parameter" || f.copy != 0 || found.integers) continue;
      together.difference += f.difference * f.difference, together.envelope += f.envelope * f.envelope;
      together.norm += f.norm * f.norm;
      elements += found.size * found.size, movement += found.movement * found.movement * found.size * found.size;
    }
    for (size_t k = 0; k < variables_.size(); ++k)
      if (unmoved.contains(variables_[k].name) || unmoved.contains(owner_of(variables_[k])))
        write_value(*plan_.runner, variables_[k], read_value(*one_.runner, variables_[k]).get());
    if (!report_.setting.flips || number == 0 || elements == 0) return;
    together.difference = std::sqrt(together.difference), together.envelope = std::sqrt(together.envelope);
    together.norm = std::sqrt(together.norm);
    together.floor = rounding(number) * together.norm + kFlips * std::sqrt(movement / elements);
    together.bound = report_.setting.factor * together.envelope + together.floor;
    if (together.tells()) worsen(report_.parameters.worst, together);
  }

  // Parameters of which one device has no gradient so far, though the loss reaches them: terms that cancel to the last
  // bit in its order of adding. In another order something is left, and an optimizer that divides a gradient by its own
  // size makes a full step of it. That it is no more than rounding is seen by the state; the plan then takes the
  // parameter from one device. Where the plan has nothing left either, both decay alike.
  std::set<std::string> without_gradient(const std::vector<Found>& all, std::map<std::string, double>& largest,
                                         int64_t number) const {
    std::set<std::string> out, have, left;
    if (!report_.setting.divides || number == 0) return out;
    const double nothing = kNoGradient * std::min(report_.setting.roundoff, 0x1p-24);
    for (const Found& found : all) {
      const Variable& v = variables_[found.variable];
      if (v.role != "state") continue;
      const double most = largest[kind_of(v)], share = most > 0 ? found.figure.norm / found.size / most : 0;
      // Other kinds than a mean of gradients hold their squares.
      const double of_gradient = kind_of(v) == "m" ? share : std::sqrt(share);
      (of_gradient > nothing ? have : out).insert(owner_of(v));
      if (!(found.figure.norm == 0 && found.figure.difference == 0)) left.insert(owner_of(v));
    }
    std::erase_if(out, [&](const std::string& name) { return have.contains(name) || !left.contains(name); });
    return out;
  }
  static std::string owner_of(const Variable& v) {
    return v.role == "state" ? v.name.substr(0, v.name.rfind('/')) : std::string();
  }

  void compare_along(const Along& along, const std::vector<bool>& off, int64_t number) {
    if (along.count == 0) return;
    for (size_t i = 0; i < off.size(); ++i)
      if (!off[i]) along_envelope_ = std::max(along_envelope_, std::abs(along.products[i]) / along.square);
    if (wide_) along_envelope_ = std::max(along_envelope_, std::abs(along.products[off.size()]) / along.square);
    Figure f{"all parameters along their movement", number, 0, {}, 0, along_envelope_, 0, 0, 1};
    f.difference = std::abs(along.products.back()) / along.square;
    // Differences of a tenth of the movement (larger ones are left out) that point anywhere, and elements that turned.
    f.floor = rounding(number) + 2 * kByRounding / std::sqrt(along.count) + 2 * kTurned / along.count;
    const auto runs = static_cast<double>(std::count(off.begin(), off.end(), false) + (wide_ ? 1 : 0));
    f.bound = std::max(report_.setting.factor, std::pow(1e4, 1 / runs)) * f.envelope + f.floor;
    if (f.tells()) worsen(report_.parameters.worst, f);
  }

  double rounding(int64_t number) const { return rounding_of(report_.setting, number); }
  double allowed(const Variable& v, const Found& found, int64_t number, double largest) const {
    if (number == 0 || found.integers) return 0;  // nothing rounds those
    double floor = rounding(number) * found.figure.norm;
    // A mean over samples is a sum, of which moved runs show nothing where the samples are integers.
    if (v.role == "buffer")
      floor += std::max(report_.setting.summed, report_.setting.terms) * report_.setting.epsilon * found.figure.norm;
    // An update that is a multiple of a gradient is a sum as state is: of terms as large as those of the largest.
    if (v.role == "state" || (v.role == "parameter" && !report_.setting.turns))
      floor += summed_floor(report_.setting, largest, found.size);
    if (v.role == "parameter") floor += turned_floor(report_.setting, found.size, found.movement);
    return floor;
  }

  const std::vector<Decision>& decisions_;
  Report& report_;
  const std::set<std::string> trained_;
  const LossTerms terms_;
  const std::vector<std::string> gradients_;  // that one device hands out
  const std::set<std::string> told_;          // the same
  std::vector<double> norms_;                 // of those, of this step
  std::set<std::string> has_state_, felt_;    // felt: had a gradient
  const bool rounded_;                        // computes in 16 bits
  const double wide_scale_;
  const bool wide_decides_;
  Side plan_, one_;
  std::vector<Side> moved_;
  std::optional<Side> wide_;                       // in other bits
  std::vector<Shake> shakes_, evaluation_shakes_;  // of their own: what training is moved by is as without evaluations
  std::vector<InputSpec> inputs_;
  std::vector<std::string> names_;
  OutputComparison outputs_, evaluated_;
  bool turned_ = false;  // the plan's parameters differ by more than moved runs show
  std::vector<Variable> variables_, whole_;
  std::vector<std::vector<double>> start_;  // samples of each parameter
  std::vector<size_t> start_bits_;          // of each parameter
  std::vector<double> envelope_, wide_envelope_, score_envelope_;
  int64_t losses_ = 0;  // of moved runs, that the envelope is of
  Figure furthest_loss_;
  double along_envelope_ = 0, loss_envelope_ = 0, last_envelope_ = 0, largest_loss_ = 0, largest_term_ = 0;
};

}  // namespace

std::string unlike_updates(int64_t number, int64_t plan, int64_t one) {
  return "step " + std::to_string(number) + ": " + std::to_string(plan) + " updates so far, one device made " +
         std::to_string(one);
}

double factor_of(const Setting& setting, size_t elements, int64_t runs) {
  const double samples = static_cast<double>(std::max<size_t>(1, elements)) * static_cast<double>(runs);
  return setting.factor * std::pow(1e4, 1 / samples);
}

double floor_of_loss(const Setting& setting) { return std::max(2 * kFloor, setting.terms) * setting.epsilon; }

double rounding_of(const Setting& setting, int64_t steps) {
  return (kFloor + static_cast<double>(steps)) * setting.epsilon;
}

double summed_floor(const Setting& setting, double largest, double size) {
  return std::max(setting.summed, setting.terms) * setting.roundoff * largest * size;
}

double turned_floor(const Setting& setting, double size, double movement) {
  return setting.turns ? std::min(kFlips, 2 * std::sqrt(std::max(1.0, size * size / kMostTurn))) * movement : 0;
}

double Figure::ratio() const {
  if (std::isnan(difference)) return INFINITY;
  return bound > 0 ? difference / bound : difference > 0 ? INFINITY : 0;
}

bool Figure::has_power() const { return !(norm > 0 && bound > norm); }
bool Figure::tells() const { return has_power() || !(difference * norm <= bound * bound); }

void worsen(Figure& worst, const Figure& figure) {
  if (worst.name.empty() || figure.ratio() > worst.ratio()) worst = figure;
}

void Reach::judged(int64_t step, bool power) {
  if (power)
    to = step, lost = 0;
  else if (lost == 0)
    lost = step;
}

void Compared::judge(const Figure& figure) {
  reach[figure.name].judged(figure.step, figure.has_power());
  if (figure.tells()) worsen(worst, figure);
}

std::vector<std::string> Compared::lost() const {
  std::vector<std::string> out;
  for (const auto& [name, each] : reach)
    if (each.lost > 0) out.push_back(name);
  return out;
}

Compared& Report::of(const Variable& v) {
  return v.role == "parameter" ? parameters : v.role == "state" ? state : buffers;
}

void Report::found_unlike(const Variable& v, size_t copy, int64_t number) {
  if (unlike_copies++ > 0) return;
  unlike = v.name + ", copy " + std::to_string(copy) + " (devices";
  for (const int32_t device : v.copies[copy]) unlike += " " + std::to_string(device);
  unlike += "), after step " + std::to_string(number);
}

double Report::parameter_error() const {
  const Figure& w = parameters.worst;
  return w.norm > 0 ? w.difference / w.norm : w.difference;
}

Figure Report::worst() const {
  Figure out = loss;
  for (const Figure* f : {&evaluation, &gradients.worst, &parameters.worst, &state.worst, &buffers.worst,
                          &outputs.worst, &evaluated.worst})
    if (!(f->ratio() <= out.ratio())) out = *f;
  return out;
}

Verdict Report::verdict() const {
  const bool within = worst().ratio() <= 1;
  if (!failure.empty() || unlike_copies > 0) return Verdict::kNotEqual;
  if (!reason.empty()) return Verdict::kNotCompared;
  if (!margins || !within) return Verdict::kNotEqual;
  // One step is known too little: of its loss there may be a single moved run.
  const bool updates = overflowed == 0 || updated >= kFewest;
  return known_losses >= kFewest && updates && !idle ? Verdict::kEqual : Verdict::kNotCompared;
}

Report compare(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
               const SessionArguments& arguments, const std::vector<Decision>& decisions, const Setting& setting,
               const Tick& tick) {
  Report report;
  report.setting = setting;
  Lockstep lockstep(engine, sides, arguments, decisions, report);
  for (size_t i = 0; i < batches.size(); ++i) {
    tick(static_cast<int64_t>(i));
    const int64_t number = static_cast<int64_t>(i) + 1;
    if (lockstep.step(batches[i], number)) lockstep.evaluate(batches[i], number);
    if (!report.failure.empty() || report.overflowed_at > 0 || report.ended_at > 0 ||
        (report.verdict() == Verdict::kNotEqual && !report.margins))
      break;
  }
  lockstep.finish();
  return report;
}

}  // namespace tool
