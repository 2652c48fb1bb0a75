// verify: does the plan change the result? The metric of semantics.md section 10 for the user's own model and plan.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "gradients.h"
#include "jumps.h"
#include "lockstep.h"
#include "outputs.h"
#include "updates.h"

namespace tool {
namespace {

using Json = nlohmann::json;

// By measurement (docs/verify.md). float64 and float32 are moved by far more, or a little more, than their rounding;
// what computes in 16 bits by half a unit in the last place, which is what their rounding does.
struct Precision {
  const char* plan;  // "f64" in options and JSON
  const char* name;
  double amplitude, epsilon, roundoff, summed, factor;
  bool flips;
};
constexpr Precision kPrecisions[] = {
    {"f64", "float64", 0x1p-44, 0x1p-53, 0x1p-53, 256, 8, false},
    {"f32", "float32", 0x1p-20, 0x1p-24, 0x1p-24, 256, 8, true},
    {"bf16", "bfloat16", 0x1p-9, 0x1p-24, 0x1p-9, 4, 3, true},
    {"f16", "float16", 0x1p-12, 0x1p-24, 0x1p-12, 4, 3, true},
};
// Of one device, moved: at first; before a plan below float64 is accused; where one element may decide about a tensor.
constexpr int kFewRuns = 3, kManyRuns = 12, kMostRuns = 48;
constexpr int kMostRounds = 3;

const Precision& precision_of(const std::string& plan) {
  for (const Precision& row : kPrecisions)
    if (plan == row.plan) return row;
  throw Failure("verify does not know the precision '" + plan + "'");
}
Setting setting_of(const Precision& row, int runs) {
  return {row.name,   "",        row.amplitude, row.epsilon, row.roundoff, row.summed,
          row.factor, row.flips, false,         false,       runs};
}

// The precision that a plan of `planned` rounds in: also a model's own casts and variables of 16 bits do. float64
// leaves none of those.
const Precision& rounding_precision(const Precision& planned, const std::string& graph_json) {
  const Precision* out = &planned;
  const Json graph = Json::parse(graph_json);
  for (const auto& tensor : graph.at("tensors")) {
    const bool computed = tensor.at("kind") != "input";  // data are rounded before anybody reads them
    for (const Precision& row : kPrecisions)
      if (planned.roundoff > kPrecisions[0].roundoff && computed && tensor.at("dtype") == row.plan &&
          row.roundoff > out->roundoff)
        out = &row;
  }
  return *out;
}

Json described(const Plan& plan) {
  return Json::parse(text(whale_plan_json, static_cast<const whale_plan*>(plan.get())));
}

// Device lists such as "cpu:4,cpu@0*2" with every kind replaced: as many reference devices.
std::string reference_list(whale_engine* engine, const std::string& devices) {
  const Cluster cluster = own<Cluster>(whale_cluster_create, engine, str(devices));
  return "ref:" + std::to_string(whale_cluster_size(cluster.get()));
}

// One device is not late.
std::string in_time(const std::string& kind) { return kind == "lag" ? "ref" : kind == "lag_cpu" ? "cpu" : kind; }

std::string kind_of_first(const std::string& devices) {
  if (devices.starts_with("file:")) return "cpu";
  const size_t kind = devices.find_first_of("clrn");  // behind "2x" of nodes
  if (kind == std::string::npos)
    throw Failure("devices '" + devices + "' name no kind that computes; cpu:N or ref:N do");
  return in_time(devices.substr(kind, devices.find_first_of(":@-", kind) - kind));  // one device may need more memory
}

// What a finished plan was made with, as far as the arithmetic depends on it.
PlanArguments options_of(const Json& plan) {
  PlanArguments out;
  out.devices.clear();
  for (const auto& device : plan.at("devices")) {
    out.devices += (out.devices.empty() ? "" : ",") + device.at("name").get<std::string>();
  }
  out.precision = plan.at("precision");
  out.given["accumulation"] = std::to_string(plan.at("micro_batches").get<int64_t>());
  if (!plan.at("gradient_dtype").is_null()) out.given["gradient-dtype"] = plan.at("gradient_dtype");
  if (!plan.at("accumulate_dtype").is_null()) out.given["accumulate-dtype"] = plan.at("accumulate_dtype");
  if (plan.at("adasum")) out.given["adasum"];
  return out;
}

bool adasum(const PlanArguments& a) { return a.given.contains("adasum"); }
// Sums in a type of fewer bits than gradients have.
bool narrow(const PlanArguments& a, const char* option) {
  const auto dtype = a.given.find(option);
  return dtype != a.given.end() && dtype->second != (a.precision == "f64" ? "f64" : "f32");
}
// Where no replicas are the option means nothing.
bool combines_by_adasum(const Json& plan) {
  for (const auto& entry : plan.at("entries"))
    for (const auto& program : entry.at("programs"))
      for (const auto& segment : program.at("segments"))
        for (const auto& instruction : segment.at("instructions"))
          if (instruction.at("op") == "adasum") return true;
  return false;
}

// The program on one device: the options that say where and when are left out.
PlanArguments one_device(const PlanArguments& given, const std::string& kind) {
  PlanArguments out;
  out.devices = kind + ":1";
  out.strategy = "local";
  out.precision = given.precision;
  if (const auto it = given.given.find("accumulation"); it != given.given.end()) out.given.insert(*it);
  return out;
}

double available_bytes() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  double kilobytes = 0;
  while (file >> word)
    if (word == "MemAvailable:" && file >> kilobytes) return kilobytes * 1024;
  return 0;  // not known
}
double bytes_of(const Json& plan) {
  double sum = 0;
  for (const auto& entry : plan.at("entries"))
    if (entry.at("name") == "train")
      for (const auto& row : entry.at("rows")) {
        const Json& program = entry.at("programs").at(row.at("program").get<size_t>());
        sum += program.at("arena_bytes").get<double>();
        for (const auto& buffer : program.at("buffers"))
          if (buffer.at("kind") == "variable") sum += buffer.at("bytes").get<double>();
      }
  return sum;
}
// As many moved runs as fit beside the plan and one device, at least one.
int runs_that_fit(double plan, double one, int most) {
  const double there = available_bytes();
  if (there <= 0 || one <= 0) return most;
  return std::clamp(static_cast<int>((0.8 * there - plan - one) / one), 1, most);
}

// A line on stderr once a second, when it takes longer than that.
class Watch {
 public:
  explicit Watch(int64_t steps) : steps_(steps), terminal_(isatty(2) != 0), shown_(seconds_now()) {}
  ~Watch() {
    if (any_ && terminal_) std::fprintf(stderr, "\r\033[K");
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  void show(const std::string& name, int64_t step) {
    const double now = seconds_now();
    if (now - shown_ < (terminal_ ? 1 : 10)) return;
    shown_ = now, any_ = true;
    std::fprintf(stderr, "%s%s: step %ld of %ld%s", terminal_ ? "\r\033[K" : "", name.c_str(),
                 static_cast<long>(step + 1), static_cast<long>(steps_), terminal_ ? "" : "\n");
    std::fflush(stderr);
  }

 private:
  int64_t steps_;
  bool terminal_, any_ = false;
  double shown_;
};

// ---- what is printed ---------------------------------------------------------------------------------------------
constexpr const char* kVerdicts[] = {"equal", "not equal", "not compared"};
const char* name_of(Verdict verdict) { return kVerdicts[static_cast<size_t>(verdict)]; }

Json json_of(const Figure& f) {
  return {{"name", f.name},
          {"step", f.step},
          {"copy", f.copy},
          {"devices", f.devices},
          {"difference", f.difference},
          {"envelope", f.envelope},
          {"floor", f.floor},
          {"bound", f.bound},
          {"norm", f.norm},
          {"ratio", f.ratio()}};
}
Json json_of(const Reach& reach) { return {{"compared_to", reach.to}, {"without_power_from", reach.lost}}; }
Json json_of(const Compared& c) {
  Json lost = Json::object();
  for (const std::string& name : c.lost()) lost[name] = json_of(c.reach.at(name));
  return {{"tensors", c.tensors}, {"copies", c.copies}, {"worst", json_of(c.worst)}, {"without_power", lost}};
}

// Empty: it is compared.
std::string why_not_compared(const Report& r) {
  if (r.verdict() != Verdict::kNotCompared || !r.reason.empty()) return r.reason;
  if (r.overflowed > 0 || (r.compared < 2 && r.overflowed_at > 0))
    return "fewer than two steps without an overflow of float16 were decided alike; take more --steps, in which the "
           "loss scale falls, or a smaller --loss-scale";
  if (r.compared < 2)
    return r.ended_at > 0 ? "fewer than two steps were finite"
           : r.steps < 2  ? "a verdict rests on two steps at least: take more --steps"
                          : "fewer than two steps were decided alike";
  if (r.known_losses < 2)
    return "rounding alone changes the loss by as much as it is in all steps but one, or in all: take a smaller "
           "learning rate, other data (--data), or compare in float64";
  return "no update moved any parameter in these steps, as in a warmup that begins at a learning rate of 0: take more "
         "--steps";
}

std::string text_of_lone(const Report& r) {
  char text[160];
  std::snprintf(text, sizeof text,
                ", step %ld, %.1f times what is allowed), this is from seed %lu: ", static_cast<long>(r.lone.step),
                r.lone.ratio(), static_cast<unsigned long>(r.seed));
  return "from seed " + std::to_string(r.lone_seed) + " alone it was further apart (" + r.lone.name + text +
         "float64 is equal, so that was rounding which no moved run shows";
}

// What an equal comparison does not say; none: empty.
std::string limits_of(const Report& r) {
  std::string out;
  const auto add = [&](const std::string& what) { out += (out.empty() ? "" : ", ") + what; };
  if (r.losses_reach.lost > 0) add("losses up to step " + std::to_string(r.losses_reach.to));
  if (r.evaluation_reach.lost > 0 || r.evaluations == 0)
    add(r.evaluation_reach.to > 0 ? "evaluation up to step " + std::to_string(r.evaluation_reach.to) : "no evaluation");
  if (!r.moved) add("no update, since none moved a parameter");
  if (r.left_out > 0)
    add(std::to_string(r.left_out) + " smaller batch(es) of the data, which an option for sums leaves out");
  if (r.bits_alone)
    add("not in float64, which this plan's file has no form of: what is smaller than its rounding passes (verify the "
        "model with the plan's --devices and --strategy for that)");
  return out;
}

// Parameters that no comparison saw a gradient of.
std::vector<std::string> never_felt(const std::vector<Report>& reports) {
  std::vector<std::string> out;
  for (const std::string& name : reports.front().unmoved)
    if (std::all_of(reports.begin(), reports.end(), [&](const Report& r) {
          return std::find(r.unmoved.begin(), r.unmoved.end(), name) != r.unmoved.end();
        }))
      out.push_back(name);
  return out;
}

Json lone_of(const Report& r) {
  Json out = json_of(r.lone);
  out["seed"] = r.lone_seed, out["compared_from_seed"] = r.seed;
  return out;
}
Json json_of(const Report& r) {
  const Figure& worst = r.parameters.worst;
  return {{"precision", r.setting.name},
          {"rounds_in", r.setting.coarse.empty() ? r.setting.name : r.setting.coarse},
          {"subject", r.subject},
          {"reason", why_not_compared(r)},
          {"devices", r.devices},
          {"ranks", r.ranks},
          {"against", r.against},
          {"verdict", name_of(r.verdict())},
          {"passed", r.verdict() == Verdict::kEqual},
          {"loss_error", r.loss.difference},
          {"loss_bound", r.loss.bound},
          {"parameter_error", r.parameter_error()},
          {"parameter_bound", worst.norm > 0 ? worst.bound / worst.norm : worst.bound},
          {"worst_parameter", worst.name},
          {"losses", json_of(r.loss)},
          {"evaluation", json_of(r.evaluation)},
          {"gradients", json_of(r.gradients)},
          {"parameters", json_of(r.parameters)},
          {"state", json_of(r.state)},
          {"buffers", json_of(r.buffers)},
          {"outputs", json_of(r.outputs)},
          {"evaluation_outputs", json_of(r.evaluated)},
          {"steps_of_outputs", r.steps_of_outputs},
          {"outputs_left_out", r.outputs_left_out},
          {"bits_alone", r.bits_alone},
          {"left_out", r.left_out},
          {"unlike_copies", r.unlike_copies},
          {"unlike_copy", r.unlike},
          {"moved_by_rounding", r.by_rounding.size()},
          {"names_moved_by_rounding", r.by_rounding},
          {"without_gradient", r.unmoved},
          {"clip_norm", r.clip_norm},
          {"gradient_norm", r.gradient_norm},
          {"perturbed_runs", r.setting.runs},
          {"amplitude", r.setting.amplitude},
          {"factor", r.setting.factor},
          {"steps", r.steps},
          {"steps_compared", r.compared},
          {"steps_left_out", r.steps - r.compared},
          {"steps_of_perturbed_runs_not_compared", r.flipped_runs},
          {"decisions", r.decided.made},
          {"decisions_that_differ", r.decided.differ},
          {"first_step_that_differs", r.flipped_at},
          {"decisions_not_seen", r.unseen},
          {"overflowed_at", r.overflowed_at},
          {"ended_at", r.ended_at},
          {"ended_by", r.ended_by},
          {"losses_reach", json_of(r.losses_reach)},
          {"losses_compared", r.known_losses},
          {"evaluation_reach", json_of(r.evaluation_reach)},
          {"evaluations_compared", r.evaluations},
          {"parameters_moved", r.moved},
          {"steps_decided_otherwise_alone", r.alone_otherwise},
          {"steps_overflowed", r.overflowed},
          {"steps_updated", r.updated},
          {"steps_set_aside", r.set_aside},
          {"apart_from_one_seed_alone", r.lone.name.empty() ? Json() : lone_of(r)},
          {"largest_margin", r.decided.margin},
          {"margin_bound", r.margin_bound},
          {"failure", r.failure}};
}

void print_row(const char* what, const std::string& compared, const Figure& f) {
  if (f.name.empty()) {
    std::printf("  %-12s none\n", what);
    return;
  }
  const double scale = f.norm > 0 ? f.norm : 1;
  std::printf("  %-12s %-24s %9.1e %9.1e %9.1e   %s%s\n", what, compared.c_str(), f.difference / scale,
              f.envelope / scale, f.bound / scale, f.ratio() <= 1 ? "" : "TOO FAR: ",
              f.name == "loss" ? ("step " + std::to_string(f.step)).c_str()
                               : (f.name + ", step " + std::to_string(f.step)).c_str());
}
void print_lost(const char* what, const Reach& reach) {
  if (reach.lost == 0) return;
  const std::string from = std::to_string(reach.lost);
  std::printf("  %-12s %s: rounding alone changes the loss by as much as it is\n", what,
              reach.to > 0
                  ? ("compared up to step " + std::to_string(reach.to) + "; from step " + from + " on not").c_str()
                  : ("not compared from step " + from + " on").c_str());
}
// A tensor by its first step without power.
void print_lost(const char* what, const Compared& c) {
  const std::vector<std::string> lost = c.lost();
  if (lost.empty()) return;
  const std::string* first = &lost.front();
  for (const std::string& name : lost)
    if (c.reach.at(name).lost < c.reach.at(*first).lost) first = &name;
  std::printf(
      "  %-12s %zu of %ld not compared to the last step (the first: %s, from step %ld on): rounding alone changes them "
      "by as much as they are\n",
      what, lost.size(), static_cast<long>(c.tensors), first->c_str(), static_cast<long>(c.reach.at(*first).lost));
}
std::string count(const Compared& c) {
  return std::to_string(c.tensors) + " tensors, " + std::to_string(c.copies) + " copies";
}

void print(const Report& r) {
  const std::string ranks = r.ranks > 1 ? " in " + std::to_string(r.ranks) + " ranks" : "";
  std::printf("%s: %s%s against %s%s%s\n", r.setting.name.c_str(), r.devices.c_str(), ranks.c_str(), r.against.c_str(),
              r.subject.empty() ? "" : ", ", r.subject.c_str());
  if (!r.setting.coarse.empty())
    std::printf("  the model computes in %s itself, and is judged by that\n", r.setting.coarse.c_str());
  if (!r.reason.empty()) {
    std::printf("  NOT COMPARED: %s\n\n", r.reason.c_str());
    return;
  }
  std::printf("  %-12s %-24s %9s %9s %9s   %s\n", "", "compared", "apart", "rounding", "allowed", "furthest");
  print_row("losses", std::to_string(r.known_losses) + " of " + std::to_string(r.steps) + " steps", r.loss);
  if (!r.evaluation.name.empty())
    print_row("evaluation", "after " + std::to_string(r.evaluations) + " steps", r.evaluation);
  print_lost("losses", r.losses_reach);
  print_lost("evaluation", r.evaluation_reach);
  if (r.gradients.tensors > 0) print_row("gradients", std::to_string(r.gradients.tensors) + " sums", r.gradients.worst);
  print_row("parameters", count(r.parameters), r.parameters.worst);
  print_row("state", count(r.state), r.state.worst);
  print_row("statistics", count(r.buffers), r.buffers.worst);
  if (r.outputs.tensors > 0)
    print_row("outputs", std::to_string(r.outputs.tensors) + " in " + std::to_string(r.steps_of_outputs) + " steps",
              r.outputs.worst);
  if (!r.evaluated.worst.name.empty()) print_row("  evaluated", std::to_string(r.evaluated.tensors), r.evaluated.worst);
  for (const auto& [what, of] : {std::pair("gradients", &r.gradients),
                                 {"parameters", &r.parameters},
                                 {"state", &r.state},
                                 {"statistics", &r.buffers},
                                 {"outputs", &r.outputs},
                                 {"  evaluated", &r.evaluated}})
    print_lost(what, *of);
  if (!r.outputs_left_out.empty())
    std::printf("  outputs      %s%s not compared: rounding may turn what they are made by\n",
                r.outputs_left_out.front().c_str(), r.outputs_left_out.size() > 1 ? ", ... are" : " is");
  if (r.unlike_copies > 0)
    std::printf("  copies       %ld DIFFER from the first of their tensor; the first: %s\n",
                static_cast<long>(r.unlike_copies), r.unlike.c_str());
  if (r.decided.made > 0) {
    std::printf("  decisions    %ld of %ld differ", static_cast<long>(r.decided.differ),
                static_cast<long>(r.decided.made));
    if (r.decided.differ > 0)
      std::printf(", first in step %ld, at margins up to %.1e of the scores (%s; allowed %.1e): %s",
                  static_cast<long>(r.flipped_at), r.decided.margin, r.decided.worst.c_str(), r.margin_bound,
                  r.margins ? "rounding, those steps are not compared" : "NOT ROUNDING");
    std::printf("\n");
  }
  if (!r.unseen.empty())
    std::printf("  decisions    by %s%s are not seen: plan with --fetch %s\n", r.unseen.front().c_str(),
                r.unseen.size() > 1 ? ", ..." : "", r.to_fetch.c_str());
  if (!r.by_rounding.empty())
    std::printf(
        "  rounding alone moves %zu parameter(s) by a tenth or more of their movement, as where a gradient is truly "
        "zero: %s\n",
        r.by_rounding.size(), (r.by_rounding.front() + (r.by_rounding.size() > 1 ? ", ..." : "")).c_str());
  if (!r.unmoved.empty())
    std::printf("  no gradient reached %zu parameter(s) in these steps, as behind a relu that is off: %s\n",
                r.unmoved.size(), (r.unmoved.front() + (r.unmoved.size() > 1 ? ", ..." : "")).c_str());
  if (r.unclipped())
    std::printf(
        "  no gradient was clipped in these steps: together they are at most %.1e, below the clip norm of %.1e\n",
        r.gradient_norm, r.clip_norm);
  if (!r.lone.name.empty()) std::printf("  %s\n", text_of_lone(r).c_str());
  if (r.set_aside > 0)
    std::printf("  %ld step(s) set aside, in which a unit turned that no moved run shows\n",
                static_cast<long>(r.set_aside));
  if (r.overflowed > 0)
    std::printf("  %ld of %ld steps overflowed in float16, which updates nothing and makes the loss scale smaller\n",
                static_cast<long>(r.overflowed), static_cast<long>(r.steps));
  if (r.overflowed_at > 0)
    std::printf(
        "  step %ld overflowed on one side only, as float16 does where rounding decides: it and what follows is not "
        "compared\n",
        static_cast<long>(r.overflowed_at));
  if (!r.failure.empty()) std::printf("  the plan FAILED: %s\n", r.failure.c_str());
  if (r.ended_at > 0)
    std::printf(
        "  step %ld: %s: it and what follows is not compared.\n  To compare more: data that this model stays finite on "
        "(--data FILE), or a model with a smaller learning rate\n",
        static_cast<long>(r.ended_at), r.ended_by.c_str());
  const std::string limits = limits_of(r);
  const std::string texts[] = {limits.empty() ? "equal" : "equal as far as it is compared: " + limits, "NOT EQUAL",
                               "NOT COMPARED: " + why_not_compared(r)};
  std::printf("  %s\n\n", texts[static_cast<size_t>(r.verdict())].c_str());
}

void print(const std::vector<Report>& reports, int64_t steps) {
  std::printf(
      "%ld step(s) of the plan and of one device on the same data. `apart` is how far they are from each other, of "
      "the\n"
      "tensor's norm, at the tensor that is furthest from its bound; `rounding` is how far one device is from itself "
      "when\n"
      "its weights and inputs are moved in the last bits (%d run(s)); `allowed` is a multiple of that.\n\n",
      static_cast<long>(steps), reports.front().setting.runs);
  for (const Report& r : reports) print(r);
}

// ---- the command ---------------------------------------------------------------------------------------------------
struct Arguments {
  std::string path, data, plan;
  PlanArguments options;
  int64_t steps = 5;
  int runs = 0;
  double amplitude = 0;
  SessionArguments session;
  bool json = false, skip_f64 = false;
};

// What is compared: the model's options or those of a plan file, and the decisions whose scores the plan hands out.
class Subject {
 public:
  Subject(whale_engine* engine, const Arguments& given) : engine_(engine), given_(given) {
    if (kind_of(given.path) != FileKind::kGraph)
      throw Failure("'" + given.path + "' is no model file (.whale), which verify takes; a plan of it: --plan FILE");
    graph_ = own<GraphHandle>(whale_graph_load, engine, str(given.path));
    graph_json_ = text(whale_graph_json, static_cast<const whale_graph*>(graph_.get()));
    if (training().at("loss") < 0 || training().at("optimizer").is_null() || training().at("optimizer") == "none")
      throw Failure("'" + shown(given.path) +
                    "' is a model without a loss to minimize: verify compares training steps; minimize a loss");
    decisions_ = decisions_of(graph_json_);
    many_ = given.options;
    if (!from_file())
      (void)own<Cluster>(whale_cluster_create, engine, str(many_.devices));  // a list of devices, or an error
    if (from_file())
      read_file();
    else
      described_ = described(make(many_));
    for (const auto& device : described_.at("devices"))
      if (device.at("kind") == "null")
        throw Failure("device '" + device.at("name").get<std::string>() +
                      "' is a null device, which computes nothing: verify on cpu or ref devices");
    if (!combines_by_adasum(described_)) many_.given.erase("adasum");
    one_ = one_device(many_, from_file() ? in_time(described_.at("devices").at(0).at("kind").get<std::string>())
                                         : kind_of_first(many_.devices));
    one_.precision = described_.at("precision");
    std::vector<std::string> names;
    for (const auto& entry : described_.at("entries"))
      if (entry.at("name") == "train")
        for (const auto& output : entry.at("outputs"))
          if (std::find(names.begin(), names.end(), output.at("name")) == names.end())
            names.push_back(output.at("name"));
    outputs_ = outputs_of(names, graph_json_, decisions_);
    // Of several micro-batches such a scalar is one of each, not of the step.
    if (described_.at("micro_batches") == 1) terms_ = LossTerms(graph_json_);
    one_.fetch = outputs_.names;
    const auto fetch = [&](const std::string& name) {
      if (std::find(one_.fetch.begin(), one_.fetch.end(), name) == one_.fetch.end()) one_.fetch.push_back(name);
    };
    for (const std::string& name : terms_.names()) fetch(name);
    if (needs_gradients()) find_gradients();
    for (const std::string& name : gradients_) fetch("grad:" + name);
  }

