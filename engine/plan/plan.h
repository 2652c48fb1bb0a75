// The Plan: what every device does, as a value. It is inspected, printed, simulated, saved, and run later, also on
// another machine. The runtime (device/ and below) sees only this header; it executes plans and decides nothing.
//
// A plan has entries (train, eval). An entry has one program per class of devices of the same local sizes; devices are
// rows that name their class and coordinates, and fill the program's holes with what their place alone says. A program
// has buffers with fixed offsets, segments of instructions, and a schedule: rows of (segment, micro-batch), walked in
// order once a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cluster/device_spec.h"
#include "cluster/mesh.h"
#include "cost/cost.h"
#include "ir/graph.h"
#include "ir/plan_options.h"
#include "ir/sharding.h"
#include "ops/op.h"
#include "plan/queues.h"

namespace whale {

// ---- ports: what crosses the plan's boundary ----------------------------------------------------------------------
// A run of samples [begin, end) of the global batch.
using SampleRange = Interval;

struct PlanInput {
  std::string name;
  DType dtype{};
  Dims dims;           // global
  int batch_dim = -1;  // -1: every device gets the whole tensor
  // Of the ops that take it as it is for an index: every element must be in all of them. Checked before a run.
  std::vector<IndexRange> indices = {};
};

enum class OutputMerge : uint8_t {
  kSame,    // every device holds the value: taken from the first device
  kConcat,  // each device and micro-batch holds its samples: placed by the sample ranges along batch_dim
  kSum,     // scalars or tensors summed over micro-batches inside the program, then the same everywhere
};

struct PlanOutput {
  std::string name;  // "loss", a fetched name, or "grad:NAME"
  DType dtype{};
  Dims dims;  // global
  OutputMerge merge = OutputMerge::kSame;
  int batch_dim = -1;  // kConcat
  // Which devices hand it over: those of this mesh (kConcat, of unlike replicas: of all meshes, kNone) whose
  // coordinates are 0 along every axis that does not cut it.
  int32_t mesh = 0;
  std::vector<bool> cut_by;  // per axis of the mesh
  Sharding parts;  // kConcat: cuts of other sub-axes than the samples', over the axes of that mesh; empty: none
};

// Where something is kept: in the device's own memory, or in that of the machine it is part of (`offload`).
enum class Memory : uint8_t { kDevice, kHost };

struct PlanVariable {
  std::string name;
  DType dtype{};
  Dims dims;  // global (logical)
  Role role = Role::kParameter;
  bool trainable = true;
  Initializer init;
  std::string owner;  // kState: name of its parameter
  std::string state_name;
  int32_t mesh = 0;           // whose devices hold it
  Sharding storage_sharding;  // over the axes of that mesh
  Memory memory = Memory::kDevice;
};

// ---- programs ---------------------------------------------------------------------------------------------------
using BufferId = int32_t;
using BufferIds = SmallVector<BufferId, 6>;

enum class BufferKind : uint8_t {
  kArena,     // lives in the arena at `offset`, reused by liveness
  kVariable,  // where variable `ref` is stored; outlives the step
  kInput,  // this device's samples of input `ref`, for one micro-batch (kFeed fills it) or, with whole_batch, for all
  kStep,   // scalar provided by the session; `ref`: StepScalar
};
enum class StepScalar : uint8_t { kLearningRate, kUpdates, kLossScale };

struct Buffer {
  std::string name;  // the tensor's
  BufferKind kind = BufferKind::kArena;
  DType dtype{};
  Dims dims;  // local
  int32_t ref = -1;
  int64_t offset = -1;  // kArena and kInput: bytes from the arena's start, 64-byte aligned
  int64_t bytes = 0;    // of one version
  // Values of several micro-batches that are alive at once: version k of a buffer lies k * align_up(bytes, kAlignment)
  // behind its first one. A schedule row says which one its segment works on (modulo the buffer's, where they differ).
  int32_t versions = 1;
  BufferId alias = -1;  // shares the storage of this buffer (in-place result, reshape): same offset
  // kHost: the offset is one of the program's host arena, or the variable is kept there; only kMove touches it.
  Memory memory = Memory::kDevice;
  int64_t at = 0;  // with an alias: bytes behind the start of that storage, of which this is a part
};

// Where a local tensor lies in the logical one, for ops that need it (random ops, iota, rotary, masks). The batch
// sub-axis moves with the micro-batch: its begin is added at run time from the schedule row.
struct BoxCut {
  SubAxis sub_axis;  // of the logical tensor
  int64_t extent = 0, begin = 0, size = 0;
  friend bool operator==(const BoxCut&, const BoxCut&) = default;
};
struct Box {
  Dims origin;    // per dimension, in elements of the logical tensor, the batch sub-axis's part not included
  Dims global;    // logical extents; empty: the op does not ask
  SubAxis batch;  // the sub-axis that holds samples; absent: none
  // Cuts that leave several intervals of a dimension (outer > 1), or share one with the batch; not part of `origin`.
  std::vector<BoxCut> cuts = {};
};

// Every queue has a timeline: a value for each instruction of each row of the schedule, which it signals when it is
// done with that. A wait names one, of the same row (Instruction::waits) or of the row before (RowWait).
struct Wait {
  Queue queue{};
  int32_t index = 0;  // position in Segment::instructions
  friend bool operator==(const Wait&, const Wait&) = default;
};

// How an operand of a collective is cut: the interval of each member, one behind the other. In local coordinates: what
// other axes cut is cut already.
struct SubAxisCuts {
  SubAxis sub_axis;
  std::vector<Interval> cuts;
  friend bool operator==(const SubAxisCuts&, const SubAxisCuts&) = default;
};

// What an instruction does.
namespace work {
// An op on this device.
struct Kernel {
  OpCode op{};
  Attrs attrs = {};
  Box box = {};  // of out[0] (for reductions to nothing: of in[0]), when the op is offset-aware
  uint64_t key = 0;
  int32_t samples = 0;  // which of the row's sample cuts the op's batch sub-axis follows
};
// Every member of the group runs the same one, in the same order.
struct Collective {
  OpCode op{};                         // all_reduce, all_gather, reduce_scatter, all_to_all, shift, adasum
  int32_t group = 0;                   // index into Plan::groups
  Combine combine = Combine::kSum;     // all_reduce, reduce_scatter
  std::vector<SubAxisCuts> cuts = {};  // all_gather, all_to_all: of each `in`; reduce_scatter: of each `out`
  SubAxisCuts to = {};                 // all_to_all: of `out`
  Ints weights = {};                   // adasum: samples of each member; empty: equal
};
// Host input -> out[0]: this device's samples of this micro-batch, or of the batch.
struct Feed {
  int32_t input = 0;
  int32_t samples = 0;
  bool whole_batch = false;
};
// in[0] -> host output.
struct Fetch {
  int32_t output = 0;
  int32_t samples = 0;
  bool whole_batch = false;
};
// in[0]: this device's transfers of the link, each into free capacity of its channel.
struct Send {
  int32_t link = 0;
};
// out[0]: the transfers of the link to this device; what no transfer covers is zero.
struct Receive {
  int32_t link = 0;
};
// out[i] = in[i], from one memory to the other. To the host: operands behind the results come before.
struct Copy {
  Memory to{};
};
// in[0]: the loss. Says to all devices whether it is finite; where it is not, none of them writes a variable.
struct Vote {};
// Behind all votes of all devices. What writes variables stands behind it: before it, a step can still be stopped with
// the variables as they were, after it no more.
struct Commit {};
}  // namespace work

using Work = std::variant<work::Kernel, work::Collective, work::Feed, work::Fetch, work::Send, work::Receive,
                          work::Copy, work::Vote, work::Commit>;
enum class InstructionKind : uint8_t {  // in that order
  kKernel,
  kCollective,
  kFeed,
  kFetch,
  kSend,
  kReceive,
  kCopy,
  kVote,
  kCommit
};

struct Instruction {
  Work work;
  Queue queue = Queue::kCompute;
  std::string name;  // of the op in the graph, for errors, timelines and dumps
  BufferIds in;      // kNone for an absent operand
  BufferIds out;
  Phase phase = Phase::kForward;
  ScopeId scope = 0;            // into Plan::scopes, for reports
  std::vector<Wait> waits;      // for earlier ones of the same row, besides the order of its own queue
  double flops = 0, bytes = 0;  // cost of the local shapes

