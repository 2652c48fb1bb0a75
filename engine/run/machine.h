// The opened devices of a plan with what lives on them as long as the session: threads, variables, arenas, scratch.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <string_view>
#include <vector>

#include "comm/transport.h"
#include "data/host_tensor.h"
#include "device/device.h"
#include "plan/plan.h"
#include "run/team.h"
#include "run/variable_part.h"

namespace whale {

// Memory of one device. Addresses never move, so kernels are bound to them once.
class DeviceMemory {
 public:
  DeviceMemory(std::unique_ptr<Device> device, size_t variables);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  Device& device() { return *device_; }
  void add_variable(size_t index, size_t bytes, Memory memory);
  void* variable(size_t index) const { return variables_[index]; }  // null: it lives on other devices
  size_t variable_bytes(size_t index) const { return variable_bytes_[index]; }
  uint64_t* version(size_t index) { return &versions_[index]; }
  // An area of at least this size. All entries of a session share it (they never run at once); one that needs more than
  // there is gets a larger one of its own.
  void* arena(size_t bytes) { return area(arena_, bytes, Memory::kDevice); }
  void* host_arena(size_t bytes) { return area(host_arena_, bytes, Memory::kHost); }
  void* scratch(Stream stream, size_t bytes) {
    return area(scratch_[static_cast<size_t>(stream)], bytes, Memory::kDevice);
  }
  void forget_arenas();                               // Device::forget
  void* step_scalar(StepScalar scalar, DType dtype);  // f32, f64, i32, i64
  void set_step_scalar(StepScalar scalar, double value);

  size_t arena_bytes() const { return arena_.total; }
  size_t host_arena_bytes() const { return host_arena_.total; }
  size_t scratch_bytes() const { return scratch_[0].total + scratch_[1].total + scratch_[2].total; }

 private:
  struct Area {
    void* data = nullptr;
    size_t bytes = 0;
    size_t total = 0;  // smaller ones of before included
  };
  struct Block {
    void* data;
    size_t bytes;
    Memory memory;
  };
  void* allocate(size_t bytes, Memory memory);
  void* area(Area& area, size_t bytes, Memory memory);

  std::unique_ptr<Device> device_;
  std::vector<Block> blocks_;
  std::vector<void*> variables_;
  std::vector<size_t> variable_bytes_;
  std::vector<uint64_t> versions_;
  Area arena_, host_arena_;
  std::array<Area, kStreams> scratch_;
  char* scalars_ = nullptr;
};

class Machine {
 public:
  // `devices`: opened, in the order of the plan's. The plan must outlive the machine.
  Machine(const Plan& plan, std::vector<std::unique_ptr<Device>> devices);
  ~Machine();

  size_t size() const { return memory_.size(); }
  DeviceMemory& memory(size_t device) { return *memory_[device]; }
  Team& team() { return *team_; }
  Transport& transport() { return *transport_; }
  const Plan& plan() const { return plan_; }

  // The devices that hold an element of copy k of a variable; as many lists as there are copies, at least one. Each
  // part of the tensor is taken from the k-th device that holds it, from the last where fewer do: all copies together
  // name every device that holds a part.
  std::vector<std::vector<int32_t>> copies(size_t index) const;
  // A copy of a variable as a whole, from and to the caller's memory; bytes [offset, offset + bytes) of the logical
  // tensor, wherever they are. Only between runs; from several threads, when their bytes are different ones.
  void read_variable(size_t index, size_t copy, uint64_t offset, void* to, size_t bytes);
  void write_variable(size_t index, uint64_t offset, const void* from, size_t bytes);  // every copy of it
  void variable_written(size_t index);  // after the last write_variable: moves the versions

 private:
  const Plan& plan_;
  std::vector<std::vector<HeldPart>> variables_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Team> team_;  // last: its threads end first
};

}  // namespace whale
