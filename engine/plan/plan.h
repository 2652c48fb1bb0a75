// The Plan: what every device does, as a value. It is inspected, printed, simulated, saved, and run later, also on
// another machine. The runtime (device/ and below) sees only this header; it executes plans and decides nothing.
//
// A plan has entries (train, eval). An entry has one program per class of like devices; devices are rows that name
// their class and coordinates. A program has buffers with fixed offsets, segments of instructions, and a schedule: rows
// of (segment, micro-batch), walked in order once a step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/device_spec.h"
#include "ir/graph.h"
#include "ir/layout.h"
#include "ops/op.h"

namespace whale {

// ---- ports: what crosses the plan's boundary ----------------------------------------------------------------------
// A run of samples [begin, end) of the global batch.
using SampleRange = Interval;

struct PlanInput {
  std::string name;
  DType dtype{};
  Dims dims;           // global
  int batch_dim = -1;  // -1: every device gets the whole tensor
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
};

struct PlanVariable {
  std::string name;
  DType dtype{};
  Dims dims;  // global (logical)
  Role role = Role::kParameter;
  bool trainable = true;
  Initializer init;
  std::string owner;  // kState: name of its parameter
  std::string slot;
  Layout home;  // over the plan's mesh; replicate for now on every replica axis
};

// ---- programs ---------------------------------------------------------------------------------------------------
using BufferId = int32_t;

enum class BufferKind : uint8_t {
  kArena,     // lives in the arena at `offset`, reused by liveness
  kVariable,  // home of variable `ref`; outlives the step
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
  int64_t bytes = 0;
  BufferId alias = -1;  // shares the storage of this buffer (in-place result, reshape): same offset
};

// Where a local tensor lies in the logical one, for ops that need it (random ops, iota, rotary, masks). The batch digit
// moves with the micro-batch: its begin is added at run time from the schedule row.
struct Box {
  Dims origin;  // per dimension, in elements of the logical tensor, the batch digit's part not included
  Dims global;  // logical extents; empty: the op does not ask
  Digit batch;  // the digit that holds samples; absent: none
};

enum class Stream : uint8_t { kCompute = 0, kCommunication = 1, kCopy = 2 };
inline constexpr int kStreams = 3;

// "Instruction `index` of stream `stream`, in this segment run, is done". Waits always name an earlier instruction of
// the same segment; segment runs are separated by a join of all streams.
struct WaitPoint {
  Stream stream{};
  int32_t index = 0;  // position in Segment::instructions
  friend bool operator==(const WaitPoint&, const WaitPoint&) = default;
};

enum class InstructionKind : uint8_t {
  kKernel,      // an op on this device
  kCollective,  // an op with a group: every member of the group runs the same one, in the same order
  kFeed,   // host input `ref` -> out[0]: this device's samples of this micro-batch (or of the batch, when whole_batch)
  kFetch,  // in[0] -> host output `ref`
};

struct Instruction {
  InstructionKind kind = InstructionKind::kKernel;
  Stream stream = Stream::kCompute;
  OpCode op{};
  std::string name;  // of the op in the graph, for errors, timelines and dumps
  Attrs attrs;
  std::vector<BufferId> in;  // kNone for an absent operand
  std::vector<BufferId> out;
  Box box;  // of out[0] (for reductions to nothing: of in[0]), when the op is offset-aware
  uint64_t key = 0;
  int32_t ref = -1;          // kFeed: input; kFetch: output; kCollective: group
  bool whole_batch = false;  // kFeed, kFetch
  Phase phase = Phase::kForward;
  ScopeId scope = 0;             // into Plan::scopes, for reports
  std::vector<WaitPoint> waits;  // besides the order of its own stream
  double flops = 0, bytes = 0;   // cost of the local shapes
};

struct Segment {
  std::string name;  // "prologue", "body", "body/3" (a variant for micro-batches of another size), "epilogue"
  std::vector<Instruction> instructions;
};

struct ScheduleRow {
  int32_t segment = 0;
  int32_t micro_batch = 0;  // u
};

struct Program {
  std::vector<Buffer> buffers;
  std::vector<Segment> segments;
  std::vector<ScheduleRow> schedule;
  int64_t arena_bytes = 0;
  int64_t variable_bytes = 0;   // local, for reports
  int64_t peak_live_bytes = 0;  // lower bound that the offsets are measured against
};

struct DeviceRow {
  int32_t device = 0;                // index into Plan::devices
  int32_t program = 0;               // class
  std::vector<int64_t> coordinates;  // in the mesh
  SampleRange samples;               // its share of the whole batch (what whole_batch feeds take); rows are disjoint
  std::vector<SampleRange> micro_batches;  // global sample range per u; empty ranges are legal
};

struct Entry {
  std::string name;   // "train", "eval"
  int64_t batch = 0;  // samples of one step
  std::vector<PlanInput> inputs;
  std::vector<PlanOutput> outputs;
  std::vector<Program> programs;
  std::vector<DeviceRow> rows;  // one per device, in the order of Plan::devices
};

struct Group {       // of a collective
  std::string axis;  // "replica"
  std::vector<int32_t> devices;
};

struct MeshAxis {
  std::string name;
  int64_t size = 1;
  std::vector<double> shares;
};

struct Plan {
  std::string model;  // name of the graph
  uint64_t model_hash = 0;
  std::string strategy;  // as text: "replica(3, shares=[3,2,1])"
  std::vector<DeviceSpec> devices;
  std::vector<MeshAxis> mesh;
  std::vector<Group> groups;
  std::vector<Scope> scopes;
  std::vector<PlanVariable> variables;
  std::vector<Entry> entries;
  Optimizer optimizer;  // the session computes the learning rate from it
  LearningRateSchedule schedule;
  int64_t micro_batches = 1;
  Precision precision = Precision::kFloat32;
  // The forward program, from which a session plans smaller batches and evaluation when they are first asked for.
  // Weights are never inside.
  Graph source;
  std::vector<std::string> notes;  // what the planner decided and why, one sentence each

  const Entry* find_entry(std::string_view name, int64_t batch) const;  // null: none
  bool has_variable(std::string_view name) const;
};

std::string print(const Plan& plan);    // stable text, for golden tests: every instruction
std::string summary(const Plan& plan);  // fits a terminal
std::string to_json(const Plan& plan);  // for the SDKs' pictures: devices, memory, streams, instructions
void verify(const Plan& plan);          // references, offsets, liveness, order of collectives; throws
std::vector<uint8_t> serialize(const Plan& plan);
Plan deserialize(const uint8_t* data, size_t size);  // verified: any bytes give a Plan or an Error

}  // namespace whale
