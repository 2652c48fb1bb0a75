#include "gradients.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "outputs.h"
#include "updates.h"

namespace tool {
namespace {

// Sums of several axes round again, and none need add in the order that the bound is taken in.
constexpr double kOrders = 2;
constexpr double kLossScale = 65536, kSmallestScale = 0x1p-14;  // of float16: unless given; of those that are legal
constexpr double kNoise = 0.1;                                  // of a gradient: it is all rounding
constexpr double kUnknown = 256;  // parts whose sizes nothing says, of their sum: batch norm and weighted means cancel
constexpr double kFits = 0.01;    // of what the usual means leave: weights that leave so little are those of the loss

// The weights with which sums of the members' gradients are nearest the whole, by least squares with every gradient of
// the same size. Empty: the gradients do not determine them.
std::vector<double> weights_of(const std::vector<size_t>& here, const std::vector<Gradient>& whole,
                               const std::vector<std::vector<Gradient>>& own, double alike) {
  const size_t n = own.size();
  std::vector<std::vector<double>> rows(n, std::vector<double>(n + 1));  // the normal equations
  size_t elements = 0;
  for (const size_t k : here) {
    const double size = norm(whole[k]);
    if (size == 0) continue;
    elements += whole[k].size();
    for (size_t i = 0; i < whole[k].size(); ++i)
      for (size_t r = 0; r < n; ++r) {
        const double x = own[r][k][i] / size;
        for (size_t s = 0; s < n; ++s) rows[r][s] += x * own[s][k][i] / size;
        rows[r][n] += x * whole[k][i] / size;
      }
  }
  if (elements < 2 * n) return {};
  std::vector<double> sizes;
  for (size_t r = 0; r < n; ++r) sizes.push_back(rows[r][r]);
  for (size_t p = 0; p < n; ++p) {  // symmetric and positive: no exchange of rows
    if (sizes[p] == 0) continue;    // no samples
    if (!(rows[p][p] > alike * alike * sizes[p])) return {};
    for (size_t r = 0; r < n; ++r) {
      if (r == p) continue;
      const double by = rows[r][p] / rows[p][p];
      for (size_t s = p; s <= n; ++s) rows[r][s] -= by * rows[p][s];
    }
  }
  std::vector<double> weights;
  for (size_t r = 0; r < n; ++r) weights.push_back(sizes[r] == 0 ? 0 : rows[r][n] / rows[r][r]);
  return weights;
}

// What one device makes of a batch in the way that the option asks for.
struct Wanted {
  double loss = 0;  // of the whole batch
  std::vector<Gradient> gradients;
  std::vector<double> rounding;  // of the sum's format, and how large what is summed is
  std::vector<double> parts;
  std::vector<Values> scores;  // of decisions, of the whole batch
  std::vector<Tensor> outputs;
  bool wide = false;             // made in more bits than the plan's
  bool flipped = false;          // a replica's samples by themselves decide in another way than among the others
  bool finite = true;            // float16: the mean of a few samples may overflow where that of all does not
  bool alone = true;             // replicas' samples can be run by themselves
  std::vector<double> split;     // how far the parts' sum is from the whole, of the parts
  std::vector<bool> determined;  // per mesh: no other weights of the replicas' gradients make the whole
};

// One device in one of its roles: as it is, moved, or in more bits. The whole batch is a session's own, which takes one
// step, as the plan does, so that random masks are those of the plan; so are the samples of each replica where there
// are masks.
struct Role {
  std::function<std::unique_ptr<Runner>(double share)> make;  // share: that its loss is of, in a part's mean
  const std::vector<Variable>* variables = nullptr;
  bool wide = false;
  std::unique_ptr<Runner> whole;
  std::map<std::pair<size_t, size_t>, std::unique_ptr<Runner>> parts;  // of a mesh's replica
};

class Gradients {
 public:
  Gradients(whale_engine* engine, const Sides& sides, const SessionArguments& arguments,
            const std::vector<Decision>& decisions, const GradientSum& sum, const Setting& of_updates, Report& report)
      : sum_(sum),
        decisions_(decisions),
        report_(report),
        rounded_(report.setting.roundoff > 0x1p-24),
        scaled_(report.setting.name == "float16"),
        plan_(engine, sides.plan(), arguments),
        shakes_{{report.setting.amplitude, 1}, {report.setting.amplitude, 2}},
        evaluation_shakes_{{report.setting.amplitude, 3}, {report.setting.amplitude, 4}},
        variables_(variables_of(plan_)),
        whole_(whole_variables(variables_)),
        outputs_(sides.outputs, report.setting),
        evaluated_(sides.outputs, report.setting),
        updates_(engine, sides.update, of_updates, variables_) {
    const auto role = [&](const std::function<Plan()>& plan, bool wide) {
      Role out;
      out.make = [engine, plan, scaled = scaled_ && !wide,
                  of = alone(wide ? without_scale(arguments) : arguments)](double share) {
        SessionArguments own = of;
        if (scaled && share < 1)
          own.loss_scale = std::max(kSmallestScale, share * (of.loss_scale > 0 ? of.loss_scale : kLossScale));
        return std::make_unique<Runner>(engine, plan(), own);
      };
      out.variables = wide ? &whole_ : &variables_, out.wide = wide;
      out.whole = out.make(1);
      return out;
    };
    one_ = role(sides.single, false);
    for (size_t i = 0; i < shakes_.size(); ++i) moved_.push_back(role(sides.single, false));
    if (sides.wide) wide_ = role(sides.wide, true);
    inputs_ = inputs_of(one_.whole->plan(), "train");
    for (const GradientSum::Parameter& p : sum.parameters) names_.push_back("grad:" + p.name);
    for (const std::string& name : names_of(decisions)) names_.push_back(name);
    report_.outputs.tensors = report_.evaluated.tensors = static_cast<int64_t>(outputs_.names().size());
    report_.gradients.tensors = report_.gradients.copies = static_cast<int64_t>(count());
    for (const Variable& v : variables_) {
      Compared& of = report_.of(v);
      ++of.tensors, of.copies += static_cast<int64_t>(v.copies.size());
    }
    envelope_.assign(count(), 0), others_.assign(variables_.size(), 0);
  }

