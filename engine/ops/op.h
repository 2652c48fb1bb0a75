// What an op declares, once (semantics.md section 5). ops.def lists stable numbers and names; an OpDef literal in the
// family's file says everything else. No pass switches on op names: they ask the OpDef.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "ir/graph.h"
#include "ir/sharding.h"

namespace whale {

enum class OpCode : uint16_t {
#define WHALE_OP(number, name) k_##name = number,
#include "ops/ops.def"
#undef WHALE_OP
};

// ---- signature --------------------------------------------------------------------------------------------------
enum class AttrType : uint8_t { kInt, kFloat, kBool, kString, kInts, kFloats };

// What an attribute repeats of the program around the op; passes that change that write the attribute anew.
enum class AttrRole : uint8_t {
  kOwn,       // nothing
  kShape,     // the dims of result 0: on a device, those of its part
  kEnds,      // per dimension of operand 0, where what is read ends: on a device, not beyond its part
  kTraining,  // holds in training only: the forward pass alone has 0
};

struct AttrSpec {
  const char* name;
  AttrType type;
  Attr fallback;  // the default; ignored when required
  bool required = false;
  const char* doc = "";
  AttrRole role = AttrRole::kOwn;
};

enum class PortKind : uint8_t { kOne, kOptional, kVariadic };  // a variadic port is the last one

struct PortSpec {
  const char* name;
  PortKind kind = PortKind::kOne;
  const char* doc = "";
};

// The type and shape of one operand.
struct TensorType {
  DType dtype = DType::kF32;
  Dims dims;
  friend bool operator==(const TensorType&, const TensorType&) = default;
};

// What the rules of an op see: its attributes (defaults filled in) and the types of its operands. An absent optional
// operand has dtype kF32, dims empty and present[i] == false.
struct OpView {
  OpCode code{};
  const Attrs* attrs = nullptr;
  std::vector<TensorType> inputs;
  std::vector<bool> present;
  std::vector<TensorType> outputs;  // empty while inferring
};

// ---- factors: how it can be cut ---------------------------------------------------------------------------------
enum class FactorKind : uint8_t {
  kMap,     // output carries it: cut inputs give cut outputs
  kReduce,  // only inputs carry it: cut inputs give partial outputs, combined by `combine`
  kWindow,  // map or reduce in which operands are read with a halo (convolution, pooling)
  kScan,    // needs a prefix (cumsum)
  kLookup,  // cut of a table's rows: partial(sum) outputs, offset-aware
  kStream,  // not cut, but operands may come piece by piece: results of two pieces are merged (rewrite/stream.h)
  kFixed,   // may not be cut
};

// Operands that have a row (of dimension 0) per group of `rows` positions of a factor: the statistics of groups of
// samples. Along time they are cut with the factor, and a micro-batch holds whole groups; along devices they do not
// carry it: inputs are whole, outputs partial, and a group may be cut.
struct GroupRows {
  int64_t rows = 0;  // 0: there are none
  std::vector<int> inputs, outputs;
};

struct Factor {
  std::string name;  // "b", "m", "k", "heads", ...
  FactorKind kind = FactorKind::kMap;
  int64_t extent = 0;
  std::vector<SubAxis> inputs;   // per input; absent sub-axis: that input does not carry the factor
  std::vector<SubAxis> outputs;  // per output; for kReduce all outputs that become partial are listed in `partial`
  Combine combine = Combine::kSum;
  // Per output: becomes partial(combine) when this factor is cut (kReduce, kLookup); other outputs of the op may carry
  // the factor (layer_norm_grad: dx is cut, dgamma is partial).
  std::vector<bool> partial = {};
  int64_t unit = 1;  // cuts fall on multiples of it
  // Attributes that hold the extent of this factor, and where a device's interval of it begins (0 in the logical
  // program): lowering writes the local values.
  std::vector<const char*> size_attrs = {};
  const char* begin_attr = nullptr;
  // Per output that is partial: another combine than `combine`.
  std::vector<std::pair<int, Combine>> combines = {};
  // kWindow: the operands in `through` are cut to what a device reads for its share of the factor; their sub-axes are
  // the whole dimension that is read. Lowering writes entry `window_dim` of the attributes padding, spatial and
  // output_padding.
  WindowRead window = {};
  std::vector<bool> through = {};
  size_t window_dim = 0, window_rank = 0;
  GroupRows group = {};
  // kStream. An op over one piece has the factor's extent in `piece_attr` (0: the operands are whole) and its results
  // in the accumulate dtype. Results that do not carry the factor are merged by `merge`, which takes those of two
  // rounds and has the attribute out_dtype; without it they are added, as are results that carry it.
  const char* piece_attr = nullptr;
  OpCode merge{};
  bool reads_through(size_t input) const { return input < through.size() && through[input]; }
  Combine combine_of(size_t output) const {
    for (const auto& [o, c] : combines)
      if (static_cast<size_t>(o) == output) return c;
    return combine;
  }
};

struct Factors {
  std::vector<Factor> list;
  // Sets of operands through which a partial(sum) value passes: an entry {0} says the op is linear in operand 0 alone;
  // {0, 1} (add) says it is linear when both are partial. Outputs are then all partial. Empty: never.
  std::vector<std::vector<int>> linear;
};

// Builds factors from text in einsum form: "b m k, k n -> b m n". A name on both sides is a map, only on the left a
// reduce(sum). Names of length > 1 are separated by blanks; "." marks a dimension that may not be cut; "_" a missing
// optional operand. Dimensions of extent 1 that broadcast are skipped by themselves.
Factors parse_factors(std::string_view text, const OpView& view);

// ---- gradient ---------------------------------------------------------------------------------------------------
// Emits ops into the graph being differentiated. `grads[i]` is the gradient of output i, or kNone when that output does
// not influence the loss. The rule fills `results[i]` for each input it has a gradient for (kNone: no gradient).
class GradBuilder;  // grad/ implements; see ops/grad_builder.h
using GradientRule = void (*)(GradBuilder& builder);

// ---- indices ----------------------------------------------------------------------------------------------------
// What an element of an index may be: 0 to limit - 1, or `ignored`.
struct IndexRange {
  int64_t limit = 0;
  std::optional<int64_t> ignored;
  bool permits(int64_t index) const { return (index >= 0 && index < limit) || index == ignored; }
  friend bool operator==(const IndexRange&, const IndexRange&) = default;
};
// "0 to 49", "0 to 9 or -100".
std::string to_string(const IndexRange& range);

// The operand of an op that names positions of another one. An element out of range is an error: before the run where
// it comes from an input as it is, else of the step (grad/indices.cc says which). Kernels never look beyond what is
// there. Gradients and updates take the same indices as the op that they come from: theirs are not checked again.
struct IndexOperand {
  int input = -1;                       // -1: the op has none
  Dims (*of)(const OpView&) = nullptr;  // of the logical op: the dims whose positions, in row-major order, it names
  const char* ignored = nullptr;        // the attribute with a value that is permitted too
  bool or_none = false;                 // -1 is permitted too: no position
};
// An output whose elements name such positions, or are -1. An operand with `or_none` takes it unchecked, for the same
// dims; other dims are an error of the program.
struct IndexResult {
  int output = -1;  // -1: the op has none
  Dims (*of)(const OpView&) = nullptr;
};
// Attribute of all ops with an index: the limit that each run of the op checks; 0: none, its inputs were checked. Given
// when the graph is planned.
inline constexpr const char* kIndexLimit = "index_limit";

// ---- cost -------------------------------------------------------------------------------------------------------
struct OpCost {
  double flops = 0;
  double bytes = 0;  // read plus written, from local shapes
};

enum OpFlag : uint32_t {
  kElementwise = 1 << 0,  // out[i] depends on in[broadcast(i)] only: may join a fusion group
  kRandom = 1 << 1,       // reads Op::key and the global element index
  kOffsetAware = 1 << 2,  // kernel reads Box (origin and global extents)
  kCollective = 1 << 3,
  kUpdateOp = 1 << 4,    // an optimizer's update; writes variables in place
  kNoGradient = 1 << 5,  // integer or piecewise constant: gradient is zero, stops silently
  kInternal = 1 << 6,    // made by passes only; SDK builders do not offer it
  // Mixed precision (grad/precision.cc); without any of these an op follows its operands.
  kComputeLow = 1 << 7,       // gains from bf16 operands: matmul, convolution, attention
  kComputeWide = 1 << 8,      // stays in f32: losses, exp, log, norms of vectors
  kRoundOutput = 1 << 9,      // reads f32, its result goes on in bf16: embedding
  kBoxOfInput = 1 << 11,      // the box is that of operand 0, not of the result
  kRearranges = 1 << 12,      // the results have the elements of operand 0, all of them and no others
  kMemoryCopy = 1 << 10,      // between the device's memory and the host's: an instruction of its own, no kernel
  kView = 1 << 13,            // operand 0's bytes as they are: no instruction
  kTrainingOnly = 1 << 14,    // the forward pass alone has operand 0 in its place
  kSkipsUpdates = 1 << 15,    // its scalar result, where it is NaN, says that a step changes no variable
  kSumsRows = 1 << 16,        // adds the rows of operand 0 to those of a table that operand 1, [...] or bags, names
  kProduct = 1 << 17,         // of matrices: a, b, optional bias of the last dimension; then the attribute `activation`
  kPreparesUpdate = 1 << 18,  // of a gradient: along replicas it is cut as that parameter's state
  kKeepsZero = 1 << 19,       // zeros give zeros: those of operand 0, or of all where there are any number
  kMatrices = 1 << 20,        // operands 0 and 1 and result 0 are the matrices of a product: m k, k n, m n, each once
};

// Output `output` may be written over input `input`. `must`: in place always (update ops).
struct Alias {
  int output;
  int input;
  bool must = false;
};

struct OpDef {
  const char* name;
  const char* doc;  // one sentence; then, after a newline, shapes and dtypes
  std::vector<PortSpec> inputs = {};
  std::vector<PortSpec> outputs = {};
  std::vector<AttrSpec> attrs = {};
  // Shape and dtype rule: returns the outputs' types, throws Error with what was expected and found.
  std::vector<TensorType> (*infer)(const OpView& view) = nullptr;
  GradientRule gradient = nullptr;  // null and not kNoGradient: differentiating through it is an error
  Factors (*factors)(const OpView& view) = nullptr;
  OpCost (*cost)(const OpView& view) = nullptr;  // null: bytes of all operands, one flop per output element
  std::vector<Alias> aliases = {};
  uint32_t flags = 0;
  // An equal form in pieces that can be cut where this op cannot (local part, combine, finish): appends its ops and
  // returns the results' replacements (empty: this op is in its simplest form). Used for ops inside a split.
  TensorIds (*decompose)(Graph& graph, const Op& op) = nullptr;
  // An equal form whose operands stand apart, for splits of the factor that only that form has. Empty: they do already.
  TensorIds (*unpack)(Graph& graph, const Op& op) = nullptr;
  const char* unpacked_factor = nullptr;
  // Variadic ops: the aliases of all operands of this op. Ask aliases_of(view), not the fields.
  std::vector<Alias> (*aliases_of)(const OpView& view) = nullptr;
  // kRandom, kOffsetAware: the dimensions of which this op's kernel reads where its part lies (bit d: dimension d).
  // null: all of them. Devices that differ elsewhere only share a program.
  uint32_t (*placed_dims)(const OpView& view) = nullptr;
  IndexOperand index = {};
  IndexResult makes_index = {};
  // Limits that hold for the logical op, not for a device's part of it, of which the shape rule is asked too: throws
  // what that throws.
  void (*check_whole)(const OpView& view) = nullptr;
  // The op that stands for it in the forward pass alone: takes its operands and those of its attributes that it has.
  std::optional<OpCode> inference = {};
  // Elementwise, of two values partial in this way: its result is partial in this way too.
  std::optional<Combine> of_partial = {};
  // Elementwise, of two: what it makes of two numbers. null: nobody asks.
  double (*of_numbers)(double a, double b) = nullptr;
  // What a kProduct calls it as its `activation`, when it does the same as this op behind it.
  const char* as_activation = nullptr;
  // Attention: how many products for each head have the scores, [queries, keys], as operand or result, and the value
  // [samples, queries, heads, features] that says of how many heads: a gradient's first operand, or the first result.
  int score_products = 0;
  // Its operand is of the whole batch; what to do about that where only micro-batches are there, {}: their number.
  const char* micro_batch_advice = nullptr;
};

const OpDef& def(OpCode code);
const OpDef* find_op(std::string_view name);  // null when there is none
OpCode code_of(std::string_view name);        // throws, naming the closest op
std::span<const OpCode> all_ops();            // in order of number
bool is_valid_op(int number);
inline bool has_flag(OpCode code, OpFlag flag) { return (def(code).flags & flag) != 0; }

// Fills in defaults, rejects unknown, missing and mistyped attributes.
Attrs complete_attrs(const OpDef& def, Attrs given);
OpView view_of(const Graph& graph, const Op& op);
// Checks operand counts, fills defaults, runs the shape rule; throws with op name and scope.
std::vector<TensorType> infer(OpCode code, const Attrs& attrs, const std::vector<TensorType>& inputs,
                              const std::vector<bool>& present);
OpCost cost_of(const OpView& view);
inline std::vector<Alias> aliases_of(const OpView& view) {
  const OpDef& d = def(view.code);
  return d.aliases_of ? d.aliases_of(view) : d.aliases;
}
std::vector<Alias> aliases_of(const Graph& graph, const Op& op);
IndexRange index_range(const OpView& view);  // of the op's index operand
IndexRange index_range(OpCode code, const Attrs& attrs, int64_t limit);
AttrRole role_of(const OpDef& def, std::string_view attr);
std::string to_string(const TensorType& type);  // "f32[16,128]"
std::string signature(const OpDef& def);        // "matmul(a, b, bias?)"

// Appends an op with its inferred outputs to a graph. `name` may be empty: the op's name and number. The only way in
// which passes and the C ABI make ops.
OpId append_op(Graph& graph, OpCode code, TensorIds inputs, Attrs attrs = {}, ScopeId scope = 0, std::string name = {});

// Attributes complete and valid, and every result of the type that its shape rule gives. After verify(graph).
void verify_ops(const Graph& graph);

}  // namespace whale
