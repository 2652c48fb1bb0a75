// verify: does the plan change the result? The figures of semantics.md section 10 for the user's own model and plan.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "decisions.h"
#include "runner.h"

namespace tool {
namespace {

struct Comparison {
  std::string name, devices, against;
  double loss_error = 0;       // largest relative difference of a step's loss
  double parameter_error = 0;  // f64: largest |difference| / max(|value|, lr steps sqrt(n)) over parameters; f32:
                               // |difference| / |movement|, whole model
  double loss_bound = 0, parameter_bound = 0, margin_bound = 0;
  std::string worst;
  int64_t steps = 0;       // compared
  int64_t flipped_at = 0;  // the step of the first decision that differs
  Decided decided;
  bool passed() const {
    return loss_error <= loss_bound && parameter_error <= parameter_bound && decided.margin <= margin_bound;
  }
};

double norm(const std::vector<double>& a) {
  double s = 0;
  for (const double v : a) s += v * v;
  return std::sqrt(s);
}
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double s = 0;
  for (size_t i = 0; i < a.size(); ++i) s += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(s);
}

// Device lists such as "cpu:4,cpu@0*2" with every kind replaced: as many reference devices.
std::string reference_list(whale_engine* engine, const std::string& devices) {
  const Cluster cluster = own<Cluster>(whale_cluster_create, engine, str(devices));
  return "ref:" + std::to_string(whale_cluster_size(cluster.get()));
}

// The inputs of a float64 plan take float64 arrays.
Batch widen(const Batch& batch, const std::vector<InputSpec>& inputs) {
  Batch wide = batch;
  for (size_t i = 0; i < wide.size(); ++i) {
    if (wide[i].dtype != WHALE_F32 || inputs[i].dtype != WHALE_F64) continue;
    std::vector<uint8_t> bytes(wide[i].bytes.size() * 2);
    const auto* from = reinterpret_cast<const float*>(wide[i].bytes.data());
    auto* to = reinterpret_cast<double*>(bytes.data());
    for (size_t k = 0; k < bytes.size() / 8; ++k) to[k] = from[k];
    wide[i].bytes = std::move(bytes);
    wide[i].dtype = WHALE_F64;
  }
  return wide;
}

struct Pair {
  std::function<Plan()> plan, single;
};

// The value of a parameter; of one that split-SGD keeps in halves, the float32 that both make.
std::vector<double> value_of(Runner& runner, const std::string& name, const std::vector<std::string>& states) {
  std::vector<double> value = runner.read(name);
  if (std::find(states.begin(), states.end(), name + "/low") == states.end()) return value;
  const std::vector<double> low = runner.read(name + "/low");
  for (size_t i = 0; i < value.size(); ++i) {
    auto f = static_cast<float>(value[i]);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    bits |= static_cast<uint32_t>(low[i]);
    std::memcpy(&f, &bits, 4);
    value[i] = f;
  }
  return value;
}

// Runs both plans on the same data from the same seed and measures how far they part. Decisions first: behind one that
// differs, losses and parameters may differ by more than rounding: then only the steps before it are compared.
void compare(whale_engine* engine, const Pair& plans, const std::vector<Batch>& batches,
             const SessionArguments& arguments, const std::vector<Decision>& decisions, bool float64,
             Comparison& result) {
  Plan plan = plans.plan();
  const std::vector<InputSpec> inputs = inputs_of(plan.get(), "train");
  Runner many(engine, std::move(plan), arguments), one(engine, plans.single(), arguments);
  const std::vector<std::string> names = one.variables("parameter"), states = one.variables("state");
  std::vector<std::string> scores;
  for (const Decision& decision : decisions) scores.push_back(decision.scores);
  std::vector<std::vector<double>> start;
  for (const std::string& name : names) start.push_back(value_of(one, name, states));
  double rate = 0;
  result.loss_error = result.parameter_error = 0, result.steps = 0;
  size_t before = 0;  // steps before a decision that differs
  for (const Batch& each : batches) {
    const Batch batch = widen(each, inputs);
    rate = std::max(rate, whale_session_learning_rate(one.session()));
    std::vector<Values> of_many, of_one;
    const double a = many.step(batch, scores, &of_many), b = one.step(batch, scores, &of_one);
    // What is decided behind one that differs says nothing more.
    for (size_t i = 0; i < decisions.size() && !result.decided.differ; ++i)
      compare_decisions(decisions[i], of_many[i], of_one[i], result.decided);
    before += result.decided.differ == 0;
    const double error = std::abs(a - b) / std::max(1e-30, std::abs(b));
    if (!(error <= result.loss_error)) result.loss_error = error;
    ++result.steps;
  }
  double difference = 0, movement = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::vector<double> a = value_of(many, names[i], states), b = value_of(one, names[i], states);
    const double d = distance(a, b);
    difference += d * d;
    const double moved = distance(b, start[i]);
    movement += moved * moved;
    if (!float64) continue;
    const double scale =
        std::max(norm(b), rate * static_cast<double>(batches.size()) * std::sqrt(static_cast<double>(b.size())));
    const double error = scale > 0 ? d / scale : d;
    if (!(error <= result.parameter_error)) result.parameter_error = error, result.worst = names[i];
  }
  if (!float64) result.parameter_error = movement > 0 ? std::sqrt(difference / movement) : std::sqrt(difference);
  if (!result.decided.differ || decisions.empty()) return;
  result.flipped_at = static_cast<int64_t>(before) + 1;
  if (result.passed()) return;  // within the bounds all the same
  result.loss_error = result.parameter_error = 0, result.steps = 0;
  const std::vector<Batch> fewer(batches.begin(), batches.begin() + static_cast<std::ptrdiff_t>(before));
  if (!fewer.empty()) compare(engine, plans, fewer, arguments, {}, float64, result);
}