  void step(const Batch& given, int64_t number) {
    const Batch batch = widen(given, inputs_);
    start_.clear();
    for (const Variable& v : variables_) start_.push_back(read_value(plan_, v));
    const Wanted one = wanted(one_, true, start_, batch);
    spread_.assign(count(), {});
    finite_ = finite_ && one.finite && std::isfinite(one.loss);
    std::vector<bool> alike;  // moved runs that decide as one device does
    for (size_t i = 0; i < shakes_.size(); ++i) {
      Runner& moved = *moved_[i].whole;
      restore(moved_[i], moved, start_);
      shakes_[i].add(moved, variables_);
      std::vector<Tensor> shaken;
      for (const Variable& v : variables_) shaken.push_back(read_value(moved, v));
      alike.push_back(widen_envelope(wanted(moved_[i], sum_.adasum, shaken, shakes_[i].inputs(batch)), one));
      shakes_[i].take_off(moved, variables_);
    }
    if (!scaled_ && !finite_) {
      ++report_.steps, report_.ended_at = number;
      report_.ended_by = "the loss or a gradient of one device is not finite";
      return;
    }
    int64_t runs = std::count(alike.begin(), alike.end(), true);
    std::optional<Wanted> wide;
    if (wide_) {
      wide = wanted(*wide_, sum_.adasum, start_, widen(given, inputs_of(wide_->whole->plan(), "train")));
      runs += widen_envelope(*wide, one);
    }
    // Whether parts add up is seen best in most bits: float16 rounds small gradients to nothing.
    if (sum_.adasum && one.finite && !one.flipped && !by_replica(wide && !wide->flipped ? *wide : one)) return;
    std::vector<Values> of_plan;
    std::vector<Tensor> outputs_of_plan;
    double loss = 0;
    const int64_t updates = whale_session_updates(plan_.session());
    try {
      loss = step(plan_, batch, of_plan, outputs_of_plan);
    } catch (const Failure& failure) {
      report_.failure = "step " + std::to_string(number) + ": " + failure.what();
      return;
    }
    ++report_.steps;
    const bool flipped = decide(of_plan, one, number);
    for (const Variable& v : variables_) check_copies(v, number);
    // float16 overflowed: nothing was updated, and the gradients are none.
    if (whale_session_updates(plan_.session()) == updates) {
      if (!scaled_) {
        report_.failure = unlike_updates(number, updates, updates + 1);
        return;
      }
      ++report_.overflowed;
      return check_unchanged(number);
    }
    updates_.compare(plan_, start_, of_plan, number, report_);
    report_.alone_otherwise += one.flipped;
    if (one.flipped || !one.finite || flipped || runs == 0) return;
    ++report_.compared, ++report_.updated;
    compare_others(alike, number);
    runs_ += runs;  // each step starts anew
    if (!outputs_.names().empty()) {
      ++report_.steps_of_outputs;
      outputs_.judge(outputs_.apart(outputs_of_plan, one.outputs), one.outputs, number, 1, runs, report_.outputs);
    }
    const Figure figure = of_loss(loss, one.loss, loss_envelope_, runs_, number);
    report_.losses_reach.judged(number, figure.has_power());
    report_.known_losses += figure.has_power();
    if (figure.tells()) worsen(report_.loss, figure);
    Figure worst;
    for (size_t k = 0; k < count(); ++k) {
      // What rounding alone makes has parts of any size: batch norm takes them away from a sum, and from own batches.
      // So it does from some elements of a gradient.
      if (sum_.roundoff > 0 && envelope_[k] > kNoise * norm(one.gradients[k])) {
        report_.gradients.reach[names_[k]].judged(number, false);
        continue;
      }
      const bool all = sum_.roundoff == 0 || known(one, sum_.parameters[k].mesh);
      const Gradient known = all ? one.gradients[k] : without_noise(one.gradients[k], one, k);
      Figure f{names_[k],
               number,
               0,
               {},
               apart(all ? of_plan[k].data : without_noise(of_plan[k].data, one, k), known),
               envelope_[k],
               0,
               0,
               norm(known)};
      f.floor = (all ? one.rounding[k] : std::max(one.rounding[k], rounding_of_unknown(k, norm(one.gradients[k])))) +
                16 * report_.setting.epsilon * std::max(f.norm, one.parts[k]);
      f.bound = factor_of(report_.setting, of_plan[k].data.size(), runs_) * f.envelope + f.floor;
      report_.gradients.reach[f.name].judged(number, f.has_power());
      if (f.tells()) worsen(worst, f);
    }
    worst_.push_back(worst);
  }