  bool from_file() const { return !given_.plan.empty(); }
  const PlanArguments& many() const { return many_; }
  const PlanArguments& one() const { return one_; }
  const Json& plan() const { return described_; }
  const std::string& graph() const { return graph_json_; }
  // Whether the optimizer divides a gradient by its own size: what is smaller than its rounding turns.
  bool divides() const { return training().at("optimizer") != "sgd"; }
  // Elements of the largest value: a sum has at most as many terms.
  double largest_sum() const {
    const Json graph = Json::parse(graph_json_);
    double most = 1;
    for (const auto& tensor : graph.at("tensors")) {
      double elements = 1;
      for (const auto& extent : tensor.at("dims")) elements *= extent.get<double>();
      most = std::max(most, elements);
    }
    return most;
  }
  // By the size of a parameter's whole update, which its elements without a true gradient are part of.
  bool scales_by_size() const {
    return training().at("optimizer") == "adafactor" || training().at("optimizer") == "lamb";
  }
  double clip_norm() const { return training().at("clip_norm"); }
  // Parameters whose gradients one device hands out.
  const std::vector<std::string>& gradients() const { return gradients_; }
  std::set<std::string> trained() const {
    std::set<std::string> names;
    const Json graph = Json::parse(graph_json_);
    for (const auto& variable : graph.at("variables"))
      if (variable.value("trainable", false)) names.insert(variable.at("name"));
    return names;
  }
  bool splits_weights() const {
    for (const auto& variable : described_.at("variables"))
      if (variable.at("name").get<std::string>().ends_with("/low") && variable.at("dtype") == "u16") return true;
    return false;
  }
  bool has_tables() const { return graph_json_.find("\"op\":\"embedding") != std::string::npos; }
  const std::vector<Decision>& decisions() const { return decisions_; }
  // Scores of decisions that a plan file does not hand out: those decisions are not compared.
  const std::vector<std::string>& unseen() const { return unseen_; }
  const Outputs& outputs() const { return outputs_; }
  const LossTerms& terms() const { return terms_; }

