#include "compile/rooms.h"

#include <algorithm>
#include <cmath>

namespace whale {
namespace {

bool are_limited(const std::vector<DeviceSpec>& devices) {
  return std::ranges::any_of(devices, [](const DeviceSpec& d) { return d.memory_bytes > 0; });
}

// More than what all devices have does not come to fit by being moved; 1f1b may hold less where more is late.
bool is_hopeless(const std::vector<DeviceSpec>& devices, const std::vector<MemoryClasses>& held) {
  constexpr double kMost = 1.5;
  double needed = 0, there = 0;
  for (size_t d = 0; d < devices.size(); ++d) {
    if (devices[d].memory_bytes == 0) return false;
    needed += static_cast<double>(held[d].total()), there += static_cast<double>(devices[d].memory_bytes);
  }
  return needed > kMost * there;
}

double each(double bytes, double of) { return of > 0 ? bytes / of : 0; }

}  // namespace

Rooms::Rooms(const std::vector<DeviceSpec>& devices)
    : devices_(devices), parameters_(devices.size()), values_(devices.size()) {}

bool Rooms::see(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held) {
  if (!are_limited(devices_) || !tasks.replicas.empty() || (tasks.stage_begins.empty() && !are_unlike(devices_)) ||
      is_hopeless(devices_, held))
    return false;
  const bool again = std::ranges::any_of(
      seen_, [&](const Seen& s) { return s.begins == tasks.stage_begins && s.meshes == tasks.meshes; });
  if (again && (last_alone_ || tasks.stage_begins.empty())) return false;
  last_alone_ = again;
  seen_.push_back({tasks.stage_begins, tasks.meshes});
  see_shares(tasks, held);
  last_ = rooms_of_stages(tasks, held);
  all_.resize(last_.size());
  for (size_t s = 0; s < last_.size(); ++s)
    for (const StageRoom& room : last_[s])
      if (std::ranges::find(all_[s], room) == all_[s].end()) all_[s].push_back(room);
  return true;
}

void Rooms::put_into(CompileOptions& options) const {
  options.rooms = rooms_;
  options.stages.rooms = last_alone_ ? last_ : all_;
}

void Rooms::see_shares(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held) {
  const std::vector<double> parts = parts_of_work(tasks.meshes, devices_.size());
  const std::vector<double> splits = parts_of_work(tasks.meshes, devices_.size(), true);
  const std::vector<StageBytes> stages = stage_bytes_of_devices(tasks, devices_.size());
  const auto through = [](Point& before, double part, double bytes) {
    constexpr double kApart = 1e-6;
    double whole = part > 0 ? bytes / part : 0;
    if (before.part >= 0 && std::abs(part - before.part) > kApart)
      whole = std::clamp((bytes - before.bytes) / (part - before.part), 0.0, whole);
    before = {part, bytes};
    return Room::Line{std::max(0.0, bytes - whole * part), whole};
  };
  rooms_.resize(devices_.size());
  for (size_t d = 0; d < devices_.size(); ++d) {
    const auto kept = static_cast<double>(held[d].total() - held[d].activations);
    const auto values = static_cast<double>(held[d].activations);
    rooms_[d] = {through(parameters_[d], splits[d], each(kept, stages[d].parameters)),
                 through(values_[d], parts[d], each(values, stages[d].values))};
  }
}

StageRooms Rooms::rooms_of_stages(const TaskGraphs& tasks, const std::vector<MemoryClasses>& held) const {
  StageRooms out(tasks.stage_bytes.size());
  const std::vector<StageBytes> stages = stage_bytes_of_devices(tasks, devices_.size());
  for (size_t s = 0; s < out.size(); ++s)
    for (const int32_t id : tasks.mesh(static_cast<int32_t>(s)).devices) {
      if (id < 0 || devices_[id].memory_bytes == 0) continue;
      const auto d = static_cast<size_t>(id);
      StageRoom room{
          .bytes = 1,
          .of_parameters = each(static_cast<double>(held[d].total() - held[d].activations), stages[d].parameters),
          .of_values = each(static_cast<double>(held[d].activations), stages[d].values)};
      // Of several stages each takes the part of the memory that it takes now.
      const double all = room.full(stages[d]);
      const double part = all > 0 ? room.full(tasks.stage_bytes[s]) / all : 1;
      room.bytes = std::max(1.0, static_cast<double>(devices_[d].memory_bytes) * part);
      if (std::ranges::find(out[s], room) == out[s].end()) out[s].push_back(room);
    }
  return out;
}

std::vector<MemoryClasses> held_by_devices(const Estimate& estimate, size_t devices) {
  std::vector<MemoryClasses> out(devices);
  for (const Estimate::Class& c : estimate.classes)
    for (const int32_t d : c.devices) out[d] = c.memory.device;
  return out;
}

std::vector<MemoryClasses> held_by_devices(const Plan& plan, const Entry& entry) {
  std::vector<MemoryClasses> of_program, out(plan.devices.size());
  for (size_t p = 0; p < entry.programs.size(); ++p) of_program.push_back(memory_of(plan, entry, p).device);
  for (const DeviceRow& row : entry.rows) out[row.device] = of_program[row.program];
  return out;
}

}  // namespace whale