  // The other program of a plan, with the variables that the step has left. A decision that flips leaves it out.
  void evaluate(const Batch& given, int64_t number) {
    const Batch batch = widen(given, inputs_);
    std::vector<Tensor> now;
    for (const Variable& v : variables_) now.push_back(read_value(plan_, v));
    restore(one_, *one_.whole, now);
    const Evaluated one = evaluated(*one_.whole, batch);
    double envelope = 0;
    int64_t runs = 0;
    const auto widen_by = [&](const Evaluated& other) {
      if (!decides_alike(other, one)) return false;
      envelope = std::max(envelope, std::abs(other.loss - one.loss));
      evaluated_.widen(evaluated_.apart(other.outputs, one.outputs));
      return true;
    };
    for (size_t i = 0; i < moved_.size(); ++i) {
      Runner& moved = *moved_[i].whole;
      restore(moved_[i], moved, now);
      evaluation_shakes_[i].add(moved, variables_);
      runs += widen_by(evaluated(moved, evaluation_shakes_[i].inputs(batch)));
      evaluation_shakes_[i].take_off(moved, variables_);
    }
    if (wide_) {
      restore(*wide_, *wide_->whole, now);
      runs += widen_by(evaluated(*wide_->whole, widen(given, inputs_of(wide_->whole->plan(), "train"))));
    }
    Evaluated plan;
    try {
      plan = evaluated(plan_, batch);
    } catch (const Failure& failure) {
      report_.failure = "evaluation after step " + std::to_string(number) + ": " + failure.what();
      return;
    }
    if (runs < std::ssize(moved_) || !decides_alike(plan, one)) return;
    if (std::isfinite(one.loss) || std::isfinite(plan.loss)) {
      const Figure f = of_loss(plan.loss, one.loss, envelope, runs, number);
      report_.evaluation_reach.judged(number, f.has_power());
      report_.evaluations += f.has_power();
      if (f.tells()) worsen(report_.evaluation, f);
    }
    evaluated_.judge(evaluated_.apart(plan.outputs, one.outputs), one.outputs, number, 1, runs, report_.evaluated);
  }