  // Whether the plan does.
  bool hands_out(const std::string& name) const {
    for (const auto& entry : described_.at("entries"))
      for (const auto& output : entry.at("outputs"))
        if (output.at("name") == name) return true;
    return false;
  }

  // What a plan file is to hand out, so that all of it is compared: what it does, the decisions, and more.
  std::string to_fetch(const std::vector<std::string>& more) const {
    std::set<std::string> seen{"", "loss"};
    std::vector<std::string> names;
    const auto add = [&](const std::string& name) {
      if (seen.insert(name).second) names.push_back(name);
    };
    const Json graph = Json::parse(graph_json_);
    for (const auto& output : graph.at("outputs")) seen.insert(output.at("name"));
    for (const auto& entry : described_.at("entries"))
      for (const auto& output : entry.at("outputs")) add(output.at("name"));
    for (const std::string& name : names_of(decisions_of(graph_json_))) add(name);
    for (const std::string& name : more) add(name);
    return as_argument(names);
  }

  Plan make(PlanArguments arguments) const {
    for (const std::string& name : names_of(decisions_)) arguments.fetch.push_back(name);
    return make_plan(engine_, graph_.get(), arguments);
  }
  Plan open() const { return from_file() ? open_plan(engine_, given_.plan, {}) : make(many_); }