  InstructionKind kind() const { return static_cast<InstructionKind>(work.index()); }
  template <class T>
  const T* as() const {
    return std::get_if<T>(&work);
  }
  template <class T>
  T* as() {
    return std::get_if<T>(&work);
  }
  const work::Kernel* kernel() const { return as<work::Kernel>(); }
  std::optional<OpCode> op() const;  // of a kernel or a collective
  bool copies_to(Memory to) const { return as<work::Copy>() != nullptr && as<work::Copy>()->to == to; }
  int32_t samples() const;        // which of the row's sample cuts it follows; 0 where it follows none
  int32_t group() const;          // of a collective; else kNone
  int32_t link() const;           // of a send or receive; else kNone
  std::string_view verb() const;  // "matmul", "all_reduce", "send", "to_host"
};

struct Segment {
  // "prologue", "body", "body/3" (a variant for micro-batches of another size), "epilogue"; in a pipeline the body is
  // "forward.2", "backward.2", "weight.2" of each virtual stage (2) that the device has.
  std::string name;
  std::vector<Instruction> instructions;
};

// What instruction `at` of a row waits for in the row before, besides its own waits. Rows are not joined: every queue
// goes from row to row by itself. Before it begins one, all queues are through with all rows but the one before; what
// it needs of that one it waits for here.
struct RowWait {
  int32_t at = 0;
  Wait on;
  friend bool operator==(const RowWait&, const RowWait&) = default;
};
using RowWaits = std::vector<RowWait>;  // ascending

struct ScheduleRow {
  int32_t segment = 0;
  int32_t micro_batch = 0;  // u
  int32_t version = 0;      // of the buffers that have several
  bool whole = false;       // prologue and epilogue: the share of the whole batch, not of one micro-batch
  int32_t waits = kNone;    // of Program::row_waits; kNone: it waits for nothing of the row before
};

// A number that follows from a device's place along the axes of its mesh and is all that its program differs by from
// those of other devices.
enum class HoleKind : uint8_t {
  kAt,         // Buffer::at of `buffer`, which has an alias
  kAttribute,  // integer `attribute` of a kernel: where an interval begins or ends (may_be_placed)
  kOrigin,     // Box::origin[index] of a kernel
  kCut,        // Box::cuts[index].begin of a kernel
};
struct Hole {
  HoleKind kind{};
  BufferId buffer = kNone;
  int32_t segment = 0, instruction = 0;  // the other kinds
  std::string attribute;
  int32_t index = 0;
  friend auto operator<=>(const Hole&, const Hole&) = default;  // NOLINT(modernize-use-nullptr)
};

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Segment> segments;
  std::vector<ScheduleRow> schedule;
  std::vector<RowWaits> row_waits;
  // In ascending order. The program itself holds the values of the first row that names it (placed.h: bound). Parts of
  // a storage that overlap, are the same or lie inside each other in one row do so in all.
  std::vector<Hole> holes;
  int64_t arena_bytes = 0;
  int64_t host_bytes = 0;       // of the arena in the host's memory
  int64_t variable_bytes = 0;   // local, for reports
  int64_t peak_live_bytes = 0;  // lower bound that the offsets are measured against
};