  // In 16 bits a unit turns now and then (a relu at a sum that rounding decides), by all that its samples give to a
  // bias, and no moved run shows it. Each step starts from the plan's own parameters, so what is wrong is wrong in most
  // of them: one step in ten, and one of five, is set aside and counted.
  void finish() {
    report_.idle =
        !report_.moved && std::any_of(worst_.begin(), worst_.end(), [](const Figure& f) { return f.norm > 0; });
    if (report_.reason.empty() && report_.alone_otherwise > 0 && report_.verdict() == Verdict::kNotCompared)
      report_.reason = "in " + std::to_string(report_.alone_otherwise) + " of " + std::to_string(report_.steps) +
                       " steps a replica's samples by themselves, whose gradients this option is compared with, decide "
                       "otherwise (top-k routing, argmax) than among the others" +
                       (sum_.masks ? ": dropout before a decision is not supported here" : "");
    std::sort(worst_.begin(), worst_.end(), [](const Figure& a, const Figure& b) { return a.ratio() > b.ratio(); });
    const int64_t most = rounded_ && report_.compared >= 5 ? std::max<int64_t>(1, report_.compared / 10) : 0;
    for (const Figure& f : worst_) {
      if (f.ratio() <= 1 || report_.set_aside == most) return worsen(report_.gradients.worst, f);
      ++report_.set_aside;
    }
  }

 private:
  struct Evaluated {
    double loss = 0;
    std::vector<Values> scores;
    std::vector<Tensor> outputs;
  };

  size_t count() const { return sum_.parameters.size(); }

  Evaluated evaluated(Runner& on, const Batch& batch) const {
    std::vector<std::string> names = names_of(decisions_);
    const auto scores = static_cast<std::ptrdiff_t>(names.size());
    names.insert(names.end(), outputs_.names().begin(), outputs_.names().end());
    Evaluated out;
    out.loss = on.eval(batch, names, out.outputs);
    for (std::ptrdiff_t i = 0; i < scores; ++i) out.scores.push_back(values_of(out.outputs[i].get()));
    out.outputs.erase(out.outputs.begin(), out.outputs.begin() + scores);
    return out;
  }
  bool decides_alike(const Evaluated& other, const Evaluated& one) const {
    Decided decided;
    for (size_t d = 0; d < decisions_.size(); ++d)
      compare_decisions(decisions_[d], seen(decisions_, d, other.scores), seen(decisions_, d, one.scores), rounded_,
                        decided);
    return decided.differ == 0;
  }
  // Relative to one device's.
  Figure of_loss(double plan, double one, double envelope, int64_t runs, int64_t number) const {
    const double scale = std::abs(one) > 0 ? std::abs(one) : 1;
    Figure f{"loss", number, 0, {}, std::abs(plan - one) / scale, envelope / scale, 0, 0, 1};
    f.floor = floor_of_loss(report_.setting);
    f.bound = factor_of(report_.setting, 1, runs) * f.envelope + f.floor;
    return f;
  }

  // Zero where this step's moved runs are off by more than a share of what one device has.
  Gradient without_noise(Gradient g, const Wanted& one, size_t k) const {
    for (size_t i = 0; i < g.size() && !spread_[k].empty(); ++i)
      if (spread_[k][i] > kNoise * std::abs(one.gradients[k][i])) g[i] = 0;
    return g;
  }

