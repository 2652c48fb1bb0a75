// The Graph: an ordinary local program as data. Tensors in SSA form, ops in an order in which they can run, a tree of
// scopes (the annotations), variables (what outlives a step), and the training configuration. The same type holds
// the program at every level up to the Plan: after grad/ it also contains the backward ops and the update ops.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ir/attrs.h"
#include "ir/dtype.h"
#include "ir/shape.h"

namespace whale {

using TensorId = int32_t;  // index into Graph::tensors; kNone for an absent optional operand
using OpId = int32_t;      // index into Graph::ops
using ScopeId = int32_t;   // index into Graph::scopes; 0 is the root
using TensorIds = SmallVector<TensorId, 6>;
inline constexpr int32_t kNone = -1;

// Stable op numbers, from ops/ops.def.
enum class OpCode : uint16_t;

// ---- tensors and ops --------------------------------------------------------------------------------------------
enum class TensorKind : uint8_t {
  kValue,     // made by an op
  kInput,     // fed each step; dimension 0 is the batch unless batch_dim says otherwise
  kVariable,  // outlives the step: parameter, optimizer state, running statistic
  kStep,      // a scalar the session provides each step: "learning_rate", "updates", "loss_scale"
};

struct Tensor {
  std::string name;
  DType dtype = DType::kF32;
  Dims dims;
  TensorKind kind = TensorKind::kValue;
  OpId producer = kNone;  // kValue only
  int output = 0;         // which output of the producer
  int batch_dim = -1;     // kInput only: which dimension is the batch; -1: none (the same for every sample)
};

// Where in the step an op runs (semantics.md section 2).
enum class Region : uint8_t { kPrologue, kBody, kEpilogue };
// What part of the local program it came from; printing, coloring and cost reports use it.
enum class Phase : uint8_t { kForward, kBackward, kUpdate };

struct Op {
  OpCode code{};
  std::string name;
  TensorIds inputs;  // kNone for an absent optional operand
  TensorIds outputs;
  Attrs attrs;
  ScopeId scope = 0;
  uint64_t key = 0;  // random ops: the op id of the counter-based generator; fixed when the graph is sealed
  Phase phase = Phase::kForward;
  Region region = Region::kBody;
  OpId origin = kNone;   // backward, update: the forward op that it comes from
  int32_t stage = 0;     // of a pipeline, in the order of the model; assigned by task/
  std::string location;  // "model.py:12", from the SDK; may be empty
};

// ---- scopes: the annotation tree of semantics.md section 3 ------------------------------------------------------
enum class ScopeKind : uint8_t { kRoot, kReplica, kSplit, kStage, kPipeline, kCluster, kName };

inline constexpr double kNoDevice = -1;  // in the place of a share: nobody is there

struct Scope {
  ScopeKind kind = ScopeKind::kRoot;
  ScopeId parent = kNone;
  std::string name;            // kName: a prefix of names, no placement ("block.3"); others: may be empty
  int64_t count = 0;           // replica count, split ways, stage devices, pipeline stages; 0: inferred
  std::vector<double> shares;  // replica, split: by hand, else empty
  std::string by;              // replica: "sample" (default) or "micro_batch"
  std::string factor;          // split: the named factor; empty: chosen
  int64_t micro_batches = 0;   // pipeline; 0: as the training configuration says
  std::string schedule;        // pipeline: a name of schedule/schedules.def
  int64_t virtual_stages = 0;  // pipeline: per device
  std::string device_order;    // cluster, replica: "all", "row", "column", "average(n)", "[[0,1],[2]]"
  std::string devices;         // cluster: device list text
  std::string nests;           // replica: "[pipeline(3),split(2)]", what each of unlike replicas has inside; else empty
};

// ---- variables --------------------------------------------------------------------------------------------------
enum class InitKind : uint8_t { kZeros, kOnes, kConstant, kNormal, kUniform, kTruncatedNormal, kFile, kData };

// Random initializers draw from Philox keyed by (seed, variable name, element): the plan never changes them.
struct Initializer {
  InitKind kind = InitKind::kZeros;
  double a = 0;                   // constant: value; normal, truncated normal: mean; uniform: low
  double b = 1;                   // normal, truncated normal (cut at 2 sigma): standard deviation; uniform: high
  std::string file;               // kFile: safetensors file
  std::string key;                // kFile: the tensor's name there
  DType data_type = DType::kF32;  // kData: of the values, as they were given
  std::shared_ptr<const std::vector<uint8_t>> data = {};  // kData: the values, whole; never changed
};

enum class Role : uint8_t {
  kParameter,  // trained when trainable
  kState,      // optimizer state of `owner`, in `state_name`
  kBuffer,     // running statistics: written by forward ops, not trained
};

struct Variable {
  TensorId tensor = kNone;
  Role role = Role::kParameter;
  bool trainable = true;
  bool decay = true;  // weight decay applies (by default: rank >= 2)
  Initializer init;
  TensorId owner = kNone;     // kState: the parameter
  std::string state_name;     // kState: "momentum", "m", "v", ...
  TensorId next = kNone;      // the tensor that becomes its value at the end of the step; kNone: unchanged
  std::vector<int> of_owner;  // kState of another shape: the owner's dimension that each of its dimensions is
  // Of its parameter group: a factor of the learning rate, and the weight decay instead of the optimizer's.
  double learning_rate = 1;
  std::optional<double> weight_decay = {};
};

// ---- training configuration -------------------------------------------------------------------------------------
enum class OptimizerKind : uint8_t { kNone, kSgd, kAdam, kAdamW, kLamb, kAdagrad, kAdafactor };

struct Optimizer {
  OptimizerKind kind = OptimizerKind::kNone;
  double learning_rate = 1e-3;
  double momentum = 0;                                // sgd
  bool nesterov = false;                              // sgd
  double beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8;  // adam family; adafactor: epsilon = its first epsilon
  double weight_decay = 0;
  double decay_rate = -0.8;     // adafactor: exponent of the running average
  double clip_threshold = 1.0;  // adafactor: of the update's RMS
  bool sparse_updates =
      false;  // sgd, adam, adamw, adagrad: of a table, only the rows that were looked up are decayed and updated
  bool split_master_weights =
      false;  // sgd in bf16: a weight's fp32 bits in two halves, bf16 in the model and u16 as state "low"
};

enum class LrScheduleKind : uint8_t { kConstant, kLinear, kCosine, kInverseSqrt };

// Learning rate as a function of `updates`: linear warm-up from 0 over warmup_steps, then the kind's decay until
// total_steps, down to final_fraction of the peak.
struct LearningRateSchedule {
  LrScheduleKind kind = LrScheduleKind::kConstant;
  int64_t warmup_steps = 0;
  int64_t total_steps = 0;
  double final_fraction = 0;
};
double learning_rate_at(double peak, const LearningRateSchedule& schedule, int64_t updates);

enum class Precision : uint8_t { kFloat32, kBFloat16, kFloat64, kFloat16 };  // f64: ref devices only (verification)
inline constexpr const char* kPrecisions[] = {"f32", "bf16", "f64", "f16"};  // by it
constexpr bool is_half(Precision p) { return p == Precision::kBFloat16 || p == Precision::kFloat16; }

struct Training {
  TensorId loss = kNone;  // scalar; kNone: a graph for prediction only
  Optimizer optimizer;
  LearningRateSchedule lr_schedule;
  double clip_norm = 0;      // global norm; 0: no clipping
  int64_t accumulation = 1;  // micro-batches per step without a pipeline
  Precision precision = Precision::kFloat32;
};

struct NamedTensor {
  std::string name;
  TensorId tensor = kNone;
};

// ---- the graph --------------------------------------------------------------------------------------------------
struct Graph {
  std::string name;
  std::vector<Tensor> tensors;
  std::vector<Op> ops;  // in execution order: every operand is made before it is used
  std::vector<Scope> scopes{Scope{}};
  std::vector<Variable> variables;
  std::vector<TensorId> inputs;        // kInput tensors, in the order of declaration
  std::vector<NamedTensor> outputs;    // what can be fetched by name; the loss is always fetched as "loss"
  std::vector<NamedTensor> gradients;  // after grad/: parameter name -> its gradient (logical, before clipping)
  Training training;
  std::string default_strategy;  // for unannotated ops: "replica" when empty; a nest as text

  const Tensor& tensor(TensorId id) const { return tensors[id]; }
  Tensor& tensor(TensorId id) { return tensors[id]; }
  const Op& op(OpId id) const { return ops[id]; }
  Op& op(OpId id) { return ops[id]; }
  std::string scope_path(ScopeId id) const;  // "replica/block.3", "" for the root
};

// How many times each tensor is read, by ops, outputs, variables' next and the loss.
std::vector<int> use_counts(const Graph& graph);

// ops/print.cc, where names and defaults are known: stable text of a graph (golden tests compare it), one op a line.
std::string print(const Graph& graph);

// ir/verify.cc: ids in range, single producer, operands before uses, names unique, scopes a tree, variables and
// training sane. Throws the first violation, with the op and scope. Attributes and types are checked by verify_ops of
// ops/op.h.
void verify(const Graph& graph);

}  // namespace whale
