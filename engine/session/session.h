// A Session joins a plan with real devices: memory, variables, feeding, running, checkpoints. capi/ wraps exactly this.
// In a world of several ranks each has a session of the same plan, with the devices that are here: all call the same in
// the same order, feed whole batches of which each takes its devices' samples, or what its devices read of them, and
// ask for the same outputs, which every rank gets whole. A session belongs to one thread at a time. In a child process
// after fork() every call throws failed_precondition.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/host_tensor.h"
#include "data/input_slices.h"
#include "device/device.h"
#include "plan/plan.h"
#include "run/device_bytes.h"
#include "run/handle.h"
#include "run/loaded.h"
#include "session/cores.h"
#include "session/init_files.h"
#include "world/world.h"

namespace whale {

enum class NanPolicy : uint8_t { kError = 0, kPass = 1 };

struct SessionOptions {
  uint64_t seed = 0;                         // of initializers and random ops
  NanPolicy nan_policy = NanPolicy::kError;  // kError: a non-finite loss fails the step
  int threads = 0;                           // per CPU device; 0: its share of the cores
  bool pin = true;                           // CPU devices run on cores of their own, leased from `leases`
  bool bf16 = true;                          // CPU devices use the instructions for bf16 that are there
  std::shared_ptr<CoreLeases> leases = {};   // of the engine; none: this session's own
  double loss_scale = 0;                     // f16: at first; 0: 2^16
  int64_t loss_scale_growth = 0;             // f16: steps without an overflow until it doubles; 0: 2000
  // On a thread of the session, before the run that changed it has ended. It throws nothing.
  std::function<void(double before, double now)> loss_scale_changed = {};
  std::function<void(const std::string&)> warn = {};  // likewise, on any of them; of runs that wait long
  InitFiles init_files = {};                          // that initial values may come from
  std::optional<World> world = {};                    // of several ranks; none: all devices are here
  bool plan_in_run = true;                            // false: a run of a size that has no entry is refused
  bool plan_from_file = false;  // where this engine contradicts itself, the file may be what is wrong
};

struct VariableInfo {
  std::string name;  // optimizer state: "PARAMETER/STATE"
  Role role = Role::kParameter;
  DType dtype{};
  Dims dims;
  std::vector<std::vector<int32_t>> copies;  // of each copy, the devices that it is read from
};

enum class RunMode : uint8_t { kStep, kEval };  // entries "train" and "eval"

struct EntryInfo {
  RunMode mode = RunMode::kStep;
  int64_t batch = 0;
  bool planned_here = false;  // by the session; the plan has the others
};

class Session {
 public:
  // Opens the devices, allocates, binds the kernels of the plan's entries, initializes the variables.
  Session(std::shared_ptr<const Plan> plan, std::shared_ptr<Backends> backends, const SessionOptions& options = {});
  ~Session();  // stops a run that is under way first
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Starts a run and returns; what is wrong with the arguments is thrown here, what happens later by RunHandle::wait.
  // Memory of inputs and outputs must live until the run has ended. `outputs` are written into: dtype and dims must be
  // those of output_types(). One run at a time: failed_precondition while one is under way.
  // slices_of: samples of the batch of which the inputs hold this rank's slices alone; 0: inputs are whole.
  RunHandle step(const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                 std::shared_ptr<const Cancel> cancel = nullptr, int64_t slices_of = 0);
  RunHandle eval(const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                 std::shared_ptr<const Cancel> cancel = nullptr, int64_t slices_of = 0);
  // What this rank's devices read of an input in a run of that many samples; 0: the graph's own. Plans what such a run
  // would. It lives until the next call that may plan.
  const InputSlices& input_slices(RunMode mode, int64_t batch, std::string_view input);
  // Instead of step or eval, where a caller's argument is refused before them: the other ranks, which begin the run,
  // are told why. Nothing in a session of one rank.
  void refuse_run(const Error& why);
  // A number that all ranks that give one have to give alike before their next run: another batch is another one. 0:
  // none. It holds for that run alone, also where it is refused.
  void set_same(uint64_t number);
  // Plans and binds what runs of this size need, which then plan and bind nothing. In a world each rank by itself.
  void prepare(RunMode mode, int64_t batch);
  std::vector<EntryInfo> entries() const;  // that are bound, the newest last
  int64_t planned() const;                 // how many were planned here, in runs and ahead of them
  // Types of the named outputs for a run on these inputs (data pointers are not looked at): what to allocate. As step:
  // failed_precondition while a run is under way.
  std::vector<TensorType> output_types(RunMode mode, const std::vector<NamedHost>& inputs,
                                       const std::vector<std::string>& names, int64_t slices_of = 0);
  std::vector<std::string> output_names(RunMode mode) const;

  // Variables, logical and whole, in the order of the plan. These wait for a run that is under way.
  std::vector<VariableInfo> variables() const;
  TensorType variable_type(std::string_view name) const;  // throws not_found
  // dtype and dims must fit. `copy`: which of VariableInfo::copies; the others agree with the first after every step.
  // In a world all ranks read alike, and every one gets the whole.
  void read(std::string_view name, const HostTensor& to, int64_t copy = 0);
  // What of it is on this rank's devices, at its place in the whole tensor; the rest of `to` is left as it is. The
  // number of bytes that were read, those of parts that overlap each time.
  size_t read_here(std::string_view name, const HostTensor& to, int64_t copy = 0);
  void write(std::string_view name, const HostTensor& from);

  void set_learning_rate(double learning_rate);  // fixed from now on; negative: the schedule again
  double learning_rate() const;                  // of the next step
  int64_t iteration() const;                     // steps begun and ended: keys random ops
  int64_t updates() const;                       // updates of the parameters
  double loss_scale() const;                     // of the next step; 1 unless the precision is f16
  uint64_t seed() const;

  // In a world all ranks call these alike, with a directory that they share, and fail alike.
  void save(const std::string& directory);  // whole or not at all: a failure leaves the previous checkpoint
  void load(const std::string& directory);  // verified before anything is changed

  const LoadedCheckpoint& loaded() const;  // the last one; format 0: none
  void check_idle() const;                 // throws failed_precondition while a run is under way

  void set_trace(bool enable);
  std::string timeline();           // of the last run, Chrome trace JSON; failed_precondition when tracing was off
  const Entry& last_entry() const;  // that this run was of
  // What every queue here is at and did last, as JSON (flight_record.h), also while a run is under way. From any
  // thread.
  std::string flight_record() const;
  DeviceBytes memory(size_t device) const;  // throws invalid_argument where there is no such device
  std::string report();                     // JSON: bytes by class for each device, seconds of the last run
  const Plan& plan() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace whale
