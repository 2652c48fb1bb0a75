// A Plan on one screen.
#include <cmath>
#include <optional>
#include <utility>

#include "base/format.h"
#include "cluster/devices.h"
#include "plan/figures.h"

namespace whale {
namespace {

constexpr size_t kMostRows = 16;

std::string bar(double share) {
  constexpr int kWidth = 20;
  const long full = std::lround(share * kWidth);
  std::string text;
  for (long i = 0; i < kWidth; ++i) text += i < full ? '#' : '.';
  return text;
}

// Two lines, for a terminal's width. `of`: what the device has; 0: not said.
std::string memory_text(const std::string& whose, const MemoryClasses& m, int64_t of = 0) {
  const auto bytes = [](int64_t b) { return bytes_text(static_cast<double>(b)); };
  std::string text = fmt::format("{}: {}{}\n  parameters {}, gradients {}, optimizer state {}, activations {}", whose,
                                 bytes(m.total()), of ? " of " + bytes(of) : "", bytes(m.parameters),
                                 bytes(m.gradients), bytes(m.state), bytes(m.activations));
  if (m.buffers) text += ", statistics " + bytes(m.buffers);
  if (m.copies) text += ", copies of offloaded variables " + bytes(m.copies);
  return text + "\n";
}

struct Fullest {
  int32_t device = 0, program = 0;
  bool alone = false;  // another device holds less, or has more memory
};

// By the share of the memory that a device is said to have; of devices that do not say, by bytes.
Fullest fullest_of(const Plan& plan, const Entry& e) {
  Fullest out;
  std::vector<std::optional<int64_t>> needed(e.programs.size());
  std::optional<std::pair<double, int64_t>> most;
  for (const DeviceRow& row : e.rows) {
    const auto program = static_cast<size_t>(row.program);
    if (!needed[program])
      needed[program] = variables_of_device(plan, row.device).total() + e.programs[program].arena_bytes;
    const int64_t memory = plan.devices[row.device].memory_bytes;
    const std::pair full(memory ? static_cast<double>(*needed[program]) / static_cast<double>(memory) : 0,
                         *needed[program]);
    out.alone |= most && full != *most;
    if (!most || full > *most) most = full, out.device = row.device, out.program = row.program;
  }
  return out;
}

void summarise_memory(std::string& text, const Plan& plan, const Entry& e) {
  const Fullest fullest = fullest_of(plan, e);
  const MemoryFigures m = memory_of(plan, e, static_cast<size_t>(fullest.program));
  text += memory_text(
      fullest.alone ? fmt::format("memory of the fullest device, {}", fullest.device) : "memory of one device",
      m.device, plan.devices[fullest.device].memory_bytes);
  if (plan.options.offload) text += memory_text("offloaded to its host", m.host);
}

void summarise_entry(std::string& text, const Plan& plan, const Entry& e) {
  text += fmt::format("\n{}: batch {}{}\n", e.name, e.batch,
                      plan.micro_batches > 1 ? fmt::format(" in {} micro-batches", plan.micro_batches) : "");
  text += fmt::format("  {:<12} {:>8}  {:<20}  {:>9}  {:>9}  {:>6}  {:>11}\n", "device", "samples", "share", "arena",
                      "FLOPs", "ops", "collectives");
  const auto figures = [&](size_t r) {
    const DeviceRow& row = e.rows[r];
    const Program& p = e.programs[row.program];
    const StepFigures f = step_of(p);
    const int64_t samples = samples_of(e, row);
    return fmt::format("{:>8}  {:<20}  {:>9}  {:>9}  {:>6}  {:>11}\n", samples,
                       bar(e.batch ? static_cast<double>(samples) / static_cast<double>(e.batch) : 1),
                       bytes_text(static_cast<double>(p.arena_bytes)), count_text(f.flops), f.kernels, f.collectives);
  };
  // Of many devices, neighbours that do the same share a line.
  const bool many = e.rows.size() > kMostRows;
  size_t next = 0;
  for (size_t lines = 0; next < e.rows.size() && lines < kMostRows; ++lines) {
    const size_t r = next++;
    const std::string line = figures(r);
    while (many && next < e.rows.size() && plan.devices[r].kind == plan.devices[next].kind && figures(next) == line)
      ++next;
    const std::string name = next > r + 1 ? fmt::format("{}-{} {}", r, next - 1, name_of(plan.devices[r].kind))
                                          : fmt::format("{} {}", r, to_string(plan.devices[r]));
    text += fmt::format("  {:<12} {}", name.substr(0, 12), line);
  }
  if (next < e.rows.size()) text += fmt::format("  ... and {} more device(s)\n", e.rows.size() - next);
}

}  // namespace

std::string summary(const Plan& plan) {
  std::string text = fmt::format("plan of {}: {} on {} device(s) ({})\n", plan.model, plan.strategy,
                                 plan.devices.size(), to_string(plan.devices));
  if (plan.meshes.size() > 1) {
    for (size_t m = 0; m < plan.meshes.size(); ++m)
      text += fmt::format("stage {}: [{}] of devices {}\n", m, axes_text(plan.meshes[m].axes),
                          devices_text(plan.meshes[m].devices, 4));
  } else if (!plan.meshes.empty() && plan.meshes[0].axes.size() > 1) {
    text += fmt::format("mesh [{}]\n", axes_text(plan.meshes[0].axes));
  }
  if (!plan.entries.empty() && !plan.entries[0].programs.empty()) {
    if (!plan.entries[0].rows.empty()) summarise_memory(text, plan, plan.entries[0]);
    const StepFigures f = step_of(plan.entries[0].programs[0]);
    if (f.collectives)
      text += fmt::format("communication of one step: {} collective(s) of {} together, {} beside the computation\n",
                          f.collectives, bytes_text(f.communicated), f.on_the_side);
    if (f.messages) text += fmt::format("messages of one step to other devices: {}\n", f.messages);
  }
  for (const Entry& e : plan.entries) summarise_entry(text, plan, e);
  if (!plan.notes.empty()) text += "\n";
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace whale