  // Of what a role computes in: what is in more bits than 16 is so in float32 at least.
  double roundoff(bool wide) const {
    return wide ? std::min(0x1p-24, report_.setting.roundoff) : report_.setting.roundoff;
  }
  // Gradients that far apart, of their sizes, are multiples of one another. In more bits than the plan's, parts that
  // add up to 1e-7 say of weights what is below the plan's rounding.
  double alike(bool wide) const { return wide ? 1e-4 : std::max(1e-3, 32 * roundoff(wide)); }
  // What the parts leave is rounding: of terms as large as they are, or (their own terms cancel) as moved runs show it.
  bool by_parts(const Wanted& one, size_t k) const {
    const double left = one.split[k] * one.parts[k];
    return one.alone &&
           (one.split[k] <= std::max(1e-6, 32 * roundoff(one.wide)) ||
            left <= factor_of(report_.setting, one.gradients[k].size(), std::max<int64_t>(1, runs_)) * envelope_[k]);
  }
  // Whether the gradients of the replicas' samples by themselves are the parts of all sums of a mesh: the weights that
  // make one of them add up may be of another loss.
  bool known(const Wanted& one, size_t mesh) const {
    bool all = one.alone && one.determined[mesh];
    for (size_t k = 0; k < count(); ++k)
      if (sum_.parameters[k].mesh == mesh && !sum_.parameters[k].whole)
        all = all && (by_parts(one, k) || envelope_[k] > kNoise * one.parts[k]);
    return all;
  }
  double rounding_of_unknown(size_t k, double size) const {
    const auto n = static_cast<double>(sum_.meshes[sum_.parameters[k].mesh].size());
    return kOrders * sum_.roundoff * (std::sqrt(n) + n) * kUnknown * size;
  }
  // Adasum's members are parts of one sum. Where the gradients of the replicas' samples by themselves are not those
  // parts (a loss that is not made of samples, statistics of the whole batch), they say nothing of it.
  bool by_replica(const Wanted& one) {
    bool all = true;
    for (size_t mesh = 0; mesh < sum_.meshes.size(); ++mesh) all = all && known(one, mesh);
    if (all) return true;
    report_.reason =
        "Adasum is compared with the gradients of each replica's samples by themselves, and " +
        std::string(one.alone
                        ? "those do not add up to the gradient of the batch (is the loss a sum or mean over samples?)"
                        : "this model does not run on a part of the batch");
    return false;
  }

  static void restore(const Role& role, Runner& on, const std::vector<Tensor>& start) {
    const auto write = role.wide ? write_wide : write_value;
    for (size_t v = 0; v < start.size(); ++v) write(on, (*role.variables)[v], start[v].get());
  }
  std::vector<Values> values(const Role& role, Runner& on, const std::vector<Tensor>& start, const Batch& batch) const {
    restore(role, on, start);
    std::vector<Values> out;
    on.step(batch, names_, &out);
    return out;
  }
  // The loss; with the outputs too.
  double step(Runner& on, const Batch& batch, std::vector<Values>& found, std::vector<Tensor>& outputs) const {
    std::vector<std::string> names = names_;
    names.insert(names.end(), outputs_.names().begin(), outputs_.names().end());
    const double loss = on.step(batch, names, outputs);
    for (size_t i = 0; i < names_.size(); ++i) found.push_back(values_of(outputs[i].get()));
    outputs.erase(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(names_.size()));
    return loss;
  }
  std::vector<Gradient> gradients(std::vector<Values>& values) const {
    std::vector<Gradient> out;
    for (size_t k = 0; k < count(); ++k) out.push_back(std::move(values[k].data));
    return out;
  }

  // False: a decision differs, so it says nothing of this step.
  bool widen_envelope(const Wanted& moved, const Wanted& one) {
    Decided decided;
    for (size_t d = 0; d < decisions_.size(); ++d)
      compare_decisions(decisions_[d], seen(decisions_, d, moved.scores), seen(decisions_, d, one.scores), rounded_,
                        decided);
    scores_ = std::max(scores_, decided.scores);
    if (moved.flipped || decided.differ > 0) {
      ++report_.flipped_runs;
      return false;
    }
    finite_ = finite_ && std::isfinite(moved.loss);
    loss_envelope_ = std::max(loss_envelope_, std::abs(moved.loss - one.loss));
    outputs_.widen(outputs_.apart(moved.outputs, one.outputs));
    for (size_t k = 0; k < count(); ++k) {
      const Gradient &there = moved.gradients[k], &here = one.gradients[k];
      envelope_[k] = std::max(envelope_[k], apart(there, here));
      spread_[k].resize(here.size());
      for (size_t i = 0; i < here.size(); ++i) spread_[k][i] = std::max(spread_[k][i], std::abs(there[i] - here[i]));
    }
    return true;
  }