 private:
  Json training() const { return Json::parse(graph_json_).at("training"); }
  // State that is zero until there is a gradient, or a parameter that stays where it is, tells whether one came. Decay
  // that is part of the gradient and Adafactor's epsilon move both without one; and a clip is of them all.
  bool needs_gradients() const {
    const Json of = training();
    const std::string optimizer = of.at("optimizer");
    const bool decoupled = optimizer == "adamw" || optimizer == "lamb";
    return of.at("clip_norm") > 0 || optimizer == "adafactor" || (!decoupled && of.at("weight_decay") != 0);
  }
  // Tables that are updated by row have none of their shape, and what the loss does not reach has none.
  void find_gradients() {
    const auto hands_out = [&](const std::vector<std::string>& names) {
      PlanArguments one = one_;
      for (const std::string& name : names)
        if (std::find(one_.fetch.begin(), one_.fetch.end(), "grad:" + name) == one_.fetch.end())
          one.fetch.push_back("grad:" + name);
      try {
        make(one);
      } catch (const Failure&) {
        return false;
      }
      return true;
    };
    const std::set<std::string> all = trained();
    gradients_.assign(all.begin(), all.end());
    if (!hands_out(gradients_)) std::erase_if(gradients_, [&](const std::string& name) { return !hands_out({name}); });
  }
  void read_file() {
    const FileKind kind = kind_of(given_.plan);
    if (kind == FileKind::kOther)
      throw Failure(
          "--plan '" + shown(given_.plan) +
          "' is no plan (.plan): its first bytes are not those of one; `whale plan MODEL -o FILE` writes one");
    if (kind == FileKind::kGraph)
      throw Failure(
          "--plan '" + shown(given_.plan) +
          "' is a model, not a plan: leave --plan out and give --devices and --strategy, or make a plan of it "
          "with `whale plan`");
    check_fixed(given_.plan, given_.options);
    described_ = described(open_plan(engine_, given_.plan, {}));
    many_ = options_of(described_);
    for (const Decision& d : decisions_)
      if (!hands_out(d.scores)) unseen_.push_back(d.scores);
    std::erase_if(decisions_, [&](const Decision& d) { return !hands_out(d.scores); });
    for (Decision& d : decisions_)
      if (!hands_out(d.made)) d.made.clear();
    const Json ours = described(make(one_device(many_, "ref")));
    if (ours.at("model_hash") == described_.at("model_hash") && ours.at("source_hash") != described_.at("source_hash"))
      throw Failure("'" + given_.plan + "' keeps another model than '" + given_.path +
                    "', of which its name says that it is a plan, and would plan smaller batches from that: the file "
                    "is damaged; plan the model again");
    if (ours.at("model_hash") != described_.at("model_hash"))
      throw Failure("'" + given_.plan + "' is a plan of another model than '" + given_.path +
                    "', or of the same before its optimizer changed: plan the model again, or name the model file that "
                    "the plan was made from");
  }

