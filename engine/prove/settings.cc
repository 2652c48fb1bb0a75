#include "prove/settings.h"

#include <algorithm>

#include "prove/program.h"
#include "prove/value.h"

namespace whale::proof {
namespace {

bool same(const Initializer& a, const Initializer& b) {
  const bool data = (a.data == nullptr) == (b.data == nullptr) && (!a.data || *a.data == *b.data);
  return a.kind == b.kind && same_number(a.a, b.a) && same_number(a.b, b.b) && a.file == b.file && a.key == b.key &&
         a.data_type == b.data_type && data;
}

bool same(const Optimizer& a, const Optimizer& b) {
  return a.kind == b.kind && a.learning_rate == b.learning_rate && a.momentum == b.momentum &&
         a.nesterov == b.nesterov && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.epsilon == b.epsilon &&
         a.weight_decay == b.weight_decay && a.decay_rate == b.decay_rate && a.clip_threshold == b.clip_threshold &&
         a.sparse_updates == b.sparse_updates && a.split_master_weights == b.split_master_weights;
}
bool same(const LearningRateSchedule& a, const LearningRateSchedule& b) {
  return a.kind == b.kind && a.warmup_steps == b.warmup_steps && a.total_steps == b.total_steps &&
         a.final_fraction == b.final_fraction;
}

void check_variable(const PlanVariable& v, const Variable& of, const Graph& g) {
  const auto expect = [&](bool holds, const char* what) {
    if (!holds) refuse("{} of variable {} is not the model's", what, v.name);
  };
  expect(v.role == of.role, "the role");
  expect(v.trainable == of.trainable, "whether it is trained");
  expect(same(v.init, of.init), "the initial value");
  expect(v.owner == (of.owner == kNone ? "" : g.tensor(of.owner).name), "the parameter");
  expect(v.state_name == of.state_name, "the name as state");
}

}  // namespace

void check_settings(const Plan& plan, const Entry& entry, const Reference& reference) {
  // What a session plans steps of other sizes by.
  if (&entry == plan.entries.data() && !entry.rows.empty() && !entry.rows[0].samples.empty())
    if (const auto own = std::ssize(entry.rows[0].samples[0].micro_batches); own != plan.micro_batches)
      refuse("steps of other sizes are planned in {} micro-batches, this one has {}", plan.micro_batches, own);

  const Training& training = plan.source.training;
  if (!same(plan.optimizer, training.optimizer)) refuse("the optimizer's numbers are not the model's");
  if (!same(plan.lr_schedule, training.lr_schedule)) refuse("the schedule of the learning rate is not the model's");
  if (plan.precision != training.precision) refuse("the precision is not the model's");
  const Graph& g = reference.graph();
  for (const PlanVariable& v : plan.variables)
    for (const Variable& of : g.variables)
      if (g.tensor(of.tensor).name == v.name) check_variable(v, of, g);
  for (const Variable& of : g.variables)
    if (const std::string& name = g.tensor(of.tensor).name;
        of.next != kNone && std::ranges::count(plan.variables, name, &PlanVariable::name) == 0)
      refuse("the plan has no variable {}, which a step changes", name);
}

}  // namespace whale::proof