// The samples of a device under one way of cutting the batch (some axes of the mesh cut it, others do not).
struct SampleCut {
  SampleRange whole;                       // its share of the whole batch (what whole_batch feeds take)
  std::vector<SampleRange> micro_batches;  // global sample range per u; empty ranges are legal
  friend bool operator==(const SampleCut&, const SampleCut&) = default;
};

struct DeviceRow {
  int32_t device = 0;              // index into Plan::devices
  int32_t program = 0;             // class
  int32_t mesh = 0;                // index into Plan::meshes
  Ints coordinates;                // in the mesh
  std::vector<SampleCut> samples;  // at least one; Instruction::samples chooses
  Ints placed;                     // values of the program's holes
};

// ---- links: what moves between devices piece by piece, where no collective does it -------------------------------
// One box of a tensor, in local coordinates of both ends. `from` may be `to`.
struct Transfer {
  int32_t from = 0, to = 0;  // indices into Plan::devices
  std::vector<Interval> source, target;
};

// All transfers of one link from one device to another are one message; the (link, from, to) are its channels. A
// channel has a capacity: a send waits until the message `capacity` before it has been taken.
struct Link {
  std::string name;  // of the tensor
  int32_t capacity = 1;
  std::vector<Transfer> transfers;
};

struct Entry {
  std::string name;   // "train", "eval"
  int64_t batch = 0;  // samples of one step
  std::vector<PlanInput> inputs;
  std::vector<PlanOutput> outputs;
  std::vector<Program> programs;
  std::vector<DeviceRow> rows;  // one per device, in the order of Plan::devices
  std::vector<Link> links;