  whale_engine* engine_;
  const Arguments& given_;
  GraphHandle graph_;
  std::string graph_json_;
  std::vector<Decision> decisions_;
  std::vector<std::string> unseen_, gradients_;
  Outputs outputs_;
  LossTerms terms_;
  PlanArguments many_, one_;
  Json described_;
};

// One precision of one subject, with its moved runs.
class Comparer {
 public:
  Comparer(whale_engine* engine, const Arguments& given, const Subject& subject)
      : engine_(engine), given_(given), subject_(subject), watch_(given.steps) {
    const Plan one = subject.make(subject.one());
    one_bytes_ = bytes_of(described(one)), many_bytes_ = bytes_of(subject.plan());
    inputs_ = inputs_of(one.get(), "train");
  }

  // In the precision of the plan, or the same plan in float64 on reference devices, where no sum is in fewer bits.
  void add(bool float64) {
    const PlanArguments& many = subject_.many();
    const bool file = subject_.from_file();
    const bool same = widens(float64) && !adasum(many);
    if (!(file && exempt(many)) || same) {
      Report report =
          by_seeds(float64, [&](const SessionArguments& arguments) { return compared(float64, arguments); });
      if (exempt(many))
        report.subject = adasum(many) ? "the plan without Adasum" : "the plan with sums in the gradients' own type";
      finish(std::move(report), side(subject_.many(), float64), side(subject_.one(), float64));
    }
    if (exempt(many) && (!(file && same) || subject_.plan().at("precision") == "f64")) add_gradients(float64);
  }

