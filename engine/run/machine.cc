#include "run/machine.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "base/error.h"
#include "base/no_signals.h"

namespace whale {
namespace {

constexpr size_t kScalarStride = 64;
constexpr DType kScalarTypes[] = {DType::kF32, DType::kF64, DType::kI32, DType::kI64};
constexpr size_t kScalars = 3, kParametersAt = kScalars * std::size(kScalarTypes) * kScalarStride;
static_assert(sizeof(StepParameters) <= kScalarStride);

// Where `part` begins in `held`, when it is a slice of it by the first dimension: it lies there in one run.
std::optional<uint64_t> run_of(const VariablePart& part, const VariablePart& held) {
  const auto &a = part.part().dims, &b = held.part().dims;
  if (a.empty() || part.bytes() == 0 || !std::equal(a.begin() + 1, a.end(), b.begin() + 1)) {
    return a == b ? std::optional<uint64_t>(0) : std::nullopt;
  }
  const auto [begin, end] = part.bounds();
  std::optional<uint64_t> first, last;
  held.each(begin, begin + 1, [&](uint64_t, uint64_t local, uint64_t) { first = local; });
  held.each(end - 1, end, [&](uint64_t, uint64_t local, uint64_t) { last = local; });
  return first && last && *last + 1 - *first == part.bytes() ? first : std::nullopt;
}

size_t device_of(const HeldPart& held, size_t copy) { return held.devices[std::min(copy, held.devices.size() - 1)]; }

}  // namespace

DeviceMemory::DeviceMemory(std::unique_ptr<Device> device, size_t variables)
    : device_(std::move(device)),
      variables_(variables, nullptr),
      variable_bytes_(variables, 0),
      versions_(variables, 1) {}

DeviceMemory::~DeviceMemory() { release_from(0); }

void DeviceMemory::release_from(size_t first) {
  for (size_t b = first; b < blocks_.size(); ++b)
    if (blocks_[b].memory == Memory::kHost)
      device_->release_host(blocks_[b].data, blocks_[b].bytes);
    else
      device_->release(blocks_[b].data, blocks_[b].bytes);
  blocks_.resize(first);
}

DeviceMemory::Areas DeviceMemory::areas() const { return {blocks_.size(), arena_, host_arena_, scratch_, scalars_}; }

void DeviceMemory::restore(const Areas& before) {
  release_from(before.blocks);
  arena_ = before.arena, host_arena_ = before.host_arena, scratch_ = before.scratch, scalars_ = before.scalars;
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
  if (scalars_ == nullptr) {
    set_.resize(kParametersAt + kScalarStride);
    scalars_ = static_cast<char*>(allocate(set_.size(), Memory::kDevice));
  }
  const auto at = std::find(std::begin(kScalarTypes), std::end(kScalarTypes), dtype);
  if (at == std::end(kScalarTypes)) throw internal("a step scalar has dtype {}", name_of(dtype));
  const size_t type = static_cast<size_t>(at - std::begin(kScalarTypes));
  return scalars_ + (static_cast<size_t>(scalar) * std::size(kScalarTypes) + type) * kScalarStride;
}

const StepParameters* DeviceMemory::step_parameters() {
  step_scalar(StepScalar::kLearningRate, DType::kF32);  // there is a place
  return reinterpret_cast<const StepParameters*>(scalars_ + kParametersAt);
}

void DeviceMemory::set_step(const StepValues& values) {
  step_parameters();
  const auto put = [&](StepScalar scalar, double value) {
    char* to = set_.data() + (static_cast<char*>(step_scalar(scalar, DType::kF32)) - scalars_);
    const float f32 = static_cast<float>(value);
    const int32_t i32 = static_cast<int32_t>(value);
    const int64_t i64 = static_cast<int64_t>(value);
    std::memcpy(to, &f32, sizeof f32);
    std::memcpy(to + kScalarStride, &value, sizeof value);
    std::memcpy(to + 2 * kScalarStride, &i32, sizeof i32);
    std::memcpy(to + 3 * kScalarStride, &i64, sizeof i64);
  };
  put(StepScalar::kLearningRate, values.learning_rate);
  put(StepScalar::kUpdates, values.updates);
  put(StepScalar::kLossScale, values.loss_scale);
  std::memcpy(set_.data() + kParametersAt, &values.parameters, sizeof values.parameters);
  device_->copy_in(scalars_, set_.data(), set_.size());
}

Ear::Ear(Wire& wire) : wire_(wire) {
  const NoSignals quiet;
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error& e) {
    throw error(Code::kResourceExhausted, "no thread could be made to hear the other ranks ({})", e.what());
  }
}

Ear::~Ear() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  wire_.ring();
  thread_.join();
}

void Ear::listen(Listener* listener, const std::function<void()>& then) {
  const std::lock_guard lock(mutex_);
  listener_ = listener;
  if (then) then();
}

void Ear::loop() {
  for (;;) {
    wire_.wait_for_notices();
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    try {
      for (Notice notice; listener_ != nullptr && wire_.hear(notice);) listener_->hear(notice);
    } catch (const std::bad_alloc&) {  // for a notice that stays on the wire: once more
      wire_.ring();
      std::this_thread::yield();
    }
  }
}

Error has_left(const World& world, int rank) {
  return error(Code::kUnavailable, "{} has left the meeting of the ranks", text_of_rank(world, rank)).at_rank(rank);
}

