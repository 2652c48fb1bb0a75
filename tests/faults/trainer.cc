#include "trainer.h"

#include "session/initialize.h"

namespace whale::test {

const Entry& train_entry(const Plan& plan) {
  for (const Entry& e : plan.entries)
    if (e.name == "train") return e;
  return plan.entries.front();
}

Trainer::Trainer(const Plan& plan, uint64_t seed, bool check_loss) : plan_(plan), seed_(seed), check_loss_(check_loss) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const DeviceSpec& spec : plan.devices) devices.push_back(backends_.get(spec.kind).open(spec));
  machine_ = std::make_unique<Machine>(plan, std::move(devices));
  initialize_variables(*machine_, seed, 1, {});
  executor_ = std::make_unique<Executor>(*machine_, train_entry(plan));
}

std::vector<std::vector<double>> Trainer::step(const Values& inputs) {
  const Entry& entry = executor_->entry();
  std::vector<std::vector<char>> memory;
  for (size_t k = 0; k < entry.inputs.size(); ++k) {
    const PlanInput& port = entry.inputs[k];
    const std::vector<double>& values = inputs.at(port.name);
    std::vector<char>& bytes = memory.emplace_back(values.size() * static_cast<size_t>(size_of(port.dtype)));
    if (port.dtype == DType::kI32)
      for (size_t i = 0; i < values.size(); ++i)
        reinterpret_cast<int32_t*>(bytes.data())[i] = static_cast<int32_t>(values[i]);
    else
      convert(DType::kF64, values.data(), port.dtype, bytes.data(), values.size());
    executor_->inputs()[k] = bytes.data();
  }
  std::vector<std::vector<char>> handed;
  for (size_t k = 0; k < entry.outputs.size(); ++k) {
    const PlanOutput& port = entry.outputs[k];
    handed.emplace_back(static_cast<size_t>(element_count(port.dims) * size_of(port.dtype)));
    executor_->outputs()[k] = handed[k].data();
  }
  StepValues values;
  values.seed = seed_;
  values.iteration = values.updates = steps_++;
  values.learning_rate = learning_rate_at(plan_.optimizer.learning_rate, plan_.lr_schedule, values.updates);
  values.check_loss = check_loss_;
  RunState state;
  executor_->start(
      values, [](void* to, std::optional<Error>& error, bool) { static_cast<RunState*>(to)->finish(std::move(error)); },
      &state);
  state.wait(-1);
  machine_->team().wait_idle();
  if (state.error()) throw Error(*state.error());
  std::vector<std::vector<double>> out;
  for (size_t k = 0; k < entry.outputs.size(); ++k) {
    const DType dtype = entry.outputs[k].dtype;
    auto& values = out.emplace_back();
    for (size_t at = 0; at < handed[k].size(); at += static_cast<size_t>(size_of(dtype)))
      values.push_back(element(dtype, handed[k].data() + at));
  }
  return out;
}

std::vector<double> Trainer::losses() const {
  std::vector<double> out;
  for (size_t d = 0; d < machine_->size(); ++d) {
    const BoundProgram& program = *executor_->program(d);
    if (program.loss == nullptr) continue;
    char value[8] = {};
    machine_->memory(d).device().copy_out(value, program.loss, static_cast<size_t>(size_of(program.loss_dtype)));
    out.push_back(element(program.loss_dtype, value));
  }
  return out;
}

std::vector<char> Trainer::held_by(int32_t device, size_t variable) const {
  DeviceMemory& memory = machine_->memory(static_cast<size_t>(device));
  std::vector<char> out(memory.variable_bytes(variable));
  if (!out.empty()) memory.device().copy_out(out.data(), memory.variable(variable), out.size());
  return out;
}

}  // namespace whale::test
