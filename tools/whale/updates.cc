#include "updates.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include <nlohmann/json.hpp>

#include "builder.h"

namespace tool {
namespace {

using Json = nlohmann::json;

constexpr int kMoved = 2;

// The fields that are 0 and mean it.
int32_t zeros_of(const whale_training_options& o) {
  return (o.learning_rate == 0 ? WHALE_ZERO_LEARNING_RATE : 0) | (o.beta1 == 0 ? WHALE_ZERO_BETA1 : 0) |
         (o.beta2 == 0 ? WHALE_ZERO_BETA2 : 0) | (o.epsilon == 0 ? WHALE_ZERO_EPSILON : 0) |
         (o.decay_rate == 0 ? WHALE_ZERO_DECAY_RATE : 0);
}

whale_training_options training_of(const Json& graph) {
  const Json& given = graph.at("training");
  whale_training_options out = WHALE_TRAINING_OPTIONS_INIT;
  const std::map<std::string, int32_t> kinds = {
      {"sgd", WHALE_OPTIMIZER_SGD},   {"adam", WHALE_OPTIMIZER_ADAM},       {"adamw", WHALE_OPTIMIZER_ADAMW},
      {"lamb", WHALE_OPTIMIZER_LAMB}, {"adagrad", WHALE_OPTIMIZER_ADAGRAD}, {"adafactor", WHALE_OPTIMIZER_ADAFACTOR}};
  out.optimizer = kinds.at(given.at("optimizer"));
  out.learning_rate = given.at("learning_rate");
  out.momentum = given.at("momentum");
  out.nesterov = given.at("nesterov").get<bool>();
  out.beta1 = given.at("beta1"), out.beta2 = given.at("beta2"), out.epsilon = given.at("epsilon");
  out.weight_decay = given.at("weight_decay");
  out.decay_rate = given.at("decay_rate"), out.clip_threshold = given.at("clip_threshold");
  out.zeros = zeros_of(out);  // they are those of the graph, not defaults
  out.clip_norm = given.at("clip_norm");
  const std::map<std::string, int32_t> schedules = {{"constant", WHALE_LR_CONSTANT},
                                                    {"linear", WHALE_LR_LINEAR},
                                                    {"cosine", WHALE_LR_COSINE},
                                                    {"inverse_sqrt", WHALE_LR_INVERSE_SQRT}};
  out.lr_schedule = schedules.at(given.at("lr_schedule"));
  out.warmup_steps = given.at("warmup_steps"), out.total_steps = given.at("total_steps");
  out.final_fraction = given.at("final_fraction");
  return out;
}

}  // namespace

Plan update_plan(whale_engine* engine, const std::string& graph_json, const std::vector<std::string>& parameters,
                 const PlanArguments& one) {
  const Json graph = Json::parse(graph_json);
  Builder b(engine, "updates");
  Value loss = b.constant(0);
  for (const Json& variable : graph.at("variables")) {
    const std::string name = variable.at("name");
    if (std::find(parameters.begin(), parameters.end(), name) == parameters.end()) continue;
    const Dims dims = graph.at("tensors").at(variable.at("tensor").get<size_t>()).at("dims");
    whale_parameter_options options = WHALE_PARAMETER_OPTIONS_INIT;
    options.decay = variable.at("decay").get<bool>() ? WHALE_DECAY_ALWAYS : WHALE_DECAY_NEVER;
    Value parameter = WHALE_NONE;
    check(whale_graph_parameter(b.graph(), str(name), WHALE_F32, dims.data(), dims.size(), &options, &parameter));
    whale_group_options group = WHALE_GROUP_OPTIONS_INIT;
    group.learning_rate_factor = variable.at("learning_rate_factor");
    if (group.learning_rate_factor == 0) group.zeros |= WHALE_ZERO_LEARNING_RATE;
    if (!variable.at("weight_decay").is_null()) {
      group.weight_decay = variable.at("weight_decay");
      if (group.weight_decay == 0) group.zeros |= WHALE_ZERO_WEIGHT_DECAY;
    }
    check(whale_graph_parameter_group(b.graph(), str(name), &group));
    const Value term = b.mul(parameter, b.input("grad:" + name, WHALE_F32, dims, -1));
    loss = b.add(loss, b.op("reduce_sum", {term}));  // whose gradient is the input
  }
  const whale_training_options training = training_of(graph);
  check(whale_graph_minimize(b.graph(), loss, &training));
  check(whale_graph_seal(b.graph()));
  return make_plan(engine, b.graph(), one);
}

Updates::Updates(whale_engine* engine, const std::function<Plan()>& plan, const Setting& setting,
                 const std::vector<Variable>& variables)
    : setting_(setting) {
  for (int i = 0; i <= kMoved; ++i)
    runs_.push_back({std::make_unique<Runner>(engine, plan(), SessionArguments{}),
                     Shake(setting.amplitude, static_cast<uint64_t>(i))});
  inputs_ = inputs_of(runs_[0].runner->plan(), "train");
  variables_ = variables_of(*runs_[0].runner);
  for (const Variable& v : variables_) {
    const auto at =
        std::find_if(variables.begin(), variables.end(), [&](const Variable& each) { return each.name == v.name; });
    if (at == variables.end()) throw Failure("the plan has no variable '" + v.name + "', which one device updates");
    of_plan_.push_back(*at), places_.push_back(static_cast<size_t>(at - variables.begin()));
  }
}

bool Updates::makes(const std::string& variable) const {
  return std::any_of(variables_.begin(), variables_.end(), [&](const Variable& v) { return v.name == variable; });
}

void Updates::update(Run& run, bool moved, const std::vector<Tensor>& start, const std::vector<Values>& gradients) {
  for (size_t k = 0; k < variables_.size(); ++k) write_wide(*run.runner, variables_[k], start[places_[k]].get());
  Batch batch;
  for (size_t k = 0; k < inputs_.size(); ++k) {
    Array& array = batch.emplace_back(Array{inputs_[k].name, inputs_[k].dtype, gradients[k].dims, {}});
    array.bytes.resize(gradients[k].data.size() * size_of(array.dtype));
    const Tensor view = own<Tensor>(whale_tensor_view, static_cast<int32_t>(array.dtype),
                                    static_cast<const int64_t*>(array.dims.data()), array.dims.size(),
                                    static_cast<void*>(array.bytes.data()));
    store(view.get(), 0, gradients[k].data.size(), gradients[k].data.data());
  }
  if (moved) run.shake.add(*run.runner, variables_);
  run.runner->step(moved ? run.shake.inputs(batch) : batch);
  if (moved) run.shake.take_off(*run.runner, variables_);
}

void Updates::compare(const Runner& plan, const std::vector<Tensor>& start, const std::vector<Values>& gradients,
                      int64_t number, Report& report) {
  for (size_t i = 0; i < runs_.size(); ++i) update(runs_[i], i > 0, start, gradients);
  std::vector<Tensor> one;
  std::map<std::string, double> largest;  // of each kind of state, per element
  for (const Variable& v : variables_) {
    one.push_back(read_value(*runs_[0].runner, v));
    double& most = largest[kind_of(v)];
    most = std::max(most, distance(one.back().get(), one.back().get()).norm / root_of_elements(one.back().get()));
  }
  for (size_t k = 0; k < variables_.size(); ++k) {
    const Variable& v = of_plan_[k];
    if (v.role == "parameter")
      report.moved = report.moved || distance(start[places_[k]].get(), one[k].get()).difference > 0;
    Figure f{v.name, number, 0, {}, 0, 0, 0, 0, 0};
    for (size_t i = 1; i < runs_.size(); ++i)
      f.envelope =
          std::max(f.envelope, distance(read_value(*runs_[i].runner, variables_[k]).get(), one[k].get()).difference);
    for (size_t copy = 0; copy < v.copies.size(); ++copy) {
      const Tensor value = read_value(plan, v, static_cast<int64_t>(copy));
      const Distance d = distance(value.get(), one[k].get());
      f.copy = static_cast<int64_t>(copy), f.devices = v.copies[copy];
      f.difference = d.difference, f.norm = d.norm;
      // A plan may store in 16 bits what is float32 here.
      f.floor = std::max(rounding_of(setting_, 1), rounding_of(whale_tensor_dtype(value.get()))) * d.norm;
      if (v.role == "state") f.floor += summed_floor(setting_, largest[kind_of(v)], root_of_elements(one[k].get()));
      f.bound = factor_of(setting_, elements(one[k].get()), kMoved) * f.envelope + f.floor;
      report.of(v).judge(f);
    }
  }
}

}  // namespace tool