Error error_of(const Notice& notice, const World& world, const Notice* mine) noexcept {
  const bool another = notice.kind == Notice::kBegun;
  Error out(another ? Code::kFailedPrecondition : notice.code, {});
  try {
    out = another && mine != nullptr ? begins_something_else(notice, *mine, world.rank())
          : another                  ? runs_something_else(notice.rank, world.rank())
          : notice.kind == Notice::kGone
              ? error(notice.code, "{}", notice.message)
              : error(notice.code, "{}: {}", text_of_rank(world, notice.rank), notice.message);
  } catch (const std::bad_alloc&) {
  }
  const bool other = !another && notice.kind != Notice::kGone && notice.subject > 0;
  return out.at_rank(other ? static_cast<int>(notice.subject) - 1 : notice.rank);
}

AreaBytes areas_of(const Plan& plan, size_t device) {
  AreaBytes out;
  for (const Entry& entry : plan.entries) {
    const Program& program = entry.programs.at(static_cast<size_t>(entry.rows.at(device).program));
    out.device = std::max(out.device, static_cast<size_t>(program.arena_bytes));
    out.host = std::max(out.host, static_cast<size_t>(program.host_bytes));
  }
  return out;
}

Machine::Machine(const Plan& plan, std::vector<std::unique_ptr<Device>> opened, std::optional<World> world)
    : plan_(plan), world_(std::move(world)) {
  std::vector<Device*> devices;
  for (auto& device : opened) {
    devices.push_back(device.get());
    memory_.push_back(device ? std::make_unique<DeviceMemory>(std::move(device), plan.variables.size()) : nullptr);
  }
  WHALE_CHECK(!plan.entries.empty() && plan.entries[0].rows.size() == memory_.size(), "one row per device");
  for (const PlanVariable& variable : plan.variables) variables_.push_back(held_parts(plan, variable));
  transport_ = wire() == nullptr ? make_inproc(plan.groups)
                                 : make_reference(plan.groups, world_->wire, world_->ranks, plan.profile);
  if (wire() != nullptr) ear_ = std::make_unique<Ear>(*wire());
  team_ = std::make_unique<Team>(devices);
  team_->on_each("hold the variables and activations", [&](int device) {
    const size_t d = static_cast<size_t>(device);
    DeviceMemory& memory = *memory_[d];
    for (size_t v = 0; v < variables_.size(); ++v)
      for (const HeldPart& held : variables_[v])
        if (std::find(held.devices.begin(), held.devices.end(), d) != held.devices.end())
          memory.add_variable(v, held.part.bytes(), plan_.variables[v].memory);
    const AreaBytes areas = areas_of(plan_, d);
    memory.arena(areas.device);
    if (areas.host > 0) memory.host_arena(areas.host);
    memory.step_parameters();
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

std::vector<ByteRuns> Machine::parts_by_rank(size_t index, size_t copy) const {
  std::vector<ByteRuns> all(static_cast<size_t>(wire()->size()));
  const PlanVariable& variable = plan_.variables[index];
  const auto whole = static_cast<uint64_t>(element_count(variable.dims) * size_of(variable.dtype));
  for (const HeldPart& held : variables_[index]) {
    ByteRuns& bytes = all[ranks()[device_of(held, copy)]];
    held.part.each(0, whole, [&](uint64_t logical, uint64_t, uint64_t n) { bytes.push_back({logical, n}); });
  }
  for (ByteRuns& bytes : all) join(bytes);
  return all;
}

size_t Machine::read_variable(size_t index, size_t copy, uint64_t offset, void* to, size_t bytes) {
  size_t sum = 0;
  for (const HeldPart& held : variables_[index]) {
    if (!is_here(device_of(held, copy))) continue;
    DeviceMemory& memory = *memory_[device_of(held, copy)];
    const char* from = static_cast<const char*>(memory.variable(index));
    held.part.each(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
      memory.device().copy_out(static_cast<char*>(to) + (logical - offset), from + local, n);
      sum += n;
    });
  }
  return sum;
}

void Machine::read_part(size_t index, const VariablePart& part, uint64_t offset, void* to, size_t bytes) {
  uint64_t done = 0;
  for (const HeldPart& held : variables_[index]) {
    const auto device = std::ranges::find_if(held.devices, [&](size_t d) { return is_here(d); });
    if (device == held.devices.end()) continue;
    DeviceMemory& memory = *memory_[*device];
    const char* from = static_cast<const char*>(memory.variable(index));
    if (const std::optional<uint64_t> begin = run_of(part, held.part)) {
      memory.device().copy_out(to, from + *begin + offset, bytes);
      return;
    }
    part.each_local(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
      held.part.each(logical, logical + n, [&](uint64_t found, uint64_t at, uint64_t some) {
        memory.device().copy_out(static_cast<char*>(to) + (local - offset) + (found - logical), from + at, some);
        done += some;
      });
    });
  }
  WHALE_CHECK(done >= bytes, "a part is on the devices that are here");
}

void Machine::write_variable(size_t index, uint64_t offset, const void* from, size_t bytes) {
  for (const HeldPart& held : variables_[index])
    for (const size_t device : held.devices) {
      if (!is_here(device)) continue;
      char* to = static_cast<char*>(memory_[device]->variable(index));
      held.part.each(offset, offset + bytes, [&](uint64_t logical, uint64_t local, uint64_t n) {
        memory_[device]->device().copy_in(to + local, static_cast<const char*>(from) + (logical - offset), n);
      });
    }
}

void Machine::variable_written(size_t index) {
  for (const HeldPart& held : variables_[index])
    for (const size_t device : held.devices)
      if (is_here(device)) ++*memory_[device]->version(index);
}

}  // namespace whale