  // Of parameters without a gradient nothing was seen, nor of a clip that no gradient reached: from other seeds one
  // may.
  void add_rounds(bool float64) {
    std::vector<std::string> unmoved = reports_.front().unmoved;
    bool unclipped = reports_.front().unclipped();
    if (reports_.front().verdict() != Verdict::kEqual) return;
    for (int round = 1; round < kMostRounds && (!unmoved.empty() || unclipped); ++round) {
      SessionArguments other = session(float64);
      other.seed += static_cast<uint64_t>(round);
      Report report = compared(float64, other);
      report.subject = "again from seed " + std::to_string(other.seed);
      std::erase_if(unmoved, [&](const std::string& name) {
        return std::find(report.unmoved.begin(), report.unmoved.end(), name) == report.unmoved.end();
      });
      unclipped = unclipped && report.unclipped();
      if (report.verdict() != Verdict::kNotCompared)
        finish(std::move(report), side(subject_.many(), float64), side(subject_.one(), float64));
    }
  }
  const std::vector<Report>& reports() const { return reports_; }

 private:
  // In 16 bits rounding is coarse enough that of thousands of models one meets in a step what no moved run shows (a
  // sine of hundreds). An error is there from every seed: a plan that float64 finds equal is accused where one of the
  // next seeds accuses it too. Nothing excuses unlike copies or a failure.
  template <class Compare>
  Report by_seeds(bool float64, const Compare& compared_from) {
    SessionArguments from = session(float64);
    const uint64_t first = from.seed;
    Report report = compared_from(from);
    const bool in_16_bits = !float64 && report.setting.roundoff > 0x1p-24;
    if (!in_16_bits || !accused(report) || !report.margins || !equal_in_float64()) return report;
    std::optional<Report> other;
    for (int round = 1; round < kMostRounds; ++round) {
      from.seed = first + static_cast<uint64_t>(round);
      Report again = compared_from(from);
      const Verdict verdict = again.verdict();
      if (verdict == Verdict::kNotEqual) return report;
      again.seed = from.seed;
      if (!other || (other->verdict() != Verdict::kEqual && verdict == Verdict::kEqual)) other = std::move(again);
    }
    other->lone = report.worst(), other->lone_seed = first;
    if (other->verdict() == Verdict::kNotCompared)
      other->reason = why_not_compared(*other) + "; " + text_of_lone(*other);
    return *other;
  }
  bool equal_in_float64() const {
    bool any = false;
    for (const Report& r : reports_)
      if (r.setting.name == kPrecisions[0].name) {
        if (r.verdict() != Verdict::kEqual) return false;
        any = true;
      }
    return any;
  }
  // In 16 bits every label left out and every larger batch takes power from the bounds: there they stay typical.
  std::vector<Batch> batches(const Setting& setting, uint64_t seed, bool any = true) const {
    const bool wide = any && setting.roundoff <= 0x1p-24;
    const auto data = open_data(given_.data, inputs_, wide ? Draw::kWide : Draw::kTypical);
    // A plan says whose samples are whose of whole batches alone: the parts of a smaller one are not known.
    const bool by_parts = exempt(subject_.many());
    const int64_t whole = batch_of(inputs_);
    const auto is_whole = [&](const Batch& batch) {
      for (size_t k = 0; k < inputs_.size(); ++k)
        if (inputs_[k].batch_dim >= 0) return batch[k].dims[inputs_[k].batch_dim] == whole;
      return true;
    };
    std::vector<Batch> out;
    left_out_ = 0;
    for (int64_t i = 0; std::ssize(out) < given_.steps; ++i) {
      Batch batch = data->batch(seed, i);
      if (!by_parts || is_whole(batch)) {
        out.push_back(std::move(batch));
        continue;
      }
      if (out.empty() && i > 0)
        throw Failure("the data has no whole batch of " + std::to_string(whole) +
                      " samples, and what --adasum, --gradient-dtype or --accumulate-dtype sums is compared on whole "
                      "ones: give more "
                      "samples, or a model of a smaller batch");
      ++left_out_;
    }
    return out;
  }
  // One device in other bits than the others.
  struct Wide {
    std::function<Plan()> plan;
    double scale = 1;
    bool decides = true;
  };
  // A model may round more than moved weights and inputs show: sums that it cancels itself (a mean taken off behind a
  // large constant). One device in other bits tells, and nobody is accused before it was asked: for float32 float64,
  // and for float64 float32, whose rounding is as many times larger as its unit is. In 16 bits the one in float32 has
  // been asked, but for losses and decisions. Below float64 a few runs may also all miss what a plan meets. Nor do
  // those say what rounding does where there is nothing to move: a relu of what batch norm leaves of equal integers
  // turns at 1e-14. Last, parameters beside such numbers, which are often zero, move as the largest does.
  Report compared(bool float64, const SessionArguments& arguments) {
    const PlanArguments one = side(subject_.one(), float64);
    const bool in_16_bits = one.precision != "f32" && one.precision != "f64";
    Setting setting = setting_for(float64, kFewRuns);
    Report report = compared(setting, float64, arguments, one, {wide(one), 1, false});
    if (!accused(report)) return report;
    if (one.precision != "f64") setting = setting_for(float64, kManyRuns);
    const Wide other = in_16_bits ? Wide{wide(one)} : one.precision == "f32" ? Wide{in_float64(one)} : in_float32(one);
    report = compared(setting, float64, arguments, one, other);
    if (!accused(report)) return report;
    // A size that decides about a whole tensor (Adafactor clips by it) may be passed in a plan and in none of twelve.
    if (one.precision != "f64" && subject_.scales_by_size()) {
      setting = setting_for(float64, kMostRuns);
      report = compared(setting, float64, arguments, one, other);
      if (!accused(report)) return report;
    }
    setting.alike = parameters_beside_integers(Json::parse(subject_.graph()));
    return setting.alike.empty() ? report : compared(setting, float64, arguments, one, other);
  }
  static bool accused(const Report& report) {
    return report.verdict() == Verdict::kNotEqual && report.failure.empty() && report.unlike_copies == 0;
  }
  Wide in_float32(PlanArguments one) const {
    one.precision = "f32";
    const Precision& rounds = rounding_precision(precision_of("f32"), subject_.graph());
    return {[this, one] { return subject_.make(one); }, precision_of("f64").roundoff / rounds.roundoff};
  }
  Report compared(const Setting& setting, bool float64, const SessionArguments& arguments, const PlanArguments& one,
                  const Wide& wide) {
    const Sides sides{subject_.trained(),
                      [&] { return plan(float64); },
                      [&] { return subject_.make(one); },
                      wide.plan,
                      {},
                      subject_.outputs().names,
                      subject_.terms(),
                      wide.scale,
                      wide.decides,
                      subject_.gradients(),
                      subject_.clip_norm()};
    return compare(engine_, sides, batches(setting, arguments.seed), arguments, subject_.decisions(), setting,
                   [&](int64_t step) { watch_.show(setting.name, step); });
  }
  Plan plan(bool float64) const {
    const bool same = widens(float64);
    // The halves of split weights are the bits of float32: in float64 the weights are whole.
    if (same && subject_.splits_weights()) return subject_.make(without_exempt(side(subject_.many(), true)));
    const PlanArguments& many = subject_.many();
    Plan plan =
        subject_.from_file() ? subject_.open() : subject_.make(same && !adasum(many) ? many : without_exempt(many));
    return same ? own<Plan>(whale_plan_in_float64, static_cast<const whale_plan*>(plan.get())) : std::move(plan);
  }
  // Whether the plan itself is run in float64: a file has no other form without sums in fewer bits.
  bool widens(bool float64) const {
    return float64 && (subject_.plan().at("precision") != "f64" || (subject_.from_file() && exempt(subject_.many())));
  }
  static bool exempt(const PlanArguments& a) {
    return adasum(a) || narrow(a, "gradient-dtype") || narrow(a, "accumulate-dtype");
  }
  static PlanArguments without_exempt(PlanArguments a) {
    a.given.erase("adasum"), a.given.erase("gradient-dtype"), a.given.erase("accumulate-dtype");
    return a;
  }
  PlanArguments side(PlanArguments a, bool float64) const {
    if (!float64 || a.precision == "f64") return a;
    a.devices = reference_list(engine_, a.devices);
    a.precision = "f64";
    return a;
  }
  Setting setting_for(bool float64, int most_runs) const {
    const std::string precision = float64 ? "f64" : subject_.plan().at("precision").get<std::string>();
    const bool wide =
        float64 && subject_.plan().at("precision") != "f64";  // one device doubles, a plan keeps its places
    // As many as were asked for accuse nobody: that takes as many as fit.
    const int runs = given_.runs > 0 && most_runs == kFewRuns
                         ? given_.runs
                         : std::max(given_.runs, runs_that_fit((wide ? 4 : 1) * many_bytes_,
                                                               (wide ? 2 : 1) * one_bytes_, most_runs));
    const Precision& planned = precision_of(precision);
    const Precision& rounds = rounding_precision(planned, subject_.graph());
    Setting setting = setting_of(rounds, runs);
    setting.name = planned.name;
    if (&rounds != &planned) setting.coarse = rounds.name;
    // A long sum of terms that are nearly equal rounds in one direction, and moved numbers show nothing of it.
    if (rounds.name == std::string("float64")) setting.terms = subject_.largest_sum();
    setting.divides = subject_.divides();
    setting.turns = setting.flips && setting.divides;
    if (given_.amplitude > 0) setting.amplitude = given_.amplitude;
    return setting;
  }
  // Losses that are not finite are part of a comparison.
  SessionArguments session(bool float64) const {
    SessionArguments out = float64 ? without_scale(given_.session) : given_.session;
    out.ignore_nan = true;
    return out;
  }

