#include "gradients.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

using Json = nlohmann::json;
using Gradient = std::vector<double>;

// Sums of several axes round again, and none need add in the order that the bound is taken in.
constexpr double kOrders = 2;
constexpr double kNoise = 0.1;  // of a gradient: it is all rounding

double dot(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
double norm(const Gradient& a) { return std::sqrt(dot(a, a)); }
double apart(const Gradient& a, const Gradient& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

// Maleki et al., 2021: parallel gradients are averaged, orthogonal ones summed.
void take_in(Gradient& a, const Gradient& b) {
  const double ab = dot(a, b), aa = dot(a, a), bb = dot(b, b);
  const double fa = aa == 0 ? 1 : 1 - ab / (2 * aa), fb = bb == 0 ? 1 : 1 - ab / (2 * bb);
  for (size_t i = 0; i < a.size(); ++i) a[i] = fa * a[i] + fb * b[i];
}
// Neighbours, then pairs of those; members behind the largest power of two enter first.
Gradient adasum(std::vector<Gradient> members) {
  const size_t n = members.size(), power = std::bit_floor(n);
  for (size_t i = power; i < n; ++i) take_in(members[i - power], members[i]);
  for (size_t step = 1; step < power; step *= 2)
    for (size_t k = 0; k + step < power; k += 2 * step) take_in(members[k], members[k + step]);
  return std::move(members.front());
}

// The samples of a batch, in this order.
Batch pick(const Batch& batch, const std::vector<InputSpec>& inputs, const std::vector<int64_t>& samples) {
  Batch out = batch;
  for (size_t k = 0; k < out.size(); ++k) {
    if (inputs[k].batch_dim < 0) continue;
    const auto axis = static_cast<size_t>(inputs[k].batch_dim);
    const auto whole = static_cast<size_t>(batch[k].dims[axis]);
    size_t inner = size_of(batch[k].dtype), outer = 1;
    for (size_t d = 0; d < axis; ++d) outer *= static_cast<size_t>(batch[k].dims[d]);
    for (size_t d = axis + 1; d < batch[k].dims.size(); ++d) inner *= static_cast<size_t>(batch[k].dims[d]);
    out[k].dims[axis] = static_cast<int64_t>(samples.size());
    out[k].bytes.clear();
    for (size_t o = 0; o < outer; ++o)
      for (const int64_t sample : samples) {
        const auto at =
            batch[k].bytes.begin() + static_cast<std::ptrdiff_t>((o * whole + static_cast<size_t>(sample)) * inner);
        out[k].bytes.insert(out[k].bytes.end(), at, at + static_cast<std::ptrdiff_t>(inner));
      }
  }
  return out;
}

// The samples' rows of a tensor of a whole batch; nothing where its first dimension does not hold them in order.
Values rows_of(const Values& whole, int64_t batch, const std::vector<int64_t>& samples) {
  if (whole.dims.empty() || batch <= 0 || whole.dims[0] % batch != 0) return {};
  const size_t each = whole.data.size() / static_cast<size_t>(batch);
  Values out{whole.dims, {}};
  out.dims[0] = whole.dims[0] / batch * static_cast<int64_t>(samples.size());
  for (const int64_t sample : samples) {
    const auto at = whole.data.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(sample) * each);
    out.data.insert(out.data.end(), at, at + static_cast<std::ptrdiff_t>(each));
  }
  return out;
}

// What one device makes of a batch in the way that the option asks for.
struct Wanted {
  double loss = 0;  // of the whole batch
  std::vector<Gradient> gradients;
  std::vector<double> rounding;  // of the sum's format, and how large what is summed is
  std::vector<double> parts;
  std::vector<Values> scores;  // of decisions, of the whole batch
  bool flipped = false;        // a replica's samples by themselves decide in another way than among the others
  bool finite = true;          // float16: the mean of a few samples may overflow where that of all does not
  bool alone = true;           // replicas' samples can be run by themselves
  std::vector<double> split;   // how far the parts' sum is from the whole, of the parts
};

class Gradients {
 public:
  Gradients(whale_engine* engine, const Sides& sides, const SessionArguments& arguments,
            const std::vector<Decision>& decisions, const GradientSum& sum, Report& report)
      : sum_(sum),
        decisions_(decisions),
        report_(report),
        plan_(engine, sides.plan(), arguments),
        one_(engine, sides.single(), arguments),
        parts_(engine, sides.single(), arguments),
        shakes_{{report.setting.amplitude, 1}, {report.setting.amplitude, 2}},
        inputs_(inputs_of(one_.plan(), "train")),
        variables_(variables_of(plan_)),
        whole_(whole_variables(variables_)) {
    for (const GradientSum::Parameter& p : sum.parameters) names_.push_back("grad:" + p.name);
    for (const Decision& decision : decisions) names_.push_back(decision.scores);
    report_.parameters.tensors = report_.parameters.copies = static_cast<int64_t>(count());
    envelope_.assign(count(), 0);
    for (size_t i = 0; i < shakes_.size(); ++i)
      moved_.push_back(std::make_unique<Runner>(engine, sides.single(), arguments));
    if (sides.wide) wide_ = std::make_unique<Runner>(engine, sides.wide(), without_scale(arguments));
  }

  void step(const Batch& given, int64_t number) {
    const Batch batch = widen(given, inputs_);
    start_.clear();
    for (const Variable& v : variables_) start_.push_back(read_value(plan_, v));
    const Wanted one = wanted(one_, &parts_, variables_, start_, batch);
    std::vector<Wanted> moved;
    for (size_t i = 0; i < shakes_.size(); ++i) {
      restore(*moved_[i], variables_, start_);
      shakes_[i].add(*moved_[i], variables_);
      std::vector<Tensor> shaken;
      for (const Variable& v : variables_) shaken.push_back(read_value(*moved_[i], v));
      moved.push_back(
          wanted(*moved_[i], sum_.adasum ? &parts_ : nullptr, variables_, shaken, shakes_[i].inputs(batch)));
    }
    bool any = false;
    for (const Wanted& each : moved) any = widen_envelope(each, one) || any;
    if (wide_)
      any = widen_envelope(wanted(*wide_, sum_.adasum ? wide_.get() : nullptr, whole_, start_,
                                  widen(given, inputs_of(wide_->plan(), "train"))),
                           one) ||
            any;
    if (sum_.adasum && !by_replica(one)) return;
    std::vector<Values> of_plan;
    double loss = 0;
    const int64_t updates = whale_session_updates(plan_.session());
    try {
      loss = plan_.step(batch, names_, &of_plan);
    } catch (const Failure& failure) {
      report_.failure = "step " + std::to_string(number) + ": " + failure.what();
      return;
    }
    ++report_.steps;
    const bool flipped = decide(of_plan, one, number);
    for (const Variable& v : variables_) check_copies(v, number);
    // float16 overflowed: nothing was updated, and the gradients are none.
    const bool overflowed = whale_session_updates(plan_.session()) == updates;
    if (one.flipped || !one.finite || flipped || !any || overflowed) return;
    ++report_.compared;
    const int64_t runs = report_.compared * (std::ssize(shakes_) + (wide_ ? 1 : 0));  // each step starts anew
    const double scale = std::abs(one.loss) > 0 ? std::abs(one.loss) : 1;
    Figure of_loss{"loss", number, 0, {}, std::abs(loss - one.loss) / scale, loss_envelope_ / scale, 0, 0, 1};
    of_loss.floor = 16 * report_.setting.epsilon;
    of_loss.bound = factor_of(report_.setting, 1, runs) * of_loss.envelope + of_loss.floor;
    worsen(report_.loss, of_loss);
    Figure worst;
    for (size_t k = 0; k < count(); ++k) {
      // What rounding alone makes has parts of any size: batch norm takes them away from a sum, and from own batches.
      if (sum_.roundoff > 0 && envelope_[k] > kNoise * norm(one.gradients[k])) continue;
      Figure f{names_[k],
               number,
               0,
               {},
               apart(of_plan[k].data, one.gradients[k]),
               envelope_[k],
               0,
               0,
               norm(one.gradients[k])};
      f.floor = one.rounding[k] + 16 * report_.setting.epsilon * std::max(f.norm, one.parts[k]);
      f.bound = factor_of(report_.setting, of_plan[k].data.size(), runs) * f.envelope + f.floor;
      worsen(worst, f);
    }
    worst_.push_back(worst);
  }

  // In 16 bits a unit turns now and then (a relu at a sum that rounding decides), by all that its samples give to a
  // bias, and no moved run shows it. Each step starts from the plan's own parameters, so what is wrong is wrong in most
  // of them: one step in ten, and one of five, is set aside and counted.
  void finish() {
    std::sort(worst_.begin(), worst_.end(), [](const Figure& a, const Figure& b) { return a.ratio() > b.ratio(); });
    const bool few_bits = report_.setting.roundoff > 0x1p-24;
    const int64_t most = few_bits && report_.compared >= 5 ? std::max<int64_t>(1, report_.compared / 10) : 0;
    for (const Figure& f : worst_) {
      if (f.ratio() <= 1 || report_.set_aside == most) return worsen(report_.parameters.worst, f);
      ++report_.set_aside;
    }
  }

 private:
  size_t count() const { return sum_.parameters.size(); }

  bool by_parts(const Wanted& one, size_t k) const {
    return one.alone && one.split[k] <= std::max(1e-6, 32 * report_.setting.roundoff);
  }
  // Adasum's members are parts of one sum. Where the gradients of the replicas' samples by themselves are not those
  // parts (a loss that is no mean over samples, statistics of the whole batch, masks), they say nothing of it.
  bool by_replica(const Wanted& one) {
    bool all = true;
    for (size_t k = 0; k < count(); ++k)
      all = all && (by_parts(one, k) || (one.alone && envelope_[k] > kNoise * one.parts[k]));
    if (one.flipped || !one.finite || all) return true;
    report_.reason =
        "Adasum is compared with the gradients of each replica's samples by themselves, and " +
        std::string(one.alone ? "those do not add up to the gradient of the batch (is the loss a mean over samples?)"
                              : "this model does not run on a part of the batch");
    return false;
  }

  void restore(Runner& on, const std::vector<Variable>& variables, const std::vector<Tensor>& start) const {
    const auto write = &on == wide_.get() ? write_wide : write_value;
    for (size_t v = 0; v < variables.size(); ++v) write(on, variables[v], start[v].get());
  }
  std::vector<Values> values(Runner& on, const std::vector<Variable>& variables, const std::vector<Tensor>& start,
                             const Batch& batch, double* loss = nullptr) const {
    restore(on, variables, start);
    std::vector<Values> out;
    const double of_batch = on.step(batch, names_, &out);
    if (loss) *loss = of_batch;
    return out;
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
      compare_decisions(decisions_[d], moved.scores[d], one.scores[d], decided);
    scores_ = std::max(scores_, decided.scores);
    if (moved.flipped || decided.differ > 0) {
      ++report_.flipped_runs;
      return false;
    }
    loss_envelope_ = std::max(loss_envelope_, std::abs(moved.loss - one.loss));
    for (size_t k = 0; k < count(); ++k)
      envelope_[k] = std::max(envelope_[k], apart(moved.gradients[k], one.gradients[k]));
    return true;
  }

  // Whether a decision of the plan differs; one that is none of rounding fails the comparison.
  bool decide(const std::vector<Values>& of_plan, const Wanted& one, int64_t number) {
    Decided plan;
    for (size_t d = 0; d < decisions_.size(); ++d)
      compare_decisions(decisions_[d], of_plan[count() + d], one.scores[d], plan);
    report_.decided.made += plan.made, report_.decided.differ += plan.differ;
    if (plan.differ == 0) return false;
    const double bound = std::max(2 * report_.setting.factor * scores_, 4 * report_.setting.amplitude);
    report_.margins = report_.margins && plan.margin <= bound;
    if (report_.flipped_at == 0) report_.flipped_at = number;
    if (!(plan.margin <= report_.decided.margin) || report_.decided.worst.empty())
      report_.decided.margin = plan.margin, report_.decided.worst = plan.worst, report_.margin_bound = bound;
    return true;
  }

  // Of the mean over a replica's own samples; of all, where they cannot be run by themselves.
  std::vector<Gradient> of_replica(Runner& on, const std::vector<Variable>& variables, const std::vector<Tensor>& start,
                                   const Batch& batch, const Replica& replica, Wanted& all,
                                   const std::vector<Gradient>& whole) const {
    std::vector<Gradient> own = whole;
    if (replica.samples.empty()) {
      for (Gradient& g : own) g.assign(g.size(), 0);
      return own;
    }
    try {
      std::vector<Values> found = values(on, variables, start, pick(batch, inputs_, replica.samples));
      Decided decided;
      for (size_t d = 0; d < decisions_.size(); ++d)
        compare_decisions(decisions_[d], found[count() + d], rows_of(all.scores[d], samples_in(batch), replica.samples),
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
      if (inputs_[k].batch_dim >= 0) return batch[k].dims[static_cast<size_t>(inputs_[k].batch_dim)];
    return 0;
  }

  // `on` takes one step, as the plan does, so that random masks are those of the plan's; `parts` runs the replicas'
  // samples, as often as there are replicas; none: the gradients of the whole are all that is asked for.
  Wanted wanted(Runner& on, Runner* parts, const std::vector<Variable>& variables, const std::vector<Tensor>& start,
                const Batch& batch) const {
    Wanted out;
    std::vector<Values> found = values(on, variables, start, batch, &out.loss);
    const std::vector<Gradient> whole = gradients(found);
    out.gradients = whole;
    out.scores.assign(std::make_move_iterator(found.begin() + static_cast<std::ptrdiff_t>(count())),
                      std::make_move_iterator(found.end()));
    out.rounding.assign(count(), 0), out.parts.assign(count(), 0), out.split.assign(count(), 0);
    for (size_t mesh = 0; parts && mesh < sum_.meshes.size(); ++mesh) {
      std::vector<size_t> here;
      for (size_t k = 0; k < count(); ++k)
        if (sum_.parameters[k].mesh == mesh) here.push_back(k);
      if (here.empty()) continue;
      const std::vector<Replica>& replicas = sum_.meshes[mesh];
      std::vector<std::vector<Gradient>> own;
      for (const Replica& r : replicas) own.push_back(of_replica(*parts, variables, start, batch, r, out, whole));
      for (const size_t k : here) measure(replicas, own, whole[k], k, out);
      // Where the samples by themselves say nothing of the parts, a part is taken for noise.
      const auto n = static_cast<double>(replicas.size());
      for (const size_t k : here)
        if (!by_parts(out, k))
          out.rounding[k] = std::max(out.rounding[k], kOrders * sum_.roundoff * (std::sqrt(n) + n) * norm(whole[k]));
      if (sum_.adasum) combine(replicas, std::move(own), here, out);
    }
    return out;
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
    if (out.parts[k] > 0) out.split[k] = apart(sum, whole) / out.parts[k];
  }

  // By Adasum, axis by axis, the innermost first: the gradients `here`, of parameters of one mesh.
  static void combine(const std::vector<Replica>& replicas, std::vector<std::vector<Gradient>> own,
                      const std::vector<size_t>& here, Wanted& out) {
    std::map<std::vector<int64_t>, std::vector<Gradient>> level;
    for (size_t r = 0; r < replicas.size(); ++r) level[replicas[r].at] = std::move(own[r]);
    while (!level.begin()->first.empty()) {
      std::map<std::vector<int64_t>, std::vector<std::vector<Gradient>>> groups;
      for (auto& [at, each] : level) groups[{at.begin(), at.end() - 1}].push_back(std::move(each));
      level.clear();
      for (auto& [at, members] : groups) {
        level[at].resize(out.gradients.size());
        for (const size_t k : here) {
          std::vector<Gradient> of;
          for (std::vector<Gradient>& member : members) of.push_back(std::move(member[k]));
          level[at][k] = adasum(std::move(of));
        }
      }
    }
    for (const size_t k : here) out.gradients[k] = std::move(level.begin()->second[k]);
  }

  void check_copies(const Variable& v, int64_t number) {
    Tensor first;
    for (size_t copy = 0; copy < v.copies.size(); ++copy) {
      Tensor value = read_value(plan_, v, static_cast<int64_t>(copy));
      if (copy > 0 && !same_bits(value.get(), first.get())) report_.found_unlike(v, copy, number);
      if (copy == 0) first = std::move(value);
    }
  }

  const GradientSum& sum_;
  const std::vector<Decision>& decisions_;
  Report& report_;
  Runner plan_, one_, parts_;
  std::vector<std::unique_ptr<Runner>> moved_;
  std::unique_ptr<Runner> wide_;
  std::vector<Shake> shakes_;
  std::vector<InputSpec> inputs_;
  std::vector<Variable> variables_, whole_;
  std::vector<std::string> names_;  // gradients, then scores
  std::vector<Tensor> start_;
  std::vector<double> envelope_;
  std::vector<Figure> worst_;  // of each step
  double scores_ = 0, loss_envelope_ = 0;
};

}  // namespace

GradientSum gradient_sum_of(const std::string& plan_json, const std::string& graph_json, bool by_micro_batch) {
  const Json plan = Json::parse(plan_json), graph = Json::parse(graph_json);
  GradientSum out;
  out.adasum = plan.at("adasum");
  const Json dtype = plan.at("gradient_dtype");
  if (dtype == "bf16") out.roundoff = 0x1p-9, out.smallest = 0x1p-134;
  if (dtype == "f16") out.roundoff = 0x1p-12, out.smallest = 0x1p-25;
  const Json& meshes = plan.at("meshes");
  std::vector<std::map<std::vector<int64_t>, std::vector<int64_t>>> replicas(meshes.size());
  std::map<std::string, size_t> mesh_of;  // of a variable: the first that holds a part of it
  for (const Json& entry : plan.at("entries")) {
    if (entry.at("name") != "train") continue;
    for (const Json& row : entry.at("rows")) {
      const size_t mesh = row.at("mesh");
      const Json& axes = meshes.at(mesh).at("axes");
      std::vector<int64_t> at, samples;
      for (size_t a = 0; a < axes.size(); ++a)
        if (axes[a].at("name").get<std::string>().find("replica") != std::string::npos)
          at.push_back(row.at("coordinates").at(a));
      int64_t number = 0;
      for (const Json& range : row.at("micro_batches")) {
        for (int64_t i = range.at(0); i < range.at(1); ++i) samples.push_back(i);
        if (!by_micro_batch) continue;
        std::vector<int64_t> of_part = at;
        of_part.push_back(number++);
        replicas[mesh].emplace(std::move(of_part), std::exchange(samples, {}));
      }
      if (!by_micro_batch) replicas[mesh].emplace(std::move(at), std::move(samples));
      for (const Json& buffer : entry.at("programs").at(row.at("program").get<size_t>()).at("buffers"))
        if (buffer.at("kind") == "variable") mesh_of.emplace(buffer.at("name"), mesh);
    }
  }
  for (const auto& of_mesh : replicas) {
    std::vector<Replica>& mesh = out.meshes.emplace_back();
    for (const auto& [at, samples] : of_mesh) mesh.push_back({at, samples});
  }
  for (const Json& variable : graph.at("variables"))
    if (variable.at("role") == "parameter" && variable.at("trainable") == true)
      out.parameters.push_back({variable.at("name"), mesh_of[variable.at("name")]});
  return out;
}

std::string why_not_by_replica(const std::string& graph_json) {
  const Json graph = Json::parse(graph_json);
  for (const Json& op : graph.at("ops")) {
    const std::string name = op.at("op");
    if (name == "dropout" || op.at("attributes").value("dropout", 0.0) > 0)
      return "random masks follow the place of a sample in the batch";
    if (name.starts_with("batch_norm")) return "batch norm mixes the samples of all replicas";
  }
  return "";
}

Report compare_gradients(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
                         const SessionArguments& arguments, const std::vector<Decision>& decisions,
                         const GradientSum& sum, const Setting& setting, const Tick& tick) {
  Report report;
  report.setting = setting;
  report.setting.runs = 2;
  report.subject = sum.adasum ? "gradients combined by Adasum" : "gradients summed in fewer bits";
  Gradients gradients(engine, sides, arguments, decisions, sum, report);
  for (size_t i = 0; i < batches.size() && report.failure.empty() && report.reason.empty(); ++i) {
    tick(static_cast<int64_t>(i));
    gradients.step(batches[i], static_cast<int64_t>(i) + 1);
  }
  gradients.finish();
  return report;
}

}  // namespace tool