// Products whose operands and results are rounded to the format that the plan computes in, forward and backward (two
// more each).
int64_t roundings_of(const std::string& graph_json) {
  int64_t products = 0;
  const nlohmann::json graph = nlohmann::json::parse(graph_json);
  for (const auto& op : graph.at("ops")) {
    const std::string name = op.at("op");
    products += name == "matmul" || name == "attention" || name.starts_with("conv");
  }
  return 3 * products;
}

// Each rounding is up to e / 2, those behind one another add up like a random walk: a gradient's error is e / 2 sqrt(n)
// of its size. Adam's step is the gradient's sign, more or less: with errors of that size, delta / pi of normal
// gradients change sign, by 2 of 1: the movement's error is sqrt(4 delta / pi). Measured in bf16 over 20 steps on two
// devices, the largest of a few seeds and of replica, split and pipeline: gpt 0.044, moe-gpt 0.086, mlp 0.053, resnet20
// 0.048, where this allows 0.12, 0.12, 0.09 and 0.14. A flat 0.05 would refuse plans that are right.
double movement_bound(double epsilon, int64_t roundings) {
  const double delta = epsilon / 2 * std::sqrt(static_cast<double>(std::max<int64_t>(roundings, 1)));
  return std::sqrt(4 * delta / 3.14159265358979);
}

std::string decisions_text(const Comparison& row) {
  const Decided& d = row.decided;
  char text[512];
  std::snprintf(
      text, sizeof text,
      "%s: %ld of %ld decisions until step %ld differ, at margins up to %.1e of the scores (%s), bound %.0e: %s; "
      "%ld step(s) compared\n",
      row.name.c_str(), static_cast<long>(d.differ), static_cast<long>(d.made), static_cast<long>(row.flipped_at),
      d.margin, d.worst.c_str(), row.margin_bound,
      d.margin <= row.margin_bound ? "rounding, no failure" : "NOT ROUNDING", static_cast<long>(row.steps));
  return text;
}

}  // namespace

