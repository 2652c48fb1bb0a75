// The rules of every op that is plain arithmetic, checked with numbers on the reference device in float64:
// gradients against finite differences, and factors by cutting each one in two and putting the parts together.
#include <doctest/doctest.h>

#include <cmath>
#include <map>

#include "base/philox.h"
#include "device/ref/access.h"
#include "device/ref/ref.h"
#include "ops/grad_builder.h"
#include "ops/op.h"
#include "task/window.h"

namespace whale {
namespace {

struct Value {
  DType dtype = DType::kF64;
  Dims dims;
  std::vector<double> data;
};
Value typed(const TensorType& t) {
  return {t.dtype, t.dims, std::vector<double>(static_cast<size_t>(element_count(t.dims)))};
}

double noise(uint64_t seed, uint64_t i) {  // in [-1, 1), the same on every run
  return static_cast<double>(mix64(seed * 7919 + i) >> 11) / static_cast<double>(1ull << 52) - 1;
}

// One op on the reference device; results have the given types, which may be parts of the logical ones.
void run(Device& device, const Op& op, const std::vector<Value>& inputs, const std::vector<bool>& present,
         std::vector<Value>& outputs, const Box* box = nullptr) {
  StepParameters step;
  RowContext row;
  KernelSpec spec;
  spec.op = op.code, spec.name = op.name, spec.attrs = &op.attrs, spec.key = op.key, spec.step = &step, spec.row = &row;
  std::vector<std::vector<double>> memory;  // doubles: aligned, and large enough for any dtype
  memory.reserve(inputs.size() + outputs.size());
  const auto operand = [&](const Value& v) {
    Operand x;
    x.dtype = v.dtype, x.dims = v.dims;
    memory.emplace_back(v.data.size() + 1);
    x.data = memory.back().data();
    for (size_t i = 0; i < v.data.size(); ++i) ref::store(v.dtype, x.data, static_cast<int64_t>(i), v.data[i]);
    return x;
  };
  for (size_t i = 0; i < inputs.size(); ++i) spec.in.push_back(present[i] ? operand(inputs[i]) : Operand{});
  for (const Value& v : outputs) spec.out.push_back(operand(v));
  spec.box.origin.assign(outputs.at(0).dims.size(), 0);
  spec.box.global = outputs[0].dims;
  if (box != nullptr) spec.box = *box;
  device.bind(spec)->run();
  for (size_t i = 0; i < outputs.size(); ++i)
    for (size_t k = 0; k < outputs[i].data.size(); ++k)
      outputs[i].data[k] = ref::load(outputs[i].dtype, spec.out[i].data, static_cast<int64_t>(k));
}

struct Row {
  OpCode code;
  std::vector<TensorType> inputs;
  Attrs attrs = {};
  double low = -1, high = 1;  // of floating point operands; integers are 0, 1, 2
};

TensorType f64(Dims dims) { return {DType::kF64, std::move(dims)}; }
TensorType i32(Dims dims) { return {DType::kI32, std::move(dims)}; }
const TensorType kAbsentType{DType{}, {}};

struct Program {
  Graph graph;
  OpId op = kNone;
  std::map<TensorId, Value> values;
  explicit Program(const Row& row) {
    std::vector<TensorId> ids;
    for (const TensorType& t : row.inputs) {
      if (t == kAbsentType) {
        ids.push_back(kNone);
        continue;
      }
      Tensor tensor;
      tensor.name = fmt::format("in{}", ids.size());
      tensor.dtype = t.dtype;
      tensor.dims = t.dims;
      tensor.kind = TensorKind::kInput;
      const auto id = static_cast<TensorId>(graph.tensors.size());
      ids.push_back(id);
      graph.inputs.push_back(id);
      graph.tensors.push_back(tensor);
      Value v = typed(t);
      for (size_t i = 0; i < v.data.size(); ++i) {
        const double unit = (noise(static_cast<uint64_t>(id) + 1, i) + 1) / 2;
        v.data[i] = is_float(t.dtype) ? row.low + (row.high - row.low) * unit
                                      : std::floor(unit * (t.dtype == DType::kBool ? 2 : 3));
      }
      values[id] = v;
    }
    op = append_op(graph, row.code, ids, row.attrs);
  }
  void evaluate(Device& device) {
    for (const Op& o : graph.ops) {
      std::vector<Value> inputs, outputs;
      std::vector<bool> present;
      for (const TensorId id : o.inputs) {
        present.push_back(id != kNone);
        inputs.push_back(id == kNone ? Value{} : values.at(id));
      }
      for (const TensorId id : o.outputs) outputs.push_back(typed({graph.tensor(id).dtype, graph.tensor(id).dims}));
      run(device, o, inputs, present, outputs);
      for (size_t i = 0; i < o.outputs.size(); ++i) values[o.outputs[i]] = outputs[i];
    }
  }
};

double weight(size_t output, size_t i) { return noise(100 + output, i); }  // of an output element in the loss

// The first result is what the gradient passes through; statistics that kernels save beside it are not.
double loss(const Program& p) {
  const Value& y = p.values.at(p.graph.op(p.op).outputs[0]);
  double sum = 0;
  for (size_t i = 0; i < y.data.size(); ++i) sum += weight(0, i) * y.data[i];
  return sum;
}

void check_gradient(const Row& row) {
  const auto device = make_ref_backend()->open({});
  Program p(row);
  const OpCode code = row.code;
  const size_t inputs = p.graph.op(p.op).inputs.size();
  std::vector<TensorId> seeds(p.graph.op(p.op).outputs.size(), kNone);
  Tensor seed = p.graph.tensor(p.graph.op(p.op).outputs[0]);
  seed.kind = TensorKind::kInput, seed.producer = kNone, seed.name = "dy";
  Value dy = typed({seed.dtype, seed.dims});
  for (size_t i = 0; i < dy.data.size(); ++i) dy.data[i] = weight(0, i);
  seeds[0] = static_cast<TensorId>(p.graph.tensors.size());
  p.values[seeds[0]] = dy;
  p.graph.tensors.push_back(seed);
  p.graph.inputs.push_back(seeds[0]);
  GradBuilder builder(p.graph, p.op, seeds);
  builder.needs_grad.assign(inputs, true);
  def(code).gradient(builder);
  verify(p.graph);
  verify_ops(p.graph);
  p.evaluate(*device);
  for (size_t i = 0; i < inputs; ++i) {
    if (!builder.wants(static_cast<int>(i))) continue;
    const TensorId grad = builder.results()[i];
    REQUIRE(grad != kNone);
    const Value& found = p.values.at(grad);
    Program forward(row);
    const TensorId id = forward.graph.op(forward.op).inputs[i];
    CAPTURE(i);
    for (size_t k = 0; k < found.data.size(); ++k) {
      CAPTURE(k);
      const double h = 1e-6, x = forward.values[id].data[k];
      forward.values[id].data[k] = x + h;
      forward.evaluate(*device);
      const double up = loss(forward);
      forward.values[id].data[k] = x - h;
      forward.evaluate(*device);
      const double slope = (up - loss(forward)) / (2 * h);
      forward.values[id].data[k] = x;
      CHECK(found.data[k] == doctest::Approx(slope).epsilon(1e-5).scale(1));
    }
  }
}

// The elements of v whose sub-axis lies in [begin, end), as a tensor of its own.
std::vector<int64_t> part_indices(const Dims& dims, const SubAxis& sub_axis, int64_t extent, int64_t begin,
                                  int64_t end) {
  std::vector<int64_t> indices;
  const int64_t stride = row_major_strides(dims)[sub_axis.dim] * sub_axis.inner;
  for (int64_t i = 0; i < element_count(dims); ++i) {
    const int64_t at = i / stride % extent;
    if (at >= begin && at < end) indices.push_back(i);
  }
  return indices;
}
Value part(const Value& v, const SubAxis& sub_axis, int64_t extent, int64_t begin, int64_t end) {
  if (!sub_axis.present()) return v;
  Value out{v.dtype, v.dims, {}};
  out.dims[sub_axis.dim] = sub_axis.outer * (end - begin) * sub_axis.inner;
  for (const int64_t i : part_indices(v.dims, sub_axis, extent, begin, end)) out.data.push_back(v.data[i]);
  return out;
}

// Where the part of the first result lies.
Box box_of_part(const Value& whole, const SubAxis& sub_axis, int64_t extent, int64_t begin, int64_t end) {
  Box box;
  box.global = whole.dims;
  box.origin.assign(whole.dims.size(), 0);
  if (!sub_axis.present()) return box;
  if (sub_axis.outer == 1)
    box.origin[sub_axis.dim] = begin * sub_axis.inner;
  else
    box.cuts.push_back({sub_axis, extent, begin, end - begin});
  return box;
}

// What lowering writes into the attributes that the factor names.
Op part_of_op(Op op, const Factor& f, int64_t begin, int64_t end) {
  for (const char* name : f.size_attrs) op.attrs[name] = end - begin;
  if (f.begin_attr != nullptr) op.attrs[f.begin_attr] = begin;
  if (f.window.present()) localise_window(op.attrs, f, {begin, end});
  return op;
}

double neutral(Combine combine) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return combine == Combine::kSum ? 0 : combine == Combine::kMin ? kInfinity : -kInfinity;
}

void check_factors(const Row& row) {
  const auto device = make_ref_backend()->open({});
  Program p(row);
  p.evaluate(*device);
  const Op op = p.graph.op(p.op);
  const OpView view = view_of(p.graph, op);
  if (def(op.code).factors == nullptr) return;
  std::vector<Value> inputs, whole;
  for (const TensorId id : op.inputs) inputs.push_back(id == kNone ? Value{} : p.values.at(id));
  for (const TensorId id : op.outputs) whole.push_back(p.values.at(id));
  for (const Factor& f : def(op.code).factors(view).list) {
    if (f.kind != FactorKind::kMap && f.kind != FactorKind::kReduce && f.kind != FactorKind::kLookup &&
        f.kind != FactorKind::kWindow)
      continue;
    if (f.extent < 2 * f.unit) continue;
    CAPTURE(f.name);
    std::vector<Value> sum = whole;
    for (size_t i = 0; i < sum.size(); ++i) std::fill(sum[i].data.begin(), sum[i].data.end(), neutral(f.combine_of(i)));
    const int64_t at = std::max<int64_t>(1, f.extent / f.unit / 3) * f.unit;  // uneven where the extent permits it
    for (const auto& [begin, end] : {std::pair{int64_t{0}, at}, std::pair{at, f.extent}}) {
      std::vector<Value> local_in, local_out;
      for (size_t i = 0; i < inputs.size(); ++i) {
        const Interval read = f.reads_through(i) ? read_through(f.window, {begin, end}) : Interval{begin, end};
        REQUIRE(read.size() > 0);
        local_in.push_back(
            part(inputs[i], f.inputs[i], f.reads_through(i) ? f.window.source : f.extent, read.begin, read.end));
      }
      for (size_t i = 0; i < whole.size(); ++i) local_out.push_back(part(whole[i], f.outputs[i], f.extent, begin, end));
      const std::vector<Value> expected = local_out;
      for (Value& v : local_out) std::fill(v.data.begin(), v.data.end(), std::nan(""));
      const Box box = box_of_part(whole[0], f.outputs[0], f.extent, begin, end);
      run(*device, part_of_op(op, f, begin, end), local_in, view.present, local_out, &box);
      for (size_t i = 0; i < whole.size(); ++i) {
        CAPTURE(i);
        for (size_t k = 0; k < local_out[i].data.size(); ++k) {
          if (!f.partial[i])
            CHECK(local_out[i].data[k] == doctest::Approx(expected[i].data[k]).epsilon(1e-12).scale(1));
          double& s = sum[i].data[f.partial[i] ? k : 0];
          if (f.partial[i]) device->combine(f.combine_of(i), DType::kF64, &s, &s, &local_out[i].data[k], 1);
        }
      }
    }
    for (size_t i = 0; i < whole.size(); ++i)
      for (size_t k = 0; f.partial[i] && k < whole[i].data.size(); ++k)
        CHECK(sum[i].data[k] == doctest::Approx(whole[i].data[k]).epsilon(1e-12).scale(1));
  }
}

Attrs ints(const char* name, Ints values) { return {{name, std::move(values)}}; }

std::vector<Row> rows() {
  using C = OpCode;
  const TensorType bits{DType::kBool, {4, 3}};
  std::vector<Row> all = {
      {C::k_add, {f64({4, 3}), f64({3})}},
      {C::k_sub, {f64({3}), f64({4, 1})}},
      {C::k_mul, {f64({4, 3}), f64({})}},
      {C::k_div, {f64({1, 3}), f64({4, 3})}, {}, 0.5, 2},
      {C::k_pow, {f64({4, 3}), f64({3})}, {}, 0.5, 2},
      {C::k_maximum, {f64({4, 3}), f64({3})}},
      {C::k_minimum, {f64({4, 3}), f64({4, 1})}},
      {C::k_squared_difference, {f64({4, 3}), f64({3})}},
      {C::k_where, {bits, f64({4, 3}), f64({1, 3})}},
      {C::k_cast, {f64({4})}, {{"dtype", std::string("f64")}}},
      {C::k_bce_with_logits, {f64({4, 3}), f64({3})}, {}, 0.1, 0.9},
      {C::k_reduce_sum, {f64({4, 3, 2})}, ints("axes", {0, 2})},
      {C::k_reduce_mean, {f64({4, 3})}, {{"axes", Ints{1}}, {"keep_dims", true}}},
      {C::k_reduce_max, {f64({4, 3})}, ints("axes", {-1})},
      {C::k_reduce_min, {f64({4, 3})}},
      {C::k_sum_of_squares, {f64({4, 3}), f64({2})}},
      {C::k_sum_of_squares, {f64({4, 3})}},
      {C::k_reshape, {f64({4, 6})}, ints("shape", {2, 12})},
      {C::k_reshape, {f64({6, 4})}, ints("shape", {4, 6})},
      {C::k_transpose, {f64({4, 3, 2})}, ints("perm", {2, 0, 1})},
      {C::k_broadcast_to, {f64({4, 1})}, ints("shape", {2, 4, 3})},
      {C::k_slice, {f64({4, 7})}, {{"starts", Ints{1, 0}}, {"limits", Ints{3, 7}}, {"strides", Ints{1, 3}}}},
      {C::k_slice, {f64({4, 7})}, {{"starts", Ints{0, 2}}, {"limits", Ints{4, 5}}}},
      {C::k_concat, {f64({4, 2}), f64({4, 3})}, {{"axis", int64_t{1}}}},
      {C::k_pad, {f64({4, 2})}, {{"low", Ints{0, 1}}, {"high", Ints{0, 2}}, {"value", 2.5}}},
      {C::k_gather, {f64({4, 3, 2}), i32({5, 6})}, {{"axis", int64_t{1}}}},
      {C::k_cumsum, {f64({4, 3})}, {{"exclusive", true}}},
      {C::k_cumsum, {f64({4, 3})}, {{"axis", int64_t{0}}, {"reverse", true}}},
      {C::k_top_k, {f64({4, 8})}, {{"k", int64_t{3}}}},
      {C::k_matmul, {f64({4, 6}), f64({6, 3}), f64({3})}, {{"activation", std::string("relu")}}},
      {C::k_matmul, {f64({4, 6}), f64({6, 3}), f64({3})}},
      {C::k_matmul, {f64({6, 4}), f64({3, 6})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {C::k_matmul, {f64({2, 6, 4}), f64({3, 6}), f64({3})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {C::k_matmul, {f64({2, 4, 6}), f64({2, 6, 3}), f64({3})}},
      {C::k_matmul, {f64({2, 6, 4}), f64({2, 6, 3})}, {{"transpose_a", true}}},
      {C::k_matmul, {f64({2, 6, 4}), f64({2, 3, 6})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {C::k_embedding, {f64({3, 4}), i32({5, 2})}},
      {C::k_embedding_bag, {f64({3, 4}), i32({5, 2})}},
      {C::k_embedding_bag, {f64({3, 4}), i32({5, 2, 3})}, {{"mode", std::string("mean")}}},
      {C::k_pairwise_dot, {f64({4, 3}), f64({4, 3}), f64({4, 3})}},
      {C::k_moe_dispatch,
       {f64({2, 1, 4}), i32({2, 1, 1}), f64({2, 1, 1})},
       {{"experts", int64_t{3}}, {"capacity", int64_t{1}}}},
      {C::k_moe_combine, {f64({3, 2, 1, 4}), i32({2, 1, 1}), f64({2, 1, 1})}},
      {C::k_layer_norm, {f64({4, 6}), f64({6}), f64({6})}},
      {C::k_layer_norm, {f64({4, 6})}},
      {C::k_rms_norm, {f64({4, 6}), f64({6})}},
      {C::k_softmax, {f64({4, 6})}},
      {C::k_log_softmax, {f64({4, 6})}},
      {C::k_cross_entropy, {f64({4, 3}), i32({4})}, {{"label_smoothing", 0.1}, {"ignore_index", int64_t{1}}}},
      {C::k_attention, {f64({2, 3, 2, 4}), f64({2, 5, 1, 4}), f64({2, 5, 1, 3})}, {{"causal", true}}},
      {C::k_attention, {f64({2, 3, 2, 4}), f64({2, 3, 2, 4}), f64({2, 3, 2, 4}), f64({1, 2, 3, 3})}},
      {C::k_conv,
       {f64({2, 5, 6, 2}), f64({4, 3, 2, 1}), f64({4})},
       {{"strides", Ints{2, 1}}, {"padding", Ints{1, 1, 0, 1}}, {"groups", int64_t{2}}}},
      {C::k_max_pool, {f64({2, 5, 6, 2})}, {{"window", Ints{2, 3}}, {"strides", Ints{2, 1}}}},
      {C::k_avg_pool,
       {f64({2, 5, 6, 2})},
       {{"window", Ints{2, 3}}, {"strides", Ints{2, 1}}, {"padding", Ints{1, 0, 0, 1}}}},
  };
  for (const C code : {C::k_neg, C::k_abs, C::k_exp, C::k_square, C::k_sin, C::k_cos, C::k_erf, C::k_tanh, C::k_sigmoid,
                       C::k_softplus, C::k_relu, C::k_gelu, C::k_gelu_erf, C::k_silu})
    all.push_back({code, {f64({4, 3})}, {}, -2, 2});
  for (const C code : {C::k_log, C::k_log1p, C::k_sqrt, C::k_rsqrt, C::k_reciprocal})
    all.push_back({code, {f64({4, 3})}, {}, 0.5, 2});
  return all;
}

// Ops without a gradient of their own whose factors are worth a check.
std::vector<Row> more_rows() {
  using C = OpCode;
  return {
      {C::k_fill, {}, {{"shape", Ints{4, 3}}, {"value", 2.0}, {"dtype", std::string("f64")}}},
      {C::k_argmax, {f64({4, 3, 5})}, {{"axis", int64_t{1}}}},
      {C::k_one_hot, {i32({4, 2})}, {{"depth", int64_t{3}}, {"dtype", std::string("f64")}}},
      {C::k_less, {f64({4, 1}), f64({3})}},
      {C::k_relu_grad, {f64({4, 3}), f64({4, 3})}},
      {C::k_matmul_weight_grad, {f64({2, 4, 6}), f64({2, 4, 3})}, {{"transpose", true}, {"bias", true}}},
      {C::k_slice_grad, {f64({4, 2})}, {{"dims", Ints{4, 7}}, {"starts", Ints{0, 1}}, {"strides", Ints{1, 3}}}},
      {C::k_gather_grad, {f64({4, 5, 2}), i32({5})}, {{"axis", int64_t{1}}, {"size", int64_t{3}}}},
      {C::k_top_k_grad, {f64({4, 3}), i32({4, 3})}, {{"size", int64_t{6}}}},
      {C::k_softmax_grad, {f64({4, 6}), f64({4, 6})}},
      {C::k_embedding_bag_grad, {f64({4, 3}), i32({4, 2})}, {{"rows", int64_t{5}}}},
      {C::k_pairwise_dot_grad, {f64({4, 3}), f64({4, 2}), f64({4, 2}), f64({4, 2})}},
      {C::k_layer_norm_grad, {f64({4, 6}), f64({4, 6}), f64({4}), f64({4}), f64({6})}, {{"bias", true}}},
      {C::k_rms_norm_grad, {f64({4, 6}), f64({4, 6}), f64({4}), f64({6})}},
      {C::k_cross_entropy_grad, {f64({4}), f64({4, 3}), i32({4}), f64({4})}, {{"vocabulary", int64_t{3}}}},
      {C::k_cross_entropy_grad,
       {f64({4}), f64({4, 7}), i32({4}), f64({4})},
       {{"vocabulary", int64_t{7}}, {"label_smoothing", 0.2}, {"ignore_index", int64_t{1}}}},
      {C::k_cross_entropy_stats, {f64({4, 3}), i32({4})}, {{"vocabulary", int64_t{3}}}},
      {C::k_cross_entropy_stats,
       {f64({2, 9, 5}), i32({2, 9})},
       {{"vocabulary", int64_t{5}}, {"label_smoothing", 0.2}, {"ignore_index", int64_t{1}}}},
      {C::k_cross_entropy_finish, {f64({4}), f64({4}), i32({4})}, {{"ignore_index", int64_t{1}}}},
      {C::k_embedding_grad, {f64({5, 2, 4}), i32({5, 2})}, {{"rows", int64_t{3}}}},
      {C::k_rotary, {f64({2, 6, 4, 4})}},
      {C::k_rotary, {f64({2, 6, 4, 4})}, {{"heads", int64_t{3}}}},
      {C::k_attention,
       {f64({2, 6, 4, 4}), f64({2, 7, 2, 4}), f64({2, 7, 2, 3}), f64({2, 4, 6, 7})},
       {{"causal", true}, {"dropout", 0.3}, {"key", int64_t{5}}}},
      {C::k_attention, {f64({2, 6, 9, 4})}, {{"kv_heads", int64_t{3}}, {"dropout", 0.3}, {"key", int64_t{5}}}},
      {C::k_attention_grad,
       {f64({2, 6, 4, 3}), f64({2, 6, 4, 4}), f64({2, 7, 2, 4}), f64({2, 7, 2, 3}), f64({2, 6, 4, 3}), f64({2, 4, 6}),
        f64({1, 4, 6, 7})},
       {{"causal", true}, {"dropout", 0.3}, {"key", int64_t{5}}, {"bias_grad", true}}},
      {C::k_attention_grad,
       {f64({2, 6, 3, 4}), f64({2, 6, 9, 4}), kAbsentType, kAbsentType, f64({2, 6, 3, 4}), f64({2, 3, 6})},
       {{"kv_heads", int64_t{3}}, {"dropout", 0.3}, {"key", int64_t{5}}}},
      {C::k_dropout, {f64({4, 6})}, {{"rate", 0.4}, {"key", int64_t{5}}}},
      {C::k_iota, {}, {{"shape", Ints{4, 6}}, {"dim", int64_t{1}}, {"dtype", std::string("f64")}}},
      {C::k_conv, {f64({2, 5, 6, 4}), f64({4, 3, 2, 4})}},
      {C::k_conv_grad_input, {f64({2, 3, 5, 4}), f64({4, 3, 2, 4})}, {{"spatial", Ints{5, 6}}}},
      {C::k_conv_grad_input, {f64({2, 3, 5, 4}), f64({4, 3, 2, 2})}, {{"spatial", Ints{5, 6}}, {"groups", int64_t{2}}}},
      {C::k_conv_grad_weight, {f64({2, 5, 6, 4}), f64({2, 3, 5, 4})}, {{"kernel", Ints{3, 2}}, {"bias", true}}},
      {C::k_conv_grad_weight, {f64({2, 5, 6, 4}), f64({2, 3, 5, 4})}, {{"kernel", Ints{3, 2}}, {"groups", int64_t{2}}}},
      {C::k_conv_grad_input,
       {f64({2, 4, 3, 4}), f64({4, 3, 2, 4})},
       {{"spatial", Ints{9, 8}}, {"strides", Ints{2, 3}}, {"padding", Ints{1, 0, 1, 0}}}},
      {C::k_conv_grad_weight,
       {f64({2, 9, 8, 4}), f64({2, 4, 3, 2})},
       {{"kernel", Ints{2, 2}}, {"strides", Ints{2, 2}}, {"padding", Ints{1, 0, 0, 0}}, {"dilation", Ints{2, 2}}}},
      {C::k_conv_transpose,
       {f64({2, 4, 5, 2}), f64({2, 3, 1, 3}), f64({3})},
       {{"strides", Ints{2, 2}}, {"padding", Ints{1, 0, 0, 0}}, {"output_padding", Ints{0, 1}}}},
      {C::k_max_pool_grad,
       {f64({2, 4, 5, 2}), i32({2, 4, 5, 2})},
       {{"spatial", Ints{9, 5}}, {"window", Ints{3, 2}}, {"strides", Ints{2, 1}}, {"padding", Ints{0, 0, 1, 0}}}},
      {C::k_avg_pool_grad,
       {f64({2, 3, 5, 2})},
       {{"spatial", Ints{5, 6}}, {"window", Ints{3, 2}}, {"strides", Ints{1, 1}}, {"include_pad", true}}},
      {C::k_batch_stats, {f64({3, 5, 4})}},
      {C::k_batch_stats, {f64({6, 5, 4})}, {{"group", int64_t{2}}}},
      {C::k_batch_norm_moments, {f64({3, 2, 4})}, {{"count", int64_t{15}}, {"groups", int64_t{3}}}, 0.5, 2},
      {C::k_batch_norm_running, {f64({4}), f64({4}), f64({2, 4})}, {}, 0.5, 2},
      {C::k_sgd, {f64({}), kAbsentType, f64({4, 3}), f64({4, 3}), f64({4, 3})}, {{"momentum", 0.9}}},
      {C::k_adam,
       {f64({}), {DType::kI64, {}}, f64({}), f64({4, 3}), f64({4, 3}), f64({4, 3}), f64({4, 3})},
       {{"weight_decay", 0.1}},
       0.1,
       1},
      {C::k_adagrad, {f64({}), kAbsentType, f64({4, 3}), f64({4, 3}), f64({4, 3})}, {}, 0.1, 1},
      {C::k_lamb_direction,
       {{DType::kI64, {}}, kAbsentType, f64({4, 3}), f64({4, 3}), f64({4, 3}), f64({4, 3})},
       {},
       0.1,
       1},
      {C::k_embedding_bag, {f64({3, 4}), i32({5, 2})}, {{"mode", std::string("mean")}}},
      {C::k_embedding_bag_grad, {f64({5, 4}), i32({5, 2})}, {{"rows", int64_t{3}}}},
      {C::k_sgd_rows, {f64({}), kAbsentType, f64({3, 4}), i32({5}), f64({5, 4})}, {{"weight_decay", 0.1}}},
      {C::k_adagrad_rows,
       {f64({}), f64({}), f64({3, 4}), f64({3, 4}), i32({5, 2}), f64({5, 4})},
       {{"mean", true}},
       0.1,
       1},
      {C::k_lamb_apply, {f64({}), f64({4, 3}), f64({4, 3}), f64({}), f64({})}, {}, 0.1, 1},
      {C::k_moe_gate, {f64({3, 4, 5})}, {{"k", int64_t{2}}}},
      {C::k_moe_gate_grad, {f64({3, 4, 5}), i32({3, 4, 2}), f64({3, 4, 2}), f64({3})}, {{"k", int64_t{2}}}},
      {C::k_moe_combine, {f64({3, 2, 1, 4}), i32({2, 5, 2}), f64({2, 5, 2})}},
      {C::k_moe_weight_grad, {f64({2, 5, 4}), f64({3, 2, 1, 4}), i32({2, 5, 2})}},
  };
}

std::string title(const Row& row) {
  std::vector<std::string> types;
  for (const TensorType& t : row.inputs) types.push_back(t == kAbsentType ? "_" : to_string(t));
  return fmt::format("{}({})", def(row.code).name, fmt::join(types, ", "));
}

void check_pieces() {
  const auto device = make_ref_backend()->open({});
  const Attrs attrs{{"label_smoothing", 0.2}, {"ignore_index", int64_t{1}}};
  Program p({OpCode::k_cross_entropy, {f64({9, 5}), i32({9})}, attrs});
  const Op op = p.graph.op(p.op);
  const TensorIds pieces = def(OpCode::k_cross_entropy).decompose(p.graph, op);
  REQUIRE(pieces.size() == 2);
  Tensor seed = p.graph.tensor(pieces[0]);
  seed.kind = TensorKind::kInput, seed.producer = kNone, seed.name = "dy";
  const auto dy = static_cast<TensorId>(p.graph.tensors.size());
  p.values[dy] = typed({seed.dtype, seed.dims});
  for (size_t i = 0; i < p.values[dy].data.size(); ++i) p.values[dy].data[i] = weight(0, i);
  p.graph.tensors.push_back(seed);
  p.graph.inputs.push_back(dy);
  GradBuilder whole(p.graph, p.op, {dy, kNone});
  def(OpCode::k_cross_entropy).gradient(whole);
  const OpId finish = p.graph.tensor(pieces[0]).producer, stats = p.graph.tensor(pieces[1]).producer;
  GradBuilder second(p.graph, finish, {dy});
  def(OpCode::k_cross_entropy_finish).gradient(second);
  GradBuilder first(p.graph, stats, {second.results()[0], second.results()[1]});
  def(OpCode::k_cross_entropy_stats).gradient(first);
  verify_ops(p.graph);
  p.evaluate(*device);
  const auto check_same = [&](TensorId a, TensorId b) {
    for (size_t i = 0; i < p.values.at(a).data.size(); ++i)
      CHECK(p.values.at(a).data[i] == doctest::Approx(p.values.at(b).data[i]).epsilon(1e-12).scale(1));
  };
  check_same(pieces[0], op.outputs[0]);
  check_same(pieces[1], op.outputs[1]);
  check_same(first.results()[0], whole.results()[0]);
}

}  // namespace

TEST_CASE("cross entropy in pieces: values and gradient of the whole") { check_pieces(); }

TEST_CASE("gradient rules agree with finite differences") {
  for (const Row& row : rows()) {
    CAPTURE(title(row));
    check_gradient(row);
  }
}

TEST_CASE("every factor: the parts of a cut give the whole") {
  for (const auto& table : {rows(), more_rows()}) {
    for (const Row& row : table) {
      CAPTURE(title(row));
      check_factors(row);
    }
  }
}

}  // namespace whale