  // Whether a decision of the plan differs; one that is none of rounding fails the comparison.
  bool decide(const std::vector<Values>& of_plan, const Wanted& one, int64_t number) {
    Decided plan;
    for (size_t d = 0; d < decisions_.size(); ++d)
      compare_decisions(decisions_[d], seen(decisions_, d, of_plan, count()), seen(decisions_, d, one.scores), rounded_,
                        plan);
    report_.decided.made += plan.made, report_.decided.differ += plan.differ;
    if (plan.differ == 0) return false;
    const double bound = std::max(2 * report_.setting.factor * scores_, 4 * report_.setting.amplitude);
    report_.margins = report_.margins && plan.margin <= bound;
    if (report_.flipped_at == 0) report_.flipped_at = number;
    if (!(plan.margin <= report_.decided.margin) || report_.decided.worst.empty())
      report_.decided.margin = plan.margin, report_.decided.worst = plan.worst, report_.margin_bound = bound;
    return true;
  }

  // Of a replica's own samples; of all, where they cannot be run by themselves.
  std::vector<Gradient> of_replica(Role& role, size_t mesh, size_t number, const std::vector<Tensor>& start,
                                   const Batch& batch, Wanted& all, const std::vector<Gradient>& whole) const {
    const std::vector<int64_t>& samples = sum_.meshes[mesh][number].samples;
    std::vector<Gradient> own = whole;
    if (samples.empty()) {
      for (Gradient& g : own) g.assign(g.size(), 0);
      return own;
    }
    const bool at_places = sum_.masks && !sum_.labels.empty(), alone = at_places || (sum_.adasum && scaled_);
    std::unique_ptr<Runner>& on = role.parts[alone ? std::pair(mesh, number) : std::pair<size_t, size_t>()];
    // In float16 the numbers of a mean over fewer samples are larger than the plan's: its smallest are then as well.
    if (!on) on = role.make(alone ? static_cast<double>(samples.size()) / static_cast<double>(samples_in(batch)) : 1);
    try {
      std::vector<Values> found = values(
          role, *on, start, at_places ? keep(batch, inputs_, samples, sum_.labels) : pick(batch, inputs_, samples));
      Decided decided;
      const int64_t n = samples_in(batch);
      std::vector<Values> among;
      for (const Values& values : all.scores) among.push_back(rows_of(values, n, samples));
      for (size_t v = count(); at_places && v < found.size(); ++v) found[v] = rows_of(found[v], n, samples);
      for (size_t d = 0; d < decisions_.size(); ++d)
        compare_decisions(decisions_[d], seen(decisions_, d, found, count()), seen(decisions_, d, among), rounded_,
                          decided);
      all.flipped = all.flipped || decided.differ > 0;
      return gradients(found);
    } catch (const Failure&) {
      all.alone = false;
    }
    return own;
  }
  int64_t samples_in(const Batch& batch) const {
    for (size_t k = 0; k < inputs_.size(); ++k)
      if (inputs_[k].batch_dim >= 0) return batch[k].dims[inputs_[k].batch_dim];
    return 0;
  }

  // parts: the replicas' too; else the gradients of the whole are all that is asked for.
  Wanted wanted(Role& role, bool parts, const std::vector<Tensor>& start, const Batch& batch) const {
    Wanted out;
    out.wide = role.wide;
    restore(role, *role.whole, start);
    std::vector<Values> found;
    out.loss = step(*role.whole, batch, found, out.outputs);
    const std::vector<Gradient> whole = gradients(found);
    out.gradients = whole;
    out.scores.assign(std::make_move_iterator(found.begin() + static_cast<std::ptrdiff_t>(count())),
                      std::make_move_iterator(found.end()));
    out.rounding.assign(count(), 0), out.parts.assign(count(), 0), out.split.assign(count(), 0);
    out.determined.assign(sum_.meshes.size(), true);
    for (size_t mesh = 0; parts && mesh < sum_.meshes.size(); ++mesh) {
      std::vector<size_t> here;
      for (size_t k = 0; k < count(); ++k)
        if (sum_.parameters[k].mesh == mesh && !sum_.parameters[k].whole) here.push_back(k);
      if (here.empty()) continue;
      const std::vector<Replica>& replicas = sum_.meshes[mesh];
      std::vector<std::vector<Gradient>> own;
      for (size_t r = 0; r < replicas.size(); ++r) own.push_back(of_replica(role, mesh, r, start, batch, out, whole));
      const std::vector<double> fitted = weights_of(here, whole, own, alike(role.wide));
      out.determined[mesh] = !fitted.empty();
      to_means(replicas, here, batch, whole, fitted, own);
      for (const size_t k : here) measure(replicas, own, whole[k], k, out);
      for (const size_t k : here) {
        if (!sum_.adasum) continue;
        std::vector<Gradient> of;
        for (std::vector<Gradient>& each : own) of.push_back(std::move(each[k]));
        out.gradients[k] = adasum_of(replicas, std::move(of));
      }
    }
    return out;
  }