void add_verify(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("verify", "run the plan and the one-device plan on the same data and compare");
  struct State {
    std::string path, data;
    PlanArguments arguments;
    int64_t steps = 5;
    SessionArguments session;
    bool json = false, skip_f64 = false;
  };
  auto state = std::make_shared<State>();
  command->add_option("MODEL", state->path, "a .whale file")->required();
  command->add_option("--data", state->data, "as for run; none: synthetic");
  command->add_option("--steps", state->steps, "steps to run")->check(CLI::PositiveNumber);
  command->add_option("--seed", state->session.seed, "of parameters, dropout and data");
  command->add_flag("--json", state->json, "as JSON");
  command->add_flag("--skip-float64", state->skip_f64, "not the reference devices, which are slow on large models");
  add_plan_options(*command, state->arguments);
  add_scale_options(*command, state->session);
  command->callback([state, &exit_code] {
    const Engine engine = make_engine();
    if (kind_of(state->path) != FileKind::kGraph)
      throw Failure("verify takes a model file (.whale): it makes both plans itself");
    const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine.get(), str(state->path));
    const PlanArguments& given = state->arguments;
    PlanArguments single = given;
    single.strategy = "local";
    single.zero = 0;
    single.state_shares.clear();
    single.recompute.clear();
    single.offload.clear();
    single.gradient_dtype.clear();
    single.adasum = false;
    single.update.clear();
    single.matmul_chunks = 0;
    const size_t kind = given.devices.find_first_of("crn");  // behind "2x" of nodes
    single.devices = given.devices.starts_with("file:")
                         ? "cpu:1"
                         : given.devices.substr(kind, given.devices.find_first_of(":@") - kind) + ":1";
    const std::string described = text(whale_graph_json, static_cast<const whale_graph*>(graph.get()));
    const std::vector<Decision> decisions = decisions_of(described);
    const auto plan_of = [&](PlanArguments arguments) {
      for (const Decision& decision : decisions) arguments.fetch.push_back(decision.scores);
      return make_plan(engine.get(), graph.get(), arguments);
    };
    const auto compared = [&](const PlanArguments& many, const PlanArguments& one, const std::vector<Batch>& batches,
                              bool float64, Comparison row) {
      row.devices = many.devices, row.against = one.devices;
      SessionArguments session = state->session;
      if (float64) session.loss_scale = 0, session.loss_scale_growth = 0;
      compare(engine.get(), {[&] { return plan_of(many); }, [&] { return plan_of(one); }}, batches, session, decisions,
              float64, row);
      return row;
    };

    std::vector<Batch> batches;
    double epsilon = 0;     // of the format that the plan computes or sums gradients in; 0: f32
    int64_t roundings = 2;  // before and after a sum of gradients
    {
      const Plan plan = plan_of(given);
      const nlohmann::json json =
          nlohmann::json::parse(text(whale_plan_json, static_cast<const whale_plan*>(plan.get())));
      const auto use = [&](const std::string& format) {
        const double e = format == "bf16" ? 0x1p-8 : format == "f16" ? 0x1p-11 : 0.0;
        epsilon = std::max(epsilon, e);
        return e > 0;
      };
      if (use(json.value("precision", std::string("f32")))) roundings += roundings_of(described);
      use(given.gradient_dtype);
      const auto data = open_data(state->data, inputs_of(plan.get(), "train"), state->session.seed);
      for (int64_t i = 0; i < state->steps; ++i) batches.push_back(data->next());
    }
    std::vector<Comparison> rows;
    if (!state->skip_f64) {
      PlanArguments many = given, one = single;
      many.devices = reference_list(engine.get(), given.devices);
      one.devices = "ref:1";
      many.precision = one.precision = "f64";
      many.gradient_dtype.clear();
      Comparison row;
      row.name = "float64", row.loss_bound = row.parameter_bound = row.margin_bound = 1e-9;
      rows.push_back(compared(many, one, batches, true, row));
    }
    {
      Comparison row;
      row.name = epsilon == 0x1p-8 ? "bfloat16" : epsilon > 0 ? "float16" : "float32";
      row.loss_bound = epsilon > 0 ? std::max(epsilon / 2, 1e-5) : 1e-5;  // losses are means over many tokens
      row.parameter_bound = epsilon > 0 ? movement_bound(epsilon, roundings) : 1e-4;
      row.margin_bound = std::max(epsilon, 1e-5);  // either of two scores is rounded by up to epsilon / 2
      rows.push_back(compared(given, single, batches, false, row));
    }
    const bool passed = std::all_of(rows.begin(), rows.end(), [](const Comparison& row) { return row.passed(); });
    if (state->json) {
      nlohmann::json out{{"passed", passed}, {"steps", state->steps}, {"comparisons", nlohmann::json::array()}};
      for (const Comparison& row : rows)
        out["comparisons"].push_back({{"precision", row.name},
                                      {"devices", row.devices},
                                      {"against", row.against},
                                      {"loss_error", row.loss_error},
                                      {"loss_bound", row.loss_bound},
                                      {"parameter_error", row.parameter_error},
                                      {"parameter_bound", row.parameter_bound},
                                      {"worst_parameter", row.worst},
                                      {"steps_compared", row.steps},
                                      {"decisions", row.decided.made},
                                      {"decisions_that_differ", row.decided.differ},
                                      {"largest_margin", row.decided.margin},
                                      {"margin_bound", row.margin_bound},
                                      {"passed", row.passed()}});
      std::printf("%s\n", out.dump(2).c_str());
    } else {
      std::printf("%ld steps, the plan against one device, on the same data\n\n", static_cast<long>(state->steps));
      std::printf("%-9s %-16s %-8s %22s %28s\n", "", "plan", "against", "losses (bound)", "parameters (bound)");
      for (const Comparison& row : rows)
        std::printf("%-9s %-16s %-8s %12.2e (%.0e) %18.2e (%.0e)  %s\n", row.name.c_str(), row.devices.c_str(),
                    row.against.c_str(), row.loss_error, row.loss_bound, row.parameter_error, row.parameter_bound,
                    row.passed() ? "equal" : "NOT EQUAL");
      for (const Comparison& row : rows)
        if (row.decided.differ) std::printf("%s", decisions_text(row).c_str());
      std::printf("\n%s\n", passed ? "The plan does not change the result."
                                   : "The plan changes the result: this is a bug in libwhale, please report it.");
    }
    exit_code = passed ? 0 : 1;
  });
}

}  // namespace tool