  // One device in float32, where the plan computes in 16 bits.
  std::function<Plan()> wide(PlanArguments one) const {
    if (one.precision != "bf16" && one.precision != "f16") return {};
    one.precision = "f32";
    return [this, one] { return subject_.make(one); };
  }
  // Of gradients also in float64, where it computes in float32.
  std::function<Plan()> wide_gradients(PlanArguments one) const {
    return one.precision != "f32" || given_.skip_f64 ? wide(one) : in_float64(one);
  }
  std::function<Plan()> in_float64(PlanArguments one) const {
    one.precision = "f64", one.devices = "ref:1";
    return [this, one] { return subject_.make(one); };
  }

  // Tables that are updated by row have no gradient of their shape, and none that is summed.
  bool has_gradient(PlanArguments one, const std::string& gradient) const {
    if (!subject_.has_tables()) return true;
    one.fetch = {gradient};
    try {
      subject_.make(one);
    } catch (const Failure&) {
      return false;
    }
    return true;
  }

  void add_gradients(bool float64) {
    PlanArguments many = side(subject_.many(), float64), one = side(subject_.one(), float64);
    const std::vector<std::string> outputs = without_gradients(subject_.outputs().names);
    one.fetch = outputs;
    const Setting setting = setting_for(float64, kFewRuns);
    const std::string why = adasum(many) ? why_not_by_replica(subject_.graph()) : "";
    if (!why.empty())
      return not_compared(setting, many, one,
                          "Adasum is compared with the gradients of each replica's samples by themselves, and " + why);
    const bool each = !adasum(many) && (subject_.plan().at("zero") >= 2 || narrow(many, "accumulate-dtype"));
    GradientSum sum = gradient_sum_of(subject_.plan().dump(), subject_.graph(), each);
    std::erase_if(sum.parameters,
                  [&](const GradientSum::Parameter& p) { return !has_gradient(one, "grad:" + p.name); });
    std::vector<std::string> unseen;
    for (const GradientSum::Parameter& p : sum.parameters) {
      const std::string name = "grad:" + p.name;
      many.fetch.push_back(name), one.fetch.push_back(name);
      if (subject_.from_file() && !subject_.hands_out(name)) unseen.push_back(name);
    }
    if (!unseen.empty())
      return not_compared(setting, many, one,
                          "the plan file does not hand out the gradients that it sums by an option; plan with "
                          "--fetch " +
                              subject_.to_fetch(unseen));
    if (sum.adasum)
      mark_whole(sum, subject_.from_file() ? subject_.plan().dump() : described(subject_.make(many)).dump());
    std::vector<std::string> names;
    for (const GradientSum::Parameter& p : sum.parameters) names.push_back(p.name);
    PlanArguments of_updates = one;
    of_updates.fetch.clear();
    of_updates.given.erase("accumulation");
    if (one.precision != "f64") of_updates.precision = "f32";
    const Sides sides{{},
                      [&] { return subject_.from_file() ? subject_.open() : subject_.make(many); },
                      [&] { return subject_.make(one); },
                      wide_gradients(one),
                      [&] { return update_plan(engine_, subject_.graph(), names, of_updates); },
                      outputs,
                      {},
                      1,
                      true,
                      {},
                      0};
    const auto run = [&](const SessionArguments& arguments, bool any) {
      return compare_gradients(engine_, sides, batches(setting, arguments.seed, any), arguments, subject_.decisions(),
                               sum, setting, setting_of(precision_of(of_updates.precision), setting.runs),
                               [&](int64_t step) { watch_.show(setting.name + " gradients", step); });
    };
    // Beside labels that are left out, several means (of labels and of samples) have weights of their own, and say
    // nothing of a replica's part; without such labels they may.
    const bool labels = std::any_of(inputs_.begin(), inputs_.end(), [](const InputSpec& i) { return bool(i.ignored); });
    finish(by_seeds(float64,
                    [&](const SessionArguments& arguments) {
                      Report report = run(arguments, true);
                      return !report.reason.empty() && labels ? run(arguments, false) : report;
                    }),
           many, one);
  }

