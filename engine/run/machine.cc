#include "run/machine.h"

#include <algorithm>

#include "base/error.h"

namespace whale {
namespace {

constexpr size_t kScalarStride = 64;
constexpr DType kScalarTypes[] = {DType::kF32, DType::kF64, DType::kI32, DType::kI64};
constexpr size_t kScalars = 3;

size_t device_of(const HeldPart& held, size_t copy) { return held.devices[std::min(copy, held.devices.size() - 1)]; }

}  // namespace

DeviceMemory::DeviceMemory(std::unique_ptr<Device> device, size_t variables)
    : device_(std::move(device)),
      variables_(variables, nullptr),
      variable_bytes_(variables, 0),
      versions_(variables, 1) {}

DeviceMemory::~DeviceMemory() {
  for (const Block& block : blocks_)
    if (block.memory == Memory::kHost)
      device_->release_host(block.data, block.bytes);
    else
      device_->release(block.data, block.bytes);
}

void* DeviceMemory::allocate(size_t bytes, Memory memory) {
  blocks_.reserve(blocks_.size() + 1);
  void* data = memory == Memory::kHost ? device_->allocate_host(bytes) : device_->allocate(bytes);
  blocks_.push_back({data, bytes, memory});
  return data;
}

void DeviceMemory::add_variable(size_t index, size_t bytes, Memory memory) {
  variables_[index] = allocate(std::max<size_t>(bytes, 1), memory);
  variable_bytes_[index] = bytes;
}

void* DeviceMemory::area(Area& area, size_t bytes, Memory memory) {
  if (area.data == nullptr || bytes > area.bytes) {
    const size_t size = std::max<size_t>(bytes, 64);
    area = {allocate(size, memory), size, area.total + size};
  }
  return area.data;
}

void DeviceMemory::forget_arenas() {
  for (const Area* area : {&arena_, &host_arena_})
    if (area->data != nullptr) device_->forget(area->data, area->bytes);
}

void* DeviceMemory::step_scalar(StepScalar scalar, DType dtype) {
  if (scalars_ == nullptr)
    scalars_ = static_cast<char*>(allocate(kScalars * std::size(kScalarTypes) * kScalarStride, Memory::kDevice));
  const auto at = std::find(std::begin(kScalarTypes), std::end(kScalarTypes), dtype);
  if (at == std::end(kScalarTypes)) throw internal("a step scalar has dtype {}", name_of(dtype));
  const size_t type = static_cast<size_t>(at - std::begin(kScalarTypes));
  return scalars_ + (static_cast<size_t>(scalar) * std::size(kScalarTypes) + type) * kScalarStride;
}

void DeviceMemory::set_step_scalar(StepScalar scalar, double value) {
  const float f32 = static_cast<float>(value);
  const int32_t i32 = static_cast<int32_t>(value);
  const int64_t i64 = static_cast<int64_t>(value);
  device_->copy_in(step_scalar(scalar, DType::kF32), &f32, sizeof f32);
  device_->copy_in(step_scalar(scalar, DType::kF64), &value, sizeof value);
  device_->copy_in(step_scalar(scalar, DType::kI32), &i32, sizeof i32);
  device_->copy_in(step_scalar(scalar, DType::kI64), &i64, sizeof i64);
}

Machine::Machine(const Plan& plan, std::vector<std::unique_ptr<Device>> opened) : plan_(plan) {
  std::vector<Device*> devices;
  for (auto& device : opened) {
    devices.push_back(device.get());
    memory_.push_back(std::make_unique<DeviceMemory>(std::move(device), plan.variables.size()));
  }
  WHALE_CHECK(!plan.entries.empty() && plan.entries[0].rows.size() == memory_.size(), "one row per device");
  for (const PlanVariable& variable : plan.variables) variables_.push_back(held_parts(plan, variable));
  transport_ = make_inproc(plan.groups);
  team_ = std::make_unique<Team>(devices);
  size_t arena = 0, host = 0;
  for (const Entry& entry : plan.entries)
    for (const Program& program : entry.programs) {
      arena = std::max(arena, static_cast<size_t>(program.arena_bytes));
      host = std::max(host, static_cast<size_t>(program.host_bytes));
    }
  team_->on_each("hold the variables and activations", [&](int device) {
    const size_t d = static_cast<size_t>(device);
    DeviceMemory& memory = *memory_[d];
    for (size_t v = 0; v < variables_.size(); ++v)
      for (const HeldPart& held : variables_[v])
        if (std::find(held.devices.begin(), held.devices.end(), d) != held.devices.end())
          memory.add_variable(v, held.part.bytes(), plan_.variables[v].memory);
    memory.arena(arena);
    if (host > 0) memory.host_arena(host);
    memory.step_scalar(StepScalar::kLearningRate, DType::kF32);
  });
}

Machine::~Machine() = default;

std::vector<std::vector<int32_t>> Machine::copies(size_t index) const {
  size_t count = 1;
  for (const HeldPart& held : variables_[index])
    if (held.part.bytes() > 0) count = std::max(count, held.devices.size());
  std::vector<std::vector<int32_t>> list(count);
  for (size_t copy = 0; copy < count; ++copy) {
    for (const HeldPart& held : variables_[index])
      if (held.part.bytes() > 0) list[copy].push_back(static_cast<int32_t>(device_of(held, copy)));
    std::sort(list[copy].begin(), list[copy].end());
  }
  return list;
}

void Machine::read_variable(size_t index, size_t copy, uint64_t offset, void* to, size_t bytes) {
  for (const HeldPart& held : variables_[index]) {
    DeviceMemory& memory = *memory_[device_of(held, copy)];
    const char* from = static_cast<const char*>(memory.variable(index));
    held.part.each(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
      memory.device().copy_out(static_cast<char*>(to) + (logical - offset), from + local, n);
    });
  }
}

void Machine::write_variable(size_t index, uint64_t offset, const void* from, size_t bytes) {
  for (const HeldPart& held : variables_[index])
    for (const size_t device : held.devices) {
      char* to = static_cast<char*>(memory_[device]->variable(index));
      held.part.each(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
        memory_[device]->device().copy_in(to + local, static_cast<const char*>(from) + (logical - offset), n);
      });
    }
}

void Machine::variable_written(size_t index) {
  for (const HeldPart& held : variables_[index])
    for (const size_t device : held.devices) ++*memory_[device]->version(index);
}

}  // namespace whale
