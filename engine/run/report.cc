#include "run/report.h"

#include <algorithm>

#include "base/json.h"

namespace whale {

DeviceBytes device_bytes(Machine& machine, const Executor* last, size_t device) {
  DeviceBytes out;
  if (!machine.is_here(device)) return out;
  const Plan& plan = machine.plan();
  const DeviceMemory& memory = machine.memory(device);
  out.host = memory.host_arena_bytes();
  for (size_t v = 0; v < plan.variables.size(); ++v) {
    const PlanVariable& variable = plan.variables[v];
    size_t& to = variable.memory == Memory::kHost    ? out.host
                 : variable.role == Role::kParameter ? out.parameters
                 : variable.role == Role::kState     ? out.state
                                                     : out.buffers;
    to += memory.variable_bytes(v);
  }
  // Gradients and inputs lie in the arena too, and share places with activations that are dead by then.
  const size_t arena = memory.arena_bytes();
  out.gradients = last == nullptr ? 0 : std::min(arena, last->program(device)->gradient_bytes);
  out.inputs = last == nullptr ? 0 : std::min(arena - out.gradients, last->program(device)->input_bytes);
  out.activations = arena - out.gradients - out.inputs;
  out.workspace = memory.scratch_bytes();
  return out;
}

std::string report_json(Machine& machine, const Executor* last, std::optional<double> loss_scale,
                        const LoadedCheckpoint* loaded) {
  const Plan& plan = machine.plan();
  Json devices = Json::array();
  for (size_t d = 0; d < machine.size(); ++d) {
    if (!machine.is_here(d)) continue;
    const DeviceBytes bytes = device_bytes(machine, last, d);
    Json device = {{"device", fmt::format("{}", name_of(plan.devices[d].kind))},
                   {"bytes",
                    {{"parameters", bytes.parameters},
                     {"gradients", bytes.gradients},
                     {"state", bytes.state},
                     {"activations", bytes.activations},
                     {"inputs", bytes.inputs},
                     {"buffers", bytes.buffers},
                     {"workspace", bytes.workspace},
                     {"host", bytes.host},
                     {"total", bytes.total()}}}};
    if (last != nullptr) {
      device["bytes"]["arena_peak_live"] = last->program(d)->program->peak_live_bytes;
      QueueTimes sum;
      for (const QueueTimeline& queue : last->timeline()[d]) {
        sum.ops += queue.times.ops;
        sum.collectives += queue.times.collectives;
        sum.copies += queue.times.copies;
        sum.waiting += queue.times.waiting;
        sum.cpu += queue.times.cpu;
        sum.cpu_inside += queue.times.cpu_inside;
      }
      device["seconds"] = {{"ops", static_cast<double>(sum.ops) * 1e-9},
                           {"collectives", static_cast<double>(sum.collectives) * 1e-9},
                           {"copies", static_cast<double>(sum.copies) * 1e-9},
                           {"waiting", static_cast<double>(sum.waiting) * 1e-9},
                           {"cpu", static_cast<double>(sum.cpu) * 1e-9},
                           {"cpu_inside", static_cast<double>(sum.cpu_inside) * 1e-9}};
    }
    devices.push_back(std::move(device));
  }
  Json report = {{"model", plan.model}, {"strategy", plan.strategy}, {"threads", machine.team().threads()}};
  if (machine.wire() != nullptr) report["message_bytes"] = machine.wire()->held();
  if (last != nullptr) report["entry"] = last->entry().name;
  if (loss_scale) report["loss_scale"] = *loss_scale;
  if (loaded != nullptr)
    report["loaded"] = {{"directory", loaded->directory}, {"id", loaded->id},     {"format", loaded->format},
                        {"checksums", loaded->checksums}, {"seed", loaded->seed}, {"left_out", loaded->left_out}};
  if (loaded != nullptr) report["loaded"]["optimizer"] = loaded->optimizer.empty() ? Json() : Json(loaded->optimizer);
  report["devices"] = std::move(devices);
  return report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace whale