  int32_t loss() const;  // the output that is the loss of a step; kNone: there is none
};

// Of collectives: a partition of (some) devices into groups that each work among themselves, in this order.
struct Group {
  std::string axis;  // "replica"; "replica,split" where several axes take part at once
  std::vector<std::vector<int32_t>> parts;
};

using PlanMesh = Mesh;

struct Plan {
  std::string model;  // name of the graph
  uint64_t model_hash = 0;
  std::string strategy;  // as text: "replica(3, shares=[3,2,1])"
  std::vector<DeviceSpec> devices;
  std::vector<PlanMesh> meshes;
  std::vector<Group> groups;
  std::vector<Scope> scopes;
  std::vector<PlanVariable> variables;
  std::vector<Entry> entries;
  Optimizer optimizer;  // the session computes the learning rate from it
  LearningRateSchedule lr_schedule;
  int64_t micro_batches = 1;
  Precision precision = Precision::kFloat32;
  PlanOptions options;
  double memory_price = 1;            // of the cost model that it was made with
  Profile profile = kMachineOfCores;  // and what that knew of the machine
  // The forward program, from which a session plans smaller batches and evaluation when they are first asked for.
  // Weights are never inside.
  Graph source;
  std::vector<std::string> notes;  // what the planner decided and why, one sentence each
  // Ops of `source` at which stages begin that nobody has written and that time alone would cut elsewhere; empty: none.
  Ints stage_begins;

  const Entry* find_entry(std::string_view name, int64_t batch) const;  // null: none
  bool has_variable(std::string_view name) const;
  std::string scope_path(ScopeId id) const;  // "": of the root, or there is none
};

CostModel cost_of(const Plan& plan);  // that it was made with

std::string print(const Plan& plan);  // stable text, for golden tests: every instruction
std::string print(const Program& program);
std::string summary(const Plan& plan);  // fits a terminal
std::string to_json(const Plan& plan);  // for the SDKs' pictures: devices, memory, queues, instructions
void verify(const Plan& plan);  // references, offsets, liveness, order of collectives; throws PlanFault (plan/fault.h)
std::vector<uint8_t> serialize(const Plan& plan);
Plan deserialize(const uint8_t* data, size_t size);  // verified: any bytes give a Plan or an Error
// Whatever verify(plan) would say of it: for those who ask it themselves. Throws PlanFault where an op does not fit its
// operands.
Plan deserialize_unverified(const uint8_t* data, size_t size);

}  // namespace whale
