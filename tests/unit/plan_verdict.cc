// What a case's plan gives, beside one device.
#include <algorithm>
#include <cstdlib>
#include <optional>

#include "base/error.h"
#include "plan_case.h"
#include "prove/prove.h"

namespace whale::test {
namespace {

constexpr int64_t kIds = 3;
constexpr double kBound = 1e-9, kBoundOfNarrowSums = 1e-6;
constexpr int kNudges = 4;         // courses of one device, each begun a rounding apart
constexpr double kOfNudges = 100;  // times further than these is no rounding
constexpr double kStable = 1e6;    // of a loss

// A model on its devices, from the first step to the evaluation: next() goes on by one run and gives what is compared.
class Course {
 public:
  Course(const PlanCase& c, const Graph& g, const std::string& devices, const CompileOptions& options, int ranks = 1)
      : c_(c),
        g_(g),
        runner_(g, devices, options, 7, ranks),
        dice_(static_cast<uint64_t>(c.batch)),
        fetch_(options.fetch) {
    for (auto* names : {&fetch_, &predicted_}) {
      names->emplace_back("loss");
      for (const NamedTensor& o : g.outputs) names->push_back(o.name);
    }
  }

  // Every trained number one rounding away from where it would begin.
  void nudge(uint64_t seed) {
    Dice sides(seed);
    for (const Variable& v : g_.variables) {
      if (v.role != Role::kParameter || !is_float(g_.tensor(v.tensor).dtype)) continue;
      const std::string& name = g_.tensor(v.tensor).name;
      std::vector<double> values = runner_.read(name);
      for (double& x : values) x *= 1 + 0x1p-52 * static_cast<double>(sides.between(-1, 1));
      runner_.write(name, values);
    }
  }

  const Plan& plan() const { return runner_.plan(); }
  bool done() const { return at_ == c_.steps + 3; }
  bool smaller() const { return at_ == c_.steps + 1; }  // the run before was the smaller one
  int steps() const { return std::min(at_, c_.steps); }
  std::string where() const {
    const int run = at_ - 1;
    if (run < c_.steps) return fmt::format("step {}: ", run);
    return run == c_.steps ? fmt::format("a last batch of {}: ", c_.last) : run == c_.steps + 1 ? "eval: " : "";
  }
  Values next() {
    const int run = at_++;
    if (run < c_.steps) return runner_.step(random_inputs(g_, c_.batch, dice_, kIds), fetch_);
    if (run == c_.steps) return c_.last ? runner_.step(random_inputs(g_, c_.last, dice_, kIds), fetch_) : Values{};
    // What was trained predicts the same: the other entry of the plan, with the storage shardings of the first.
    if (run == c_.steps + 1)
      return runner_.eval(random_inputs(g_, c_.evaluated ? c_.evaluated : c_.batch, dice_, kIds), predicted_);
    return runner_.variables();
  }

 private:
  const PlanCase& c_;
  const Graph& g_;
  Runner runner_;
  Dice dice_;
  std::vector<std::string> fetch_, predicted_;
  int at_ = 0;
};

struct Judge {
  const PlanCase& c;
  const Graph& g;
  CompileOptions alone;
  bool bits = false;

  // What a difference is measured by: a value's own size, and of parameters how far they have moved.
  double scale(const std::string& name, const std::vector<double>& a) const {
    double least = 0.01;
    for (const Variable& v : g.variables)
      if (g.tensor(v.tensor).name == name)
        least = g.training.optimizer.learning_rate * c.steps * std::sqrt(static_cast<double>(a.size()));
    return std::max(norm(a), least);
  }

  // The first value that differs; empty: none does.
  std::string first_difference(const Values& a, const Values& b) const {
    const double bound = c.narrow_sums ? kBoundOfNarrowSums : kBound;
    for (const auto& [name, x] : a) {
      const auto y = b.find(name);
      if (y == b.end() || y->second.size() != x.size()) return name;
      if (bits ? x != y->second : !(distance(x, y->second) <= bound * scale(name, x))) return name;
    }
    for (const auto& [name, y] : b)
      if (!a.contains(name)) return name;
    return "";
  }

