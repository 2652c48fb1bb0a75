// What the handles of whale.h hold: shared pointers to things that do not change, so that the order in which a caller
// releases them does not matter.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "async_work.h"
#include "cluster/devices.h"
#include "data/host_tensor.h"
#include "device/device.h"
#include "engine_limits.h"
#include "ir/graph.h"
#include "log.h"
#include "plan/plan.h"
#include "run/handle.h"
#include "session/session.h"
#include "whale/whale.h"
#include "world/world.h"

struct whale_engine {
  std::shared_ptr<whale::Backends> backends;
  std::shared_ptr<whale::CoreLeases> leases;
  whale::capi::Limits limits;
  std::shared_ptr<whale::capi::Log> log;
};

struct whale_graph {
  std::shared_ptr<whale::Graph> graph;  // not written to once sealed
  bool sealed = false;
  whale::InitFiles init_files;                 // of a graph that was loaded: bounded
  std::vector<whale::ScopeId> scope_stack{0};  // the open scopes, innermost last
  std::unordered_map<std::string, int> names;  // of ops and tensors: unique in the graph; with the last suffix tried
};

struct whale_cluster {
  std::vector<whale::DeviceSpec> devices;
};

struct whale_tensor {
  whale::HostTensor host;
  std::shared_ptr<void> storage;  // owner of host.data; empty for a view of the caller's memory
  bool read_only = false;         // from a DLPack tensor that says so
  int32_t dl_device = 1;          // DLPack's type of the memory: the host's, or pinned
};

struct whale_cancel {
  std::shared_ptr<whale::Cancel> cancel;
};

struct whale_plan {
  std::shared_ptr<const whale::Plan> plan;
  whale::InitFiles init_files;  // of the graph, or of the file that the plan was loaded from
  bool from_file = false;       // or from bytes
  // Whoever made the plan may stop what is planned again for a report.
  std::shared_ptr<const whale::Cancel> cancel;
  double timeout_seconds = 0;
};

struct whale_world {
  explicit whale_world(std::shared_ptr<whale::Worlds> of, int64_t made_by = 0)
      : worlds(std::move(of)), process(made_by) {}
  std::shared_ptr<whale::Worlds> worlds;
  int64_t process;  // whose threads it has; 0: it has none
};

struct whale_event {
  whale::RunHandle run;
  std::vector<std::shared_ptr<void>> keep;  // storage of the run's inputs and outputs
  int64_t process = 0;
  std::shared_ptr<whale::capi::AsyncWork> work;  // instead of a run of devices: planning, saving, loading
  std::shared_ptr<whale_plan> plan;              // that planning makes; whole once it has ended well
};

// An input or an output, of whichever of the two entries have it.
struct whale_session_port {
  std::string name;
  whale::DType dtype{};
  whale::Dims dims;
  int32_t batch_dim = -1;
  bool in_step = false, in_eval = false;
};

struct whale_session {
  std::unique_ptr<whale::Session> session;
  int64_t process = 0;  // that made it: after fork() the child has no engine threads
  // As long as the session, and never changed.
  std::vector<whale_session_port> inputs, outputs;
  std::vector<whale::VariableInfo> variables;
  std::shared_ptr<whale::capi::Log> log;
  std::shared_ptr<whale::capi::AsyncWork> work;  // the last save or load beside the caller; may have ended
};

namespace whale::capi {

// A name that nothing in the graph has yet: `name`, or `name_2`, `name_3`, ...
std::string unique_name(whale_graph& graph, const std::string& name);

// file.cc: whole files. Writing goes to a temporary name beside the file, synced and renamed: a failure leaves what was
// there.
std::vector<uint8_t> read_file(const std::string& path, int64_t most = INT32_MAX, const char* what = "file");
void write_file(const std::string& path, const std::vector<uint8_t>& bytes);
// The files of initial values are called as from the folder of `path`.
void write_to(const std::string& path, const Graph& graph, const InitFiles& from);
void write_to(const std::string& path, const Plan& plan, const InitFiles& from);

// One device of a list as whale.h has it.
whale_device describe_device(const std::vector<DeviceSpec>& devices, size_t index);

// A tensor with its own zeroed memory, 64-byte aligned.
std::unique_ptr<whale_tensor> make_tensor(DType dtype, Dims dims);
// dtype and dims that came through the ABI: valid, in bounds.
DType checked_dtype(int32_t dtype);
// None: the default.
std::optional<Precision> checked_precision(int32_t precision, const char* what);
Dims checked_dims(DType dtype, const int64_t* dims, size_t rank);

}  // namespace whale::capi
