#include "prove/settings.h"

#include <algorithm>
#include <map>
#include <set>

#include "ops/print.h"
#include "prove/program.h"
#include "prove/value.h"

namespace whale::proof {
namespace {

bool same(const Initializer& a, const Initializer& b) {
  const bool data = (a.data == nullptr) == (b.data == nullptr) && (!a.data || *a.data == *b.data);
  return a.kind == b.kind && same_number(a.a, b.a) && same_number(a.b, b.b) && a.file == b.file && a.key == b.key &&
         a.data_type == b.data_type && data;
}

constexpr const char* kOptimizers[] = {"none", "sgd", "adam", "adamw", "lamb", "adagrad", "adafactor"};
constexpr const char* kSchedules[] = {"constant", "linear", "cosine", "inverse_sqrt"};

// Kinds by their names: both are ranges that the reader of plans has checked.
template <class Value>
void expect(const Value& found, const Value& expected, const char* what) {
  if (found != expected) refuse("{} is {}, expected {}, as in the model", what, found, expected);
}

void check_optimizer(const Optimizer& o, const Optimizer& model) {
  const auto name = [](const Optimizer& of) { return std::string(kOptimizers[static_cast<size_t>(of.kind)]); };
  expect(name(o), name(model), "the optimizer");
  expect(o.learning_rate, model.learning_rate, "the learning rate");
  expect(o.momentum, model.momentum, "the optimizer's momentum");
  expect(o.nesterov, model.nesterov, "the optimizer's nesterov");
  expect(o.beta1, model.beta1, "the optimizer's beta1");
  expect(o.beta2, model.beta2, "the optimizer's beta2");
  expect(o.epsilon, model.epsilon, "the optimizer's epsilon");
  expect(o.weight_decay, model.weight_decay, "the optimizer's weight_decay");
  expect(o.decay_rate, model.decay_rate, "the optimizer's decay_rate");
  expect(o.clip_threshold, model.clip_threshold, "the optimizer's clip_threshold");
  expect(o.sparse_updates, model.sparse_updates, "the optimizer's sparse_updates");
  expect(o.split_master_weights, model.split_master_weights, "the optimizer's split_master_weights");
}

void check_schedule(const LearningRateSchedule& s, const LearningRateSchedule& model) {
  const auto name = [](const LearningRateSchedule& of) {
    return std::string(kSchedules[static_cast<size_t>(of.kind)]);
  };
  expect(name(s), name(model), "the schedule of the learning rate");
  expect(s.warmup_steps, model.warmup_steps, "the learning rate's warmup_steps");
  expect(s.total_steps, model.total_steps, "the learning rate's total_steps");
  expect(s.final_fraction, model.final_fraction, "the learning rate's final_fraction");
}

// All of it, where what is usually told is alike.
std::string whole_text(const Initializer& i) {
  const std::string data = i.data ? fmt::format("{} bytes", i.data->size()) : "nothing";
  return fmt::format("{} with the numbers {} and {}, file '{}', key '{}' and {} of {}", init_text(i), i.a, i.b, i.file,
                     i.key, data, name_of(i.data_type));
}

void check_initial(const PlanVariable& v, const Initializer& model) {
  if (same(v.init, model)) return;
  std::string found = init_text(v.init), expected = init_text(model);
  if (found == expected) found = whole_text(v.init), expected = whole_text(model);
  if (found != expected || !v.init.data || !model.data)
    refuse("variable {}: its initial value is {}, expected {}, as in the model", v.name, found, expected);
  const std::vector<uint8_t>&a = *v.init.data, &b = *model.data;
  const auto at = std::ranges::mismatch(a, b).in1 - a.begin();
  refuse("variable {}: byte {} of its initial value, {}, is {}, expected {}, as in the model", v.name, at,
         init_text(v.init), a[at], b[at]);
}

void check_variable(const PlanVariable& v, const Variable& of, const Graph& g) {
  constexpr std::string_view kRoles[] = {"a parameter", "optimizer state", "a buffer"};
  const auto expect = [&](const auto& found, const auto& expected, const char* what) {
    if (found == expected) return;
    const auto told = [](const auto& value) {
      const std::string text = fmt::format("{}", value);
      return text.empty() ? std::string("none") : text;
    };
    refuse("variable {}: {} is {}, expected {}, as in the model", v.name, what, told(found), told(expected));
  };
  const std::string none;
  expect(kRoles[static_cast<size_t>(v.role)], kRoles[static_cast<size_t>(of.role)], "it");
  expect(v.trainable, of.trainable, "whether it is trained");
  check_initial(v, of.init);
  expect(v.owner, of.owner == kNone ? none : g.tensor(of.owner).name, "the parameter whose state it is");
  expect(v.state_name, of.state_name, "its name as state");
}

}  // namespace

void check_settings(const Plan& plan, const Entry& entry, const Reference& reference) {
  // What a session plans steps of other sizes by.
  if (&entry == plan.entries.data() && !entry.rows.empty() && !entry.rows[0].samples.empty())
    if (const auto own = std::ssize(entry.rows[0].samples[0].micro_batches); own != plan.micro_batches)
      refuse("the plan has {} micro-batches, by which steps of other sizes are planned, its own step has {}",
             plan.micro_batches, own);

  const Training& training = plan.source.training;
  check_optimizer(plan.optimizer, training.optimizer);
  check_schedule(plan.lr_schedule, training.lr_schedule);
  const auto name = [](Precision p) { return std::string(kPrecisions[static_cast<size_t>(p)]); };
  expect(name(plan.precision), name(training.precision), "the precision");
  const Graph& g = reference.graph();
  std::map<std::string_view, const Variable*> of_model;  // in which names are told apart
  for (const Variable& v : g.variables) of_model[g.tensor(v.tensor).name] = &v;
  std::set<std::string_view> there;
  for (const PlanVariable& v : plan.variables) {
    there.insert(v.name);
    if (const auto of = of_model.find(v.name); of != of_model.end()) check_variable(v, *of->second, g);
  }
  for (const auto& [name, of] : of_model)
    if (of->next != kNone && !there.contains(name)) refuse("the plan has no variable {}, which a step changes", name);
}

}  // namespace whale::proof
