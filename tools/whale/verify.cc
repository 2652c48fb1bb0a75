// verify: does the plan change the result? The figures of semantics.md section 10 for the user's own model and plan.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "commands.h"
#include "runner.h"

namespace tool {
namespace {

struct Comparison {
  std::string name, devices, against;
  double loss_error = 0;       // largest relative difference of a step's loss
  double parameter_error = 0;  // f64: largest |difference| / max(|value|, lr steps sqrt(n)) over parameters; f32:
                               // |difference| / |movement|, whole model
  double loss_bound = 0, parameter_bound = 0;
  std::string worst;
  bool passed() const { return loss_error <= loss_bound && parameter_error <= parameter_bound; }
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

// Runs both plans on the same data from the same seed and measures how far they part.
Comparison compare(whale_engine* engine, Plan plan, Plan single, const std::vector<Batch>& batches,
                   const SessionArguments& arguments, bool float64) {
  Comparison result;
  const std::vector<InputSpec> inputs = inputs_of(plan.get(), "train");
  Runner many(engine, std::move(plan), arguments), one(engine, std::move(single), arguments);
  const std::vector<std::string> names = one.variables("parameter");
  std::vector<std::vector<double>> start;
  for (const std::string& name : names) start.push_back(one.read(name));
  double rate = 0;
  for (const Batch& each : batches) {
    const Batch batch = widen(each, inputs);
    rate = std::max(rate, whale_session_learning_rate(one.session()));
    const double a = many.step(batch), b = one.step(batch);
    const double error = std::abs(a - b) / std::max(1e-30, std::abs(b));
    if (!(error <= result.loss_error)) result.loss_error = error;
  }
  double difference = 0, movement = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::vector<double> a = many.read(names[i]), b = one.read(names[i]);
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
  return result;
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
    single.gradient_dtype.clear();
    single.adasum = false;
    single.devices = given.devices.substr(0, given.devices.find_first_of(":@")) + ":1";
    const auto plan_of = [&](const PlanArguments& arguments) {
      return make_plan(engine.get(), graph.get(), arguments);
    };

    std::vector<Batch> batches;
    double epsilon = 0;  // of the format that the plan computes or sums gradients in; 0: f32
    {
      const Plan plan = plan_of(given);
      const nlohmann::json json =
          nlohmann::json::parse(text(whale_plan_json, static_cast<const whale_plan*>(plan.get())));
      const auto use = [&](const std::string& format) {
        epsilon = std::max(epsilon, format == "bf16" ? 0x1p-8 : format == "f16" ? 0x1p-11 : 0.0);
      };
      use(json.value("precision", std::string("f32")));
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
      Comparison row = compare(engine.get(), plan_of(many), plan_of(one), batches, state->session, true);
      row.name = "float64", row.devices = many.devices, row.against = one.devices,
      row.loss_bound = row.parameter_bound = 1e-9;
      rows.push_back(row);
    }
    {
      Comparison row = compare(engine.get(), plan_of(given), plan_of(single), batches, state->session, false);
      row.name = epsilon == 0x1p-8 ? "bfloat16" : epsilon > 0 ? "float16" : "float32";
      row.devices = given.devices, row.against = single.devices;
      // With e = 2^-8 (bf16), 2^-11 (f16) each rounding is up to e / 2, and losses are sums over many tokens.
      // Parameters move by noisy steps: Adam makes whole steps of gradients that are mostly rounding, so their error
      // falls slower.
      row.loss_bound = epsilon > 0 ? std::max(epsilon / 2, 1e-5) : 1e-5;
      row.parameter_bound = epsilon > 0 ? 0.8 * std::sqrt(epsilon) : 1e-4;
      rows.push_back(row);
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
                                      {"passed", row.passed()}});
      std::printf("%s\n", out.dump(2).c_str());
    } else {
      std::printf("%ld steps, the plan against one device, on the same data\n\n", static_cast<long>(state->steps));
      std::printf("%-9s %-16s %-8s %22s %28s\n", "", "plan", "against", "losses (bound)", "parameters (bound)");
      for (const Comparison& row : rows)
        std::printf("%-9s %-16s %-8s %12.2e (%.0e) %18.2e (%.0e)  %s\n", row.name.c_str(), row.devices.c_str(),
                    row.against.c_str(), row.loss_error, row.loss_bound, row.parameter_error, row.parameter_bound,
                    row.passed() ? "equal" : "NOT EQUAL");
      std::printf("\n%s\n", passed ? "The plan does not change the result."
                                   : "The plan changes the result: this is a bug in libwhale, please report it.");
    }
    exit_code = passed ? 0 : 1;
  });
}

}  // namespace tool