  // How far the sums with these weights are from the whole.
  static double off_by(const std::vector<double>& weights, const std::vector<size_t>& here,
                       const std::vector<Gradient>& whole, const std::vector<std::vector<Gradient>>& own) {
    double off = 0;
    for (const size_t k : here) {
      Gradient sum(whole[k].size(), 0);
      for (size_t r = 0; r < own.size(); ++r)
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += weights[r] * own[r][k][i];
      off += apart(sum, whole[k]);
    }
    return off;
  }

  // A loss is a mean over samples, over labels that count, or a sum: whichever makes the whole of these gradients. Each
  // becomes that of the mean over its samples, as if the whole were one.
  void to_means(const std::vector<Replica>& replicas, const std::vector<size_t>& here, const Batch& batch,
                const std::vector<Gradient>& whole, const std::vector<double>& fitted,
                std::vector<std::vector<Gradient>>& own) const {
    const size_t n = replicas.size();
    std::vector<double> by_samples(n), by_labels(n), samples(n);
    double all = 0, all_labels = 0;
    for (size_t r = 0; r < n; ++r) {
      all += samples[r] = static_cast<double>(replicas[r].samples.size());
      all_labels += by_labels[r] = counted(batch, inputs_, replicas[r].samples, sum_.labels);
    }
    for (size_t r = 0; r < n; ++r) by_samples[r] = samples[r] / all, by_labels[r] /= std::max(1.0, all_labels);
    std::vector<double> best;
    double least = INFINITY;
    for (const std::vector<double>& weights : {by_samples, by_labels, std::vector<double>(n, 1)}) {
      const double off = off_by(weights, here, whole, own);
      const bool any = std::any_of(weights.begin(), weights.end(), [](double w) { return w > 0; });
      if (best.empty() || (any && off < least)) best = weights, least = off;
    }
    // A mean by weights that the model computes: parts of another size, the same for all gradients.
    if (!fitted.empty() && off_by(fitted, here, whole, own) < kFits * least) best = fitted;
    for (size_t r = 0; r < n; ++r)
      for (const size_t k : here)
        for (double& x : own[r][k]) x *= samples[r] > 0 ? best[r] / by_samples[r] : 0;
  }

  // Each part is rounded, and each sum of the first so many.
  void measure(const std::vector<Replica>& replicas, const std::vector<std::vector<Gradient>>& own,
               const Gradient& whole, size_t k, Wanted& out) const {
    double all = 0;
    for (const Replica& r : replicas) all += static_cast<double>(r.samples.size());
    Gradient sum(own.front()[k].size(), 0);
    for (size_t r = 0; r < replicas.size(); ++r) {
      const double share = static_cast<double>(replicas[r].samples.size()) / all;
      const double part = share * norm(own[r][k]);
      out.parts[k] += part;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += share * own[r][k][i];
      if (sum_.roundoff == 0) continue;
      const double rounded = part + (r > 0 ? norm(sum) : 0);
      out.rounding[k] +=
          kOrders * (sum_.roundoff * rounded + sum_.smallest * std::sqrt(static_cast<double>(sum.size())));
    }
    out.finite = out.finite && std::isfinite(out.parts[k]) && std::isfinite(norm(whole));
    const double off = apart(sum, whole);
    out.split[k] = out.parts[k] > 0 ? off / out.parts[k] : off > 0 ? INFINITY : 0;
  }

  void check_copies(const Variable& v, int64_t number) {
    Tensor first;
    for (size_t copy = 0; copy < v.copies.size(); ++copy) {
      Tensor value = read_value(plan_, v, static_cast<int64_t>(copy));
      if (copy > 0 && !same_bits(value.get(), first.get())) report_.found_unlike(v, copy, number);
      if (copy == 0) first = std::move(value);
    }
  }