  // After `runs` runs: how far one device is from itself when it begins a rounding apart. Scores that tie send a token
  // to one expert or another, and a step near a pole amplifies: the plan is then measured by that (semantics.md
  // section 10).
  double rounding(const std::string& name, const std::vector<double>& a, int runs) const {
    double most = 0;
    for (int k = 1; k <= kNudges; ++k) {
      Course other(c, g, "ref:1", alone);
      other.nudge(static_cast<uint64_t>(k));
      Values b;
      try {
        for (int run = 0; run < runs; ++run) b = other.next();
      } catch (const Error&) {
        continue;  // another course of the model itself says nothing of this one
      }
      if (const auto x = b.find(name); x != b.end()) most = std::max(most, distance(a, x->second));
    }
    return most;
  }
};

// What compile() makes of a fault of the planner's own, which only a look at all of them finds: refused, but where such
// cases are hunted.
bool is_clear(const Error& e) {
  static const bool hunts = std::getenv("WHALE_UNLIKE") != nullptr;
  const std::string_view said = e.what();
  return (e.code() == Code::kInvalidArgument || e.code() == Code::kUnimplemented) &&
         said.find("after pass") == said.npos &&
         !(hunts && said.find("unlike replicas of this model are not planned yet") != said.npos);
}

// What a run gave: values, or an error.
struct Ran {
  Values values;
  std::optional<Error> error;
  explicit Ran(Course& course) {
    try {
      values = course.next();
    } catch (const Error& e) {
      error = e;
    }
  }
};

}  // namespace

std::string_view name_of(Outcome outcome) {
  constexpr std::string_view kNames[] = {"equal", "refused", "not stable", "decided by rounding", "wrong"};
  return kNames[static_cast<size_t>(outcome)];
}

namespace {

// Run by run, until one of them is unlike.
Verdict compared(const Judge& judge, Course& one, Course& many) {
  const PlanCase& c = judge.c;
  Verdict verdict;
  for (int runs = 1; !one.done(); ++runs) {
    const Ran a(one), b(many);
    const std::string where = one.where();
    if (a.error && b.error && a.error->code() == b.error->code()) {
      if (is_clear(*a.error)) continue;  // a size that the model itself refuses
      verdict.outcome = Outcome::kNotStable, verdict.text = where + a.error->what();
      return verdict;
    }
    if (b.error && !a.error && one.steps() == c.steps && is_clear(*b.error)) {
      verdict.outcome = Outcome::kRefused, verdict.text = where + b.error->what();
      if (one.smaller()) return verdict;  // the devices have parted
      continue;
    }
    for (const Ran* r : {&a, &b})
      if (r->error)
        return {Outcome::kWrong, fmt::format("{}{}: {}", where, r == &a ? "one device" : "running", r->error->what()),
                verdict.steps};
    if (a.values.contains("loss") && !(norm(a.values.at("loss")) < kStable)) {
      verdict.outcome = Outcome::kNotStable,
      verdict.text = fmt::format("{}the loss is {:.3g}", where, norm(a.values.at("loss")));
      return verdict;
    }
    if (const std::string name = judge.first_difference(a.values, b.values); !name.empty()) {
      const std::vector<double> none, &x = a.values.contains(name) ? a.values.at(name) : none,
                                      &y = b.values.contains(name) ? b.values.at(name) : none;
      const double off = distance(x, y), by_rounding = judge.bits ? 0 : judge.rounding(name, x, runs);
      const bool rounding = std::isfinite(off) && off <= kOfNudges * by_rounding;
      verdict.outcome = rounding ? Outcome::kRounding : Outcome::kWrong;
      verdict.text = fmt::format("{}{} is off by {:.3g} of {:.3g}{}", where, name, off, judge.scale(name, x),
                                 judge.bits ? " in exact mode" : fmt::format(", rounding is {:.3g}", by_rounding));
      return verdict;
    }
    verdict.steps = one.steps();
  }
  return verdict;
}

// What a run says, and what a proof says of the same plan.
Verdict with_proof(Verdict verdict, const Plan& plan) {
  const Proof proof = prove(plan);
  verdict.proof = proof.verdict;
  for (const EntryProof& e : proof.entries)
    if (e.verdict == ProofVerdict::kNotCovered) verdict.construct = e.construct;
  if (verdict.outcome == Outcome::kWrong) {
    if (proof.verdict == ProofVerdict::kProven) verdict.text += " (and it is proven)";
  } else if (proof.verdict == ProofVerdict::kRefuted) {
    verdict.text = fmt::format("{}, and refuted: {}", name_of(verdict.outcome), text(proof));
    verdict.outcome = Outcome::kWrong;
  }
  return verdict;
}

}  // namespace

Verdict verdict_on(const PlanCase& c) {
  const Graph g = graph_of(c);
  const CompileOptions options = options_of(c, g);
  Judge judge{c, g, {}, c.exact && !splits(c)};
  judge.alone.strategy = "local";
  judge.alone.fetch = options.fetch;
  judge.alone.exact = judge.bits;
  judge.alone.fusion = options.fusion;
  if (judge.bits) judge.alone.accumulation = micro_batches_of(c);
  std::optional<Course> one, many;
  try {
    many.emplace(c, g, devices_of(c), options, static_cast<int>(std::min<int64_t>(c.ranks, c.devices)));
  } catch (const Error& e) {
    return {is_clear(e) ? Outcome::kRefused : Outcome::kWrong, e.what()};
  }
  try {
    one.emplace(c, g, "ref:1", judge.alone);
  } catch (const Error& e) {
    return {Outcome::kWrong, fmt::format("one device: {}", e.what())};
  }
  return with_proof(compared(judge, *one, *many), many->plan());
}

}  // namespace whale::test
