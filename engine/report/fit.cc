#include "report/fit.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/text.h"
#include "base/watch.h"
#include "cluster/devices.h"
#include "report/held.h"

namespace whale {
namespace {

constexpr size_t kWide = 110;

std::string text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string cut_off(std::string line, size_t most) {
  if (line.size() <= most) return line;
  size_t end = most - 3;
  while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) --end;  // between characters
  return line.substr(0, end) + "...";
}

// More than the device that lacked most so far: noted.
bool lacks(const Plan& plan, int32_t device, int64_t needed, Shortage& most) {
  const int64_t memory = plan.devices[device].memory_bytes;
  if (memory == 0 || needed - memory <= most.bytes) return false;
  most.bytes = needed - memory, most.device = device;
  return true;
}

bool limited(const Plan& plan) {
  return std::any_of(plan.devices.begin(), plan.devices.end(),
                     [](const DeviceSpec& device) { return device.memory_bytes > 0; });
}

// ---- what each class of devices needs ---------------------------------------------------------------------------
struct Column {
  const char* name;
  int wide;
  int64_t (*bytes)(const MemoryClasses& m);
};
constexpr Column kColumns[] = {{"parameters", 12, [](const MemoryClasses& m) { return m.parameters; }},
                               {"gradients", 11, [](const MemoryClasses& m) { return m.gradients; }},
                               {"state", 10, [](const MemoryClasses& m) { return m.state; }},
                               {"activations", 13, [](const MemoryClasses& m) { return m.activations; }},
                               {"buffers", 10, [](const MemoryClasses& m) { return m.buffers; }},
                               {"copies", 10, [](const MemoryClasses& m) { return m.copies; }}};

// Devices of which the same is said.
struct DeviceLine {
  std::vector<int32_t> devices;
  MemoryClasses needed;
  int64_t has = 0;  // 0: any amount
  int64_t lacks() const { return has > 0 ? needed.total() - has : INT64_MIN; }
};

std::vector<DeviceLine> device_lines(const Plan& plan, const Entry& entry) {
  std::vector<std::optional<MemoryClasses>> of_program(entry.programs.size());
  std::map<std::string, DeviceLine> lines;
  for (const DeviceRow& row : entry.rows) {
    std::optional<MemoryClasses>& m = of_program[row.program];
    if (!m) m = memory_of(plan, entry, static_cast<size_t>(row.program)).device;
    const DeviceSpec& device = plan.devices[row.device];
    std::string key = fmt::format("{} {} {}", name_of(device.kind), device.type, device.memory_bytes);
    for (const Column& column : kColumns) key += " " + text(column.bytes(*m));
    DeviceLine& line = lines.try_emplace(std::move(key), DeviceLine{{}, *m, device.memory_bytes}).first->second;
    line.devices.push_back(row.device);
    if (m->total() > line.needed.total()) line.needed = *m;
  }
  std::vector<DeviceLine> out;
  for (auto& [key, line] : lines) out.push_back(std::move(line));
  std::ranges::stable_sort(out, [](const DeviceLine& a, const DeviceLine& b) {
    return std::pair(-std::max<int64_t>(a.lacks(), 0), a.devices[0]) <
           std::pair(-std::max<int64_t>(b.lacks(), 0), b.devices[0]);
  });
  return out;
}

// "0-7,... (128) null-32GB".
std::string devices_name(const Plan& plan, const std::vector<int32_t>& devices, size_t most) {
  const auto name = [&](size_t runs) {
    std::string out = devices_text(devices, runs);
    constexpr std::string_view kTogether = " together)";
    if (out.ends_with(kTogether)) out.replace(out.size() - kTogether.size(), kTogether.size(), ")");
    return out + " " + to_string(plan.devices[devices[0]]);
  };
  std::string out = name(2);
  if (out.size() > most) out = name(1);
  return cut_off(std::move(out), most);
}

std::string device_table(const Plan& plan, const Entry& entry) {
  constexpr size_t kLines = 5, kName = 32;
  const std::vector<DeviceLine> lines = device_lines(plan, entry);
  std::vector<const Column*> columns;  // buffers and copies only where there are some
  for (const Column& column : kColumns)
    if (columns.size() < 4 ||
        std::ranges::any_of(lines, [&](const DeviceLine& l) { return column.bytes(l.needed) > 0; }))
      columns.push_back(&column);
  std::string out = fmt::format("  {:<{}}", "devices", kName);
  for (const Column* column : columns) out += fmt::format("{:>{}}", column->name, column->wide);
  out += fmt::format("{:>10}{:>9}{:>10}\n", "needed", "there", "lacks");
  for (size_t k = 0; k < lines.size() && k < kLines; ++k) {
    const DeviceLine& line = lines[k];
    out += fmt::format("  {:<{}}", devices_name(plan, line.devices, kName), kName);
    for (const Column* column : columns) out += fmt::format("{:>{}}", text(column->bytes(line.needed)), column->wide);
    out += fmt::format("{:>10}{:>9}{:>10}\n", text(line.needed.total()), line.has > 0 ? text(line.has) : "any",
                       line.lacks() > 0 ? text(line.lacks()) : "-");
  }
  if (lines.size() > kLines) {
    size_t more = 0, lacking = 0;
    for (size_t k = kLines; k < lines.size(); ++k)
      more += lines[k].devices.size(), lacking += lines[k].lacks() > 0 ? lines[k].devices.size() : 0;
    out += fmt::format("  and {} more devices, {}\n", more,
                       lacking == 0 ? "which lack nothing" : fmt::format("of which {} lack less", lacking));
  }
  return out;
}

// ---- the tensors that matter most -------------------------------------------------------------------------------
std::string tensor_lines(const Plan& plan, const Entry& entry, int32_t device) {
  constexpr size_t kLines = 5;
  constexpr double kSmall = 0.01;  // of all that is held: not worth a line
  const HeldTensors held = held_tensors(plan, entry, device);
  double all = 0;
  for (const Held& h : held.list) all += static_cast<double>(h.bytes);
  std::string out = cut_off(fmt::format("Of {} on device {} at its fullest{}:", bytes_text(all), device,
                                        held.when.empty() ? "" : ", " + held.when),
                            kWide) +
                    "\n";
  for (size_t k = 0; k < held.list.size() && k < kLines; ++k) {
    const Held& h = held.list[k];
    if (k > 0 && static_cast<double>(h.bytes) < kSmall * all) break;
    std::string line = fmt::format("  {:>9} {:<12} ", text(h.bytes), h.kind);
    if (h.count > 1) line += fmt::format("{} x ", h.count);
    line += fmt::format("{} {} {}", cut_off(h.name, 50), name_of(h.dtype), to_string(h.dims));
    if (!h.state.empty()) line += fmt::format(" ({})", brief(h.state, 20));
    if (h.versions > 1) line += fmt::format(" x {} micro-batches", h.versions);
    if (!h.made_by.empty()) line += fmt::format(", by {}", h.made_by);
    out += cut_off(line, kWide) + "\n";
  }
  return out;
}

// ---- what makes it fit ------------------------------------------------------------------------------------------
std::string remedy_line(const Remedy& r) {
  std::string figures = text(r.bytes);
  if (r.missing > 0) figures += fmt::format(", lacks {}", text(r.missing));
  if (r.seconds > 0) figures += fmt::format(", {} a step", seconds_text(r.seconds));
  // What is to be pasted stays whole.
  constexpr size_t kFlags = 64;
  return r.flags.size() <= kFlags ? fmt::format("  {:<{}}  {}\n", r.flags, kFlags, figures)
                                  : fmt::format("  {}\n  {:{}}  {}\n", r.flags, "", kFlags, figures);
}

std::string lines_without_fit(const Remedies& r) {
  std::string out;
  if (r.likely) {
    out += "By its estimate this fits; there was no time to plan it:\n" + remedy_line(*r.likely);
  } else {
    out += fmt::format("No change of recompute, ZeRO, offload and micro-batches{} makes it fit.{}\n",
                       r.out_of_time ? " that was looked at" : "", r.nearest ? " Least memory:" : "");
    if (r.nearest) out += remedy_line(*r.nearest);
  }
  if (r.automatic) {
    out += "As strategy auto finds it:\n" + remedy_line(*r.automatic);
  } else if (r.others > 0) {
    out += fmt::format("None of {} other strategies that auto looked at fits{}\n", r.others,
                       r.nearest_other ? "; the nearest:" : ".");
    if (r.nearest_other) out += remedy_line(*r.nearest_other);
  }
  return out;
}

std::string remedy_lines(const Shortage& s, const Remedies& r) {
  std::string out;
  const std::string now =
      r.seconds > 0 ? fmt::format(" (this plan would take {} a step)", seconds_text(r.seconds)) : "";
  if (!r.fit.empty()) {
    out += fmt::format("What makes it fit, fastest first{}:\n", now);
    for (const Remedy& each : r.fit) out += remedy_line(each);
  } else {
    out += lines_without_fit(r);
  }
  if (r.batch > 0)
    out +=
        fmt::format("As it is, {} of {} samples fits.\n", s.batch > 0 ? "a batch" : "the model with a batch", r.batch);
  if (s.batch > 0) out += "Batches of the plan's own size fit.\n";
  if (r.fit.empty() && !r.automatic)
    out +=
        "What else makes it less: fewer samples, a smaller model, more or larger devices, a strategy over more of "
        "them.\n";
  return out;
}

}  // namespace

