// The opened devices of a plan that are here, with what lives on them as long as the session: threads, variables,
// arenas, scratch. In a world of several ranks the others' devices are null.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/transport.h"
#include "data/host_tensor.h"
#include "data/variable_part.h"
#include "device/device.h"
#include "plan/plan.h"
#include "run/sharing.h"
#include "run/team.h"
#include "world/world.h"

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
  void* scratch(Queue queue, size_t bytes) {
    return area(scratch_[static_cast<size_t>(queue)], bytes, Memory::kDevice);
  }
  // How large the area is that the next entry finds.
  size_t largest_area(Memory memory) const { return (memory == Memory::kHost ? host_arena_ : arena_).bytes; }
  // Areas as they are; and back to them, when no kernel is bound to what has come since.
  struct Areas;
  Areas areas() const;
  void restore(const Areas& before);
  void forget_arenas();                               // Device::forget
  void* step_scalar(StepScalar scalar, DType dtype);  // f32, f64, i32, i64
  const StepParameters* step_parameters();
  struct StepValues {
    StepParameters parameters;
    double learning_rate = 0, updates = 0, loss_scale = 1;
  };
  void set_step(const StepValues& values);  // in one copy

  size_t arena_bytes() const { return arena_.total; }
  size_t host_arena_bytes() const { return host_arena_.total; }
  size_t scratch_bytes() const {
    size_t bytes = 0;
    for (const Area& area : scratch_) bytes += area.total;
    return bytes;
  }

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
  void release_from(size_t first);  // blocks
  void* area(Area& area, size_t bytes, Memory memory);

  std::unique_ptr<Device> device_;
  std::vector<Block> blocks_;
  std::vector<void*> variables_;
  std::vector<size_t> variable_bytes_;
  std::vector<uint64_t> versions_;
  Area arena_, host_arena_;
  std::array<Area, kQueues> scratch_;
  char* scalars_ = nullptr;  // of all dtypes, then the parameters
  std::vector<char> set_;    // on the way there
};

struct DeviceMemory::Areas {
  size_t blocks = 0;
  Area arena, host_arena;
  std::array<Area, kQueues> scratch;
  char* scalars = nullptr;
};

// Hears what other ranks tell of the run that is under way.
class Ear {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void hear(const Notice& notice) noexcept = 0;  // it is heard once
  };
  explicit Ear(Wire& wire);
  ~Ear();
  // From here on `listener` hears, null: nobody. `then` is done before it hears anything.
  void listen(Listener* listener, const std::function<void()>& then = {});

 private:
  void loop();
  Wire& wire_;
  std::mutex mutex_;  // while it is heard
  Listener* listener_ = nullptr;
  bool closed_ = false;
  std::thread thread_;
};

// What is wrong when another rank tells that: it is not ready for what this one runs. Without memory for a text it has
// none. mine: what this rank has told when it began, null: nobody looks at more than what is run.
Error error_of(const Notice& notice, const World& world, const Notice* mine = nullptr) noexcept;
// A run that another one, which has left the world, takes no part in.
Error has_left(const World& world, int rank);

// Of a device's areas: those of its largest entry serve the others.
struct AreaBytes {
  size_t device = 0, host = 0;
};
AreaBytes areas_of(const Plan& plan, size_t device);

class Machine {
 public:
  // `devices`: opened, in the order of the plan's; null: another rank's. The plan must outlive the machine. `world`: of
  // several ranks, with that of each device.
  Machine(const Plan& plan, std::vector<std::unique_ptr<Device>> devices, std::optional<World> world = {});
  ~Machine();

  size_t size() const { return memory_.size(); }  // devices of the plan
  bool is_here(size_t device) const { return memory_[device] != nullptr; }
  DeviceMemory& memory(size_t device) { return *memory_[device]; }
  Wire* wire() const { return world_ ? world_->wire.get() : nullptr; }  // null: one rank
  Ear* ear() { return ear_.get(); }                                     // likewise
  const std::vector<int32_t>& ranks() const { return world_->ranks; }   // of the devices, where there are several
  const World* world() const { return world_ ? &*world_ : nullptr; }    // null: one rank
  std::function<void(const std::string&)> warn = {};  // of runs that wait long; from any thread; it throws nothing
  Team& team() { return *team_; }
  Transport& transport() { return *transport_; }
  const Plan& plan() const { return plan_; }

  // The devices that hold an element of copy k of a variable; as many lists as there are copies, at least one. Each
  // part of the tensor is taken from the k-th device that holds it, from the last where fewer do: all copies together
  // name every device that holds a part.
  std::vector<std::vector<int32_t>> copies(size_t index) const;
  std::vector<ByteRuns> parts_by_rank(size_t index, size_t copy) const;  // of that copy, where there are several ranks
  // A copy of a variable as a whole, from and to the caller's memory; bytes [offset, offset + bytes) of the logical
  // tensor, wherever they are; what is another rank's is left as it is. Only between runs; from several threads, when
  // their bytes are different ones. The number of bytes read.
  size_t read_variable(size_t index, size_t copy, uint64_t offset, void* to, size_t bytes);
  // Bytes [offset, offset + bytes) of a part of the variable, all of which is on devices that are here.
  void read_part(size_t index, const VariablePart& part, uint64_t offset, void* to, size_t bytes);
  void write_variable(size_t index, uint64_t offset, const void* from, size_t bytes);  // every copy of it
  void variable_written(size_t index);  // after the last write_variable: moves the versions

 private:
  const Plan& plan_;
  std::optional<World> world_;
  std::vector<std::vector<HeldPart>> variables_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Ear> ear_;
  std::unique_ptr<Team> team_;  // last: its threads end first
};

}  // namespace whale