  // An overflow of float16 changes nothing.
  void check_unchanged(int64_t number) {
    for (size_t k = 0; k < variables_.size(); ++k)
      if (!same_bits(read_value(plan_, variables_[k]).get(), start_[k].get()) && report_.failure.empty())
        report_.failure = "step " + std::to_string(number) + ": it overflowed, which changes nothing, and '" +
                          variables_[k].name + "' is another than before";
  }

  // What no summed gradient makes: running statistics, frozen parameters, and tables that are updated by row.
  void compare_others(const std::vector<bool>& alike, int64_t number) {
    const Setting& setting = report_.setting;
    for (size_t k = 0; k < variables_.size(); ++k) {
      const Variable& v = variables_[k];
      if (updates_.makes(v.name)) continue;
      const Tensor one = read_value(*one_.whole, v);
      const auto from_one = [&](const Role& role, const Variable& variable) {
        return distance(read_value(*role.whole, variable).get(), one.get()).difference;
      };
      double& envelope = others_[k];
      for (size_t i = 0; i < moved_.size(); ++i)
        if (alike[i]) envelope = std::max(envelope, from_one(moved_[i], v));
      if (wide_) envelope = std::max(envelope, from_one(*wide_, whole_[k]));
      Figure f{v.name, number, 0, {}, 0, envelope, 0, 0, 0};
      const double size = root_of_elements(one.get()), moved = distance(start_[k].get(), one.get()).difference / size;
      report_.moved = report_.moved || (v.role == "parameter" && moved > 0);
      for (size_t copy = 0; copy < v.copies.size(); ++copy) {
        const Distance d = distance(read_value(plan_, v, static_cast<int64_t>(copy)).get(), one.get());
        f.copy = static_cast<int64_t>(copy), f.devices = v.copies[copy];
        f.difference = d.difference, f.norm = d.norm;
        f.floor = integers(one.get()) ? 0 : rounding_of(setting, 1) * d.norm;
        if (v.role == "state") f.floor += summed_floor(setting, d.norm / size, size);
        if (v.role == "parameter") f.floor += turned_floor(setting, size, moved);
        f.bound = factor_of(setting, elements(one.get()), std::max<int64_t>(1, runs_)) * f.envelope + f.floor;
        report_.of(v).judge(f);
      }
    }
  }

  const GradientSum& sum_;
  const std::vector<Decision>& decisions_;
  Report& report_;
  const bool rounded_;  // computes in 16 bits
  bool scaled_;         // float16
  Runner plan_;
  Role one_;
  std::vector<Role> moved_;
  std::optional<Role> wide_;
  std::vector<Shake> shakes_, evaluation_shakes_;
  std::vector<InputSpec> inputs_;
  std::vector<Variable> variables_, whole_;
  OutputComparison outputs_, evaluated_;
  Updates updates_;
  std::vector<std::string> names_;  // gradients, then scores
  std::vector<Tensor> start_;
  std::vector<double> envelope_;  // of gradients, so far
  std::vector<double> others_;    // of variables that no summed gradient makes
  std::vector<Gradient> spread_;  // of each element, in this step
  std::vector<Figure> worst_;     // of each step
  int64_t runs_ = 0;              // that envelopes are of
  double scores_ = 0, loss_envelope_ = 0;
  bool finite_ = true;  // one device so far, moved too
};

}  // namespace

const char* subject_of_sums(bool adasum) {
  return adasum ? "gradients combined by Adasum" : "gradients summed in fewer bits";
}

Report compare_gradients(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
                         const SessionArguments& arguments, const std::vector<Decision>& decisions,
                         const GradientSum& sum, const Setting& setting, const Setting& of_updates, const Tick& tick) {
  Report report;
  report.setting = setting;
  report.setting.runs = 2;
  report.subject = subject_of_sums(sum.adasum);
  Gradients gradients(engine, sides, arguments, decisions, sum, of_updates, report);
  for (size_t i = 0; i < batches.size() && report.failure.empty() && report.reason.empty() && report.ended_at == 0;
       ++i) {
    tick(static_cast<int64_t>(i));
    const auto number = static_cast<int64_t>(i) + 1;
    gradients.step(batches[i], number);
    if (report.failure.empty() && report.reason.empty() && report.ended_at == 0) gradients.evaluate(batches[i], number);
  }
  gradients.finish();
  return report;
}

}  // namespace tool