  void not_compared(const Setting& setting, const PlanArguments& many, const PlanArguments& one,
                    const std::string& reason) {
    Report report;
    report.setting = setting, report.subject = subject_of_sums(adasum(many)), report.reason = reason;
    finish(std::move(report), many, one);
  }
  void finish(Report report, const PlanArguments& many, const PlanArguments& one) {
    report.devices = many.devices, report.ranks = ranks_of(given_.session);
    report.against = one.devices, report.left_out = left_out_;
    report.unseen = subject_.unseen(), report.to_fetch = subject_.to_fetch({});
    for (const std::string& name : subject_.outputs().left_out)
      if (std::find(report.outputs_left_out.begin(), report.outputs_left_out.end(), name) ==
          report.outputs_left_out.end())
        report.outputs_left_out.push_back(name);
    reports_.push_back(std::move(report));
  }

  whale_engine* engine_;
  const Arguments& given_;
  const Subject& subject_;
  Watch watch_;
  std::vector<InputSpec> inputs_;
  std::vector<Report> reports_;
  mutable int64_t left_out_ = 0;  // of the data
  double one_bytes_ = 0, many_bytes_ = 0;
};

std::vector<Report> verify(whale_engine* engine, const Arguments& given) {
  const Subject subject(engine, given);
  Comparer comparer(engine, given, subject);
  const bool float64 = subject.plan().at("precision") == "f64";
  const bool none = subject.from_file() && (subject.splits_weights() || adasum(subject.many()));
  const bool both = !float64 && !given.skip_f64 && !none;
  if (both) comparer.add(true);
  comparer.add(float64);
  comparer.add_rounds(both || float64);
  std::vector<Report> reports = comparer.reports();
  for (Report& r : reports) r.bits_alone = none && !float64;
  return reports;
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("verify", "run the plan and the one-device plan on the same data and compare");
  auto given = std::make_shared<Arguments>();
  command->add_option("MODEL", given->path, "a .whale file")->required();
  command->add_option("--plan", given->plan,
                      "a .plan file of this model: verify it as it is, its devices and options included");
  command->add_option("--data", given->data, "as for run; none: synthetic");
  command->add_option("--steps", given->steps, "steps to run (default 5)")->check(whole(1, INT64_MAX));
  command->add_option("--seed", given->session.seed, "of parameters, dropout and data")->check(seed_number());
  command
      ->add_option("--seeds", given->runs,
                   "runs of one device with numbers moved in the last bits (default: as many as fit the memory, at "
                   "most 3); more "
                   "before a plan is called unequal")
      ->check(whole(1, 16));
  command->add_option("--amplitude", given->amplitude, "of those moves, for measuring the metric itself")
      ->check(not_negative())
      ->group("");
  command->add_flag("--json", given->json, "as JSON");
  command->add_flag("--skip-float64", given->skip_f64, "not the reference devices, which are slow on large models");
  add_plan_options(*command, given->options);
  const auto* devices = command->get_option("--devices");
  add_precision_options(*command, given->session);
  add_ranks_option(*command, given->session);
  command->footer(
      "Exit code: 0 equal, 1 not equal, or equal and what was printed was lost, 2 could not run, 3 nothing could be "
      "compared.");
  command->callback([given, devices, &exit_code] {
    const Engine engine = make_engine(given->options.init_dir);
    const World world = join_processes(engine.get(), given->options, devices->count() > 0, given->session);
    const bool first = is_first(given->session);  // all compare, one says it
    const std::vector<Report> reports = verify(engine.get(), *given);
    Verdict verdict = Verdict::kEqual;  // the first of: not equal, not compared, equal
    for (const Report& r : reports) {
      if (r.verdict() == Verdict::kNotEqual) verdict = Verdict::kNotEqual;
      if (r.verdict() == Verdict::kNotCompared && verdict == Verdict::kEqual) verdict = Verdict::kNotCompared;
    }
    if (given->json && first) {
      Json out{{"passed", verdict == Verdict::kEqual},
               {"verdict", name_of(verdict)},
               {"steps", given->steps},
               {"comparisons", Json::array()}};
      for (const Report& r : reports) out["comparisons"].push_back(json_of(r));
      std::printf("%s\n", out.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
    } else if (first) {
      print(reports, given->steps);
      constexpr const char* kTexts[] = {"The plan does not change the result.",
                                        "The plan changes the result: this is a bug in libwhale, please report it.",
                                        "Nothing could be compared, as said above: more --steps, other data (--data), "
                                        "another --seed or float64 may do."};
      const bool some =
          std::any_of(reports.begin(), reports.end(), [](const Report& r) { return r.verdict() == Verdict::kEqual; });
      const bool limited =
          verdict == Verdict::kEqual &&
          (std::any_of(reports.begin(), reports.end(), [](const Report& r) { return !limits_of(r).empty(); }) ||
           !never_felt(reports).empty());
      const bool explained =
          std::any_of(reports.begin(), reports.end(), [](const Report& r) { return !r.reason.empty(); });
      std::printf("%s\n", limited ? "The plan does not change the result as far as it could be compared: see above."
                          : verdict == Verdict::kNotCompared && some ? "Not everything could be compared: see above."
                          : verdict == Verdict::kNotCompared && explained ? "Nothing could be compared: see above."
                                                                          : kTexts[static_cast<size_t>(verdict)]);
    }
    constexpr int kExitCodes[] = {0, 1, 3};
    exit_code = kExitCodes[static_cast<size_t>(verdict)];
  });
}

}  // namespace tool