Shortage shortage_of(const Plan& plan, const Entry& entry) {
  Shortage most;
  if (!limited(plan)) return most;
  most.entry = entry.name;
  std::vector<std::optional<int64_t>> needed(entry.programs.size());
  int32_t program = 0;  // of the device that lacks most
  for (const DeviceRow& row : entry.rows) {
    const int64_t arena = entry.programs[row.program].arena_bytes;
    std::optional<int64_t>& mine = needed[row.program];
    if (!mine) mine = variables_of_device(plan, row.device).total() + arena;
    if (lacks(plan, row.device, *mine, most)) program = row.program;
  }
  if (most.bytes > 0) most.needed = memory_of(plan, entry, static_cast<size_t>(program)).device;
  return most;
}

Shortage shortage_of(const Plan& plan) {
  Shortage most;
  if (!limited(plan)) return most;
  for (int32_t d = 0; plan.entries.empty() && d < std::ssize(plan.devices); ++d)
    if (const MemoryClasses needed = variables_of_device(plan, d); lacks(plan, d, needed.total(), most))
      most.needed = needed;
  for (const Entry& entry : plan.entries)
    if (const Shortage mine = shortage_of(plan, entry); mine.bytes > most.bytes) most = mine;
  return most;
}

Error does_not_fit(const Plan& plan, const Entry& entry, const Shortage& s, const Remedies& remedies) {
  const Watch::None in_any_case;
  constexpr size_t kStrategy = 90;
  const DeviceSpec& device = plan.devices[s.device];
  // Fewer samples may be cut into unlike micro-batches, and take more.
  const std::string other = s.batch > 0 ? fmt::format(" fits, but a batch of {} samples in its place", s.batch) : "";
  std::string why = remedy_lines(s, remedies);
  while (why.ends_with('\n')) why.pop_back();
  return error(Code::kResourceExhausted,
               "the plan{} does not fit: device {} ({}) would need {}, {} more than it has\n"
               "of '{}', entry '{}':\n{}{}{}",
               other, s.device, to_string(device), text(s.needed.total()), text(s.bytes),
               brief(plan.strategy, kStrategy), s.entry, device_table(plan, entry), tensor_lines(plan, entry, s.device),
               why);
}

}  // namespace whale
