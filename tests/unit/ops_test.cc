// ops/: the registry, attributes, shape rules and their errors, factors, fused chains, the shape of gradients.
#include <doctest/doctest.h>

#include <set>

#include "ops/fused.h"
#include "ops/grad_builder.h"
#include "ops/op.h"
#include "unit/caught.h"

using namespace whale;

namespace {

struct Case {  // an op on inputs of the given types, in a graph of its own
  Graph graph;
  OpId id = kNone;
  Case(OpCode code, std::vector<TensorType> inputs, Attrs attrs = {}) {
    std::vector<TensorId> ids;
    for (const TensorType& t : inputs) {
      Tensor tensor;
      tensor.name = "in" + std::to_string(graph.tensors.size());
      tensor.dtype = t.dtype;
      tensor.dims = t.dims;
      tensor.kind = TensorKind::kInput;
      graph.inputs.push_back(static_cast<TensorId>(graph.tensors.size()));
      ids.push_back(graph.inputs.back());
      graph.tensors.push_back(tensor);
    }
    id = append_op(graph, code, ids, std::move(attrs));
  }
  OpView view() const { return view_of(graph, graph.op(id)); }
  TensorType out(size_t i = 0) const { return view().outputs.at(i); }
  Factors factors() const {
    const OpView v = view();
    return def(v.code).factors(v);
  }
};

TensorType f32(Dims dims) { return {DType::kF32, std::move(dims)}; }
TensorType i32(Dims dims) { return {DType::kI32, std::move(dims)}; }

std::string text(const std::vector<SubAxis>& sub_axes) {
  std::vector<std::string> parts;
  for (const SubAxis& d : sub_axes)
    parts.push_back(!d.present()                   ? "-"
                    : d.outer == 1 && d.inner == 1 ? fmt::format("{}", d.dim)
                                                   : fmt::format("{}:{}:{}", d.dim, d.outer, d.inner));
  return fmt::format("{}", fmt::join(parts, " "));
}

// "m=4 map (0 -) -> (0)"; "k=3 sum (1 0) -> (-) partial 0"
std::string text(const Factors& factors) {
  constexpr const char* kKinds[] = {"map", "reduce", "window", "scan", "lookup", "fixed"};
  constexpr const char* kCombines[] = {"sum", "max", "min"};
  std::string all;
  for (const Factor& f : factors.list) {
    all += fmt::format(
        "{}={} {} ({}) -> ({})", f.name, f.extent,
        f.kind == FactorKind::kReduce ? kCombines[static_cast<int>(f.combine)] : kKinds[static_cast<int>(f.kind)],
        text(f.inputs), text(f.outputs));
    for (size_t i = 0; i < f.partial.size(); ++i)
      if (f.partial[i]) all += fmt::format(" partial {}", i);
    all += "\n";
  }
  return all;
}

}  // namespace

TEST_CASE("registry: every line of ops.def has a complete literal of its name") {
  std::set<std::string> names;
  int last = -1;
  for (const OpCode code : all_ops()) {
    const OpDef& d = def(code);
    CAPTURE(std::string(d.name));
    CHECK(code_of(d.name) == code);
    CHECK(find_op(d.name) == &d);
    CHECK(names.insert(d.name).second);
    CHECK(static_cast<int>(code) > last);
    last = static_cast<int>(code);
    CHECK(std::string_view(d.doc).size() > 10);
    CHECK((d.infer != nullptr));
    CHECK_FALSE(d.outputs.empty());
    for (size_t i = 0; i + 1 < d.inputs.size(); ++i) CHECK(d.inputs[i].kind != PortKind::kVariadic);
    for (const AttrSpec& spec : d.attrs) CHECK(spec.fallback.index() == static_cast<size_t>(spec.type));
    if (has_flag(code, kNoGradient)) CHECK((d.gradient == nullptr));
    const bool without = has_flag(code, kInternal) || has_flag(code, kUpdateOp) || has_flag(code, kNoGradient) ||
                         code == OpCode::k_batch_norm;
    CHECK((without || d.gradient != nullptr));  // batch_norm is decomposed before
  }
#define WHALE_OP(number, op) CHECK(def(OpCode::k_##op).name == std::string(#op));
#include "ops/ops.def"
#undef WHALE_OP
  CHECK_FALSE(is_valid_op(0));
  CHECK_FALSE(is_valid_op(-5));
  CHECK_FALSE(is_valid_op(1 << 20));
  CHECK(is_valid_op(static_cast<int>(OpCode::k_matmul)));
  CHECK_THROWS_WITH_AS(code_of("matmull"), doctest::Contains("did you mean 'matmul'?"), Error);
  CHECK_THROWS_AS(code_of(std::string(100000, 'x')), Error);
  CHECK(find_op("nothing") == nullptr);
}

TEST_CASE("attributes: defaults, conversions, and what is rejected") {
  const OpDef& reduce = def(OpCode::k_reduce_sum);
  const Attrs all = complete_attrs(reduce, {});
  CHECK(all.size() == reduce.attrs.size());
  CHECK(std::get<bool>(all.at("keep_dims")) == false);
  CHECK(std::get<double>(complete_attrs(def(OpCode::k_pad), {{"value", int64_t{3}}}).at("value")) == 3.0);
  CHECK(std::get<Ints>(complete_attrs(reduce, {{"axes", std::vector<double>{}}}).at("axes")).empty());
  CHECK_THROWS_WITH_AS(complete_attrs(reduce, {{"axis", int64_t{1}}}),
                       doctest::Contains("no attribute 'axis'; it has [axes, keep_dims, out_dtype]"), Error);
  CHECK_THROWS_WITH_AS(complete_attrs(reduce, {{"axes", true}}),
                       doctest::Contains("'axes' is true, expected a list of integers"), Error);
  CHECK_THROWS_WITH_AS(complete_attrs(def(OpCode::k_cast), {}),
                       doctest::Contains("'dtype' is missing; expected a string"), Error);
}

TEST_CASE("append_op: names, padding of operands, where an error happened") {
  Case c(OpCode::k_top_k, {f32({4, 8})}, {{"k", int64_t{3}}});
  const Op& op = c.graph.op(c.id);
  CHECK(op.name == "top_k_0");
  CHECK(c.graph.tensor(op.outputs[0]).name == "top_k_0");
  CHECK(c.graph.tensor(op.outputs[1]).name == "top_k_0.indices");
  CHECK(c.graph.tensor(op.outputs[1]).producer == c.id);
  CHECK(c.graph.tensor(op.outputs[1]).output == 1);
  CHECK(c.out(1) == i32({4, 3}));
  const Case m(OpCode::k_matmul, {f32({4, 8}), f32({8, 2})});
  CHECK(m.graph.op(0).inputs == std::vector<TensorId>{0, 1, kNone});

  Graph g = m.graph;
  Scope s;
  s.kind = ScopeKind::kStage;
  s.parent = 0;
  g.scopes.push_back(s);
  const size_t tensors = g.tensors.size();
  try {
    append_op(g, OpCode::k_add, {0, 1}, {}, 1, "residual");
    FAIL("shapes that do not broadcast passed");
  } catch (const Error& e) {
    CHECK(e.code() == Code::kInvalidArgument);
    CHECK(e.where().op == "residual");
    CHECK(e.where().scope == "stage");
    CHECK(e.message().starts_with("add: shapes [4, 8] and [8, 2] do not broadcast"));
  }
  CHECK(g.tensors.size() == tensors);
  CHECK(g.ops.size() == 1);
  CHECK_THROWS_WITH_AS(append_op(g, OpCode::k_add, {0, 99}), doctest::Contains("operand is tensor 99"), Error);
  CHECK_THROWS_WITH_AS(append_op(g, OpCode::k_add, {0}), doctest::Contains("operand 1 ('b') is missing (add(a, b))"),
                       Error);
  CHECK_THROWS_WITH_AS(append_op(g, OpCode::k_add, {0, 0, 0}), doctest::Contains("has 3 operands, expected 2"), Error);
  CHECK_THROWS_WITH_AS(append_op(g, OpCode::k_add, {0, kNone}), doctest::Contains("operand 1 ('b') is missing"), Error);
  CHECK_THROWS_WITH_AS(append_op(g, OpCode::k_relu, {0}, {}, 9), doctest::Contains("scope 9 does not exist"), Error);
}

TEST_CASE("shape rules") {
  CHECK(Case(OpCode::k_add, {f32({4, 1, 3}), f32({5, 1})}).out() == f32({4, 5, 3}));
  CHECK(Case(OpCode::k_less, {i32({4}), i32({})}).out() == TensorType{DType::kBool, {4}});
  CHECK(Case(OpCode::k_where, {{DType::kBool, {4, 1}}, f32({3}), f32({})}).out() == f32({4, 3}));
  CHECK(Case(OpCode::k_bce_with_logits, {{DType::kBF16, {4}}, {DType::kBF16, {4}}}).out() == f32({4}));
  CHECK(Case(OpCode::k_reduce_sum, {f32({2, 3, 4})}).out() == f32({}));
  CHECK(Case(OpCode::k_reduce_max, {f32({2, 3, 4})}, {{"axes", Ints{-1, 0}}, {"keep_dims", true}}).out() ==
        f32({1, 3, 1}));
  CHECK(Case(OpCode::k_argmax, {f32({2, 3})}, {{"axis", int64_t{0}}}).out() == i32({3}));
  CHECK(Case(OpCode::k_matmul, {f32({7, 4, 8}), f32({2, 8}), f32({2})}, {{"transpose_b", true}}).out() ==
        f32({7, 4, 2}));
  CHECK(Case(OpCode::k_matmul, {f32({7, 8, 4}), f32({7, 8, 2})},
             {{"transpose_a", true}, {"out_dtype", std::string("f64")}})
            .out() == TensorType{DType::kF64, {7, 4, 2}});
  const Case w(OpCode::k_matmul_weight_grad, {f32({7, 4, 8}), f32({7, 4, 2})}, {{"transpose", true}, {"bias", true}});
  CHECK(w.out(0) == f32({2, 8}));
  CHECK(w.out(1) == f32({2}));
  CHECK(Case(OpCode::k_reshape, {f32({4, 6})}, {{"shape", Ints{3, -1}}}).out() == f32({3, 8}));
  CHECK(Case(OpCode::k_transpose, {f32({4, 6, 2})}, {{"perm", Ints{2, 0, 1}}}).out() == f32({2, 4, 6}));
  CHECK(Case(OpCode::k_slice, {f32({4, 7})}, {{"starts", Ints{1, 0}}, {"limits", Ints{3, 7}}, {"strides", Ints{1, 3}}})
            .out() == f32({2, 3}));
  CHECK(Case(OpCode::k_concat, {f32({4, 2}), f32({4, 3})}, {{"axis", int64_t{-1}}}).out() == f32({4, 5}));
  CHECK(Case(OpCode::k_pad, {f32({4, 2})}, {{"low", Ints{1, 0}}, {"high", Ints{0, 2}}}).out() == f32({5, 4}));
  CHECK(Case(OpCode::k_gather, {f32({4, 9, 3}), i32({5, 6})}, {{"axis", int64_t{1}}}).out() == f32({4, 5, 6, 3}));
  CHECK(Case(OpCode::k_gather_grad, {f32({4, 5, 6, 3}), i32({5, 6})}, {{"axis", int64_t{1}}, {"size", int64_t{9}}})
            .out() == f32({4, 9, 3}));
  CHECK(Case(OpCode::k_one_hot, {i32({4})}, {{"depth", int64_t{3}}}).out() == f32({4, 3}));
  CHECK(Case(OpCode::k_fill, {}, {{"shape", Ints{2}}, {"value", 1.5}, {"dtype", std::string("bf16")}}).out() ==
        TensorType{DType::kBF16, {2}});
}

TEST_CASE("shape rules say what was expected and what was found") {
  const auto message = [](OpCode code, std::vector<TensorType> inputs, Attrs attrs = {}) {
    return message_of([&] { Case(code, std::move(inputs), std::move(attrs)); }, {Code::kInvalidArgument});
  };
  CHECK(message(OpCode::k_add, {f32({4}), i32({4})}) ==
        "add: operands 'a' (f32[4]) and 'b' (i32[4]) must have one dtype; cast one of them");
  CHECK(message(OpCode::k_exp, {i32({4})}) == "exp: operand 'x' is i32[4], expected a floating point type");
  CHECK(message(OpCode::k_logical_not, {f32({4})}) == "logical_not: operand 'x' is f32[4], expected bool");
  CHECK(message(OpCode::k_reduce_sum, {f32({4})}, {{"axes", Ints{1}}}) ==
        "reduce_sum: axis 1 is out of range for a tensor of rank 1");
  CHECK(message(OpCode::k_reduce_sum, {f32({4, 2})}, {{"axes", Ints{1, -1}}}) ==
        "reduce_sum: axes [1, -1] name dimension 1 twice");
  CHECK(message(OpCode::k_matmul, {f32({4, 8}), f32({7, 2})}) ==
        "matmul: a [4, 8] and b [7, 2] do not multiply: a sums over 8 and b over 7");
  CHECK(message(OpCode::k_matmul, {f32({8}), f32({8, 2})}) ==
        "matmul: operand 'a' has shape [8], expected at least 2 dimension(s)");
  CHECK(message(OpCode::k_matmul, {f32({3, 4, 8}), f32({2, 8, 2})})
            .find("leading dimensions of a [3, 4, 8] and b [2, 8, 2] differ") != std::string::npos);
  CHECK(message(OpCode::k_matmul, {f32({4, 8}), f32({8, 2}), f32({3})}) ==
        "matmul: operand 'bias' has shape [3], expected [2]: the columns of b");
  CHECK(message(OpCode::k_matmul, {f32({4, 8}), f32({8, 2})}, {{"activation", std::string("swish")}})
            .find("'swish', expected one of none, relu") != std::string::npos);
  CHECK(message(OpCode::k_matmul, {f32({4, 8}), f32({8, 2})}, {{"out_dtype", std::string("i32")}})
            .find("expected a floating point type") != std::string::npos);
  CHECK(message(OpCode::k_reshape, {f32({4, 2})}, {{"shape", Ints{3, -1}}}) ==
        "reshape: cannot reshape [4, 2] (8 elements) to [3, -1]");
  CHECK(message(OpCode::k_reshape, {f32({4, 2})}, {{"shape", Ints{-1, -1}}}).find("at most one of them -1") !=
        std::string::npos);
  CHECK(message(OpCode::k_reshape, {f32({0})}, {{"shape", Ints{0, -1}}}).find("cannot reshape") != std::string::npos);
  CHECK(message(OpCode::k_transpose, {f32({4, 2})}, {{"perm", Ints{0, 0}}}) ==
        "transpose: attribute 'perm' is [0, 0], expected each of the 2 dimensions of [4, 2] once");
  CHECK(message(OpCode::k_slice, {f32({4})}, {{"starts", Ints{2}}, {"limits", Ints{5}}})
            .find("slice 2:5:1 is out of range") != std::string::npos);
  CHECK(
      message(OpCode::k_slice_grad, {f32({2})}, {{"dims", Ints{4}}, {"starts", Ints{1}}, {"strides", Ints{INT64_MAX}}})
          .find("do not fit") != std::string::npos);
  CHECK(message(OpCode::k_pad, {f32({2})}, {{"low", Ints{INT64_MAX}}}).find("not overflow") != std::string::npos);
  CHECK(message(OpCode::k_broadcast_to, {f32({2})}, {{"shape", Ints{3}}}).find("[2] and [3] do not broadcast") !=
        std::string::npos);
  CHECK(
      message(OpCode::k_broadcast_to, {f32({2, 2})}, {{"shape", Ints{2}}}).find("x [2, 2] does not broadcast to [2]") !=
      std::string::npos);
  CHECK(message(OpCode::k_gather, {f32({4}), f32({2})}) == "gather: operand 'indices' is f32, expected i32 or i64");
  CHECK(message(OpCode::k_top_k, {f32({4})}, {{"k", int64_t{5}}}).find("'k' is 5, expected 1 to 4") !=
        std::string::npos);
  CHECK(message(OpCode::k_concat, {}) == "concat: has no operands, expected at least one");
  CHECK(message(OpCode::k_concat, {f32({2, 3}), f32({3, 3})}, {{"axis", int64_t{1}}})
            .find("operand 1 is f32[3,3], operand 0 is f32[2,3]") != std::string::npos);
  const auto filled = [&](double value, const char* dtype) {
    return message(OpCode::k_fill, {}, {{"shape", Ints{2}}, {"value", value}, {"dtype", std::string(dtype)}});
  };
  CHECK(filled(0.5, "i32").find("'value' is 0.5, which i32 does not have") != std::string::npos);
  CHECK(filled(2147483648.0, "i32").find("i32 does not have") != std::string::npos);
  CHECK(filled(-1, "u8").find("u8 does not have") != std::string::npos);
  CHECK(filled(2, "bool").find("bool does not have") != std::string::npos);
  const auto filled_whole = [&](int64_t value) {
    return message(OpCode::k_fill, {}, {{"shape", Ints{2}}, {"value", value}, {"dtype", std::string("i64")}});
  };
  CHECK(filled_whole(int64_t{1} << 53) == "");
  CHECK(filled_whole(INT64_MIN) == "");
  CHECK(filled_whole((int64_t{1} << 53) + 1) ==
        "fill: attribute 'value' is 9007199254740993, expected a number that f64 has, such as 9007199254740992");
  CHECK(filled_whole(INT64_MAX).find("'value' is 9223372036854775807, expected a number") != std::string::npos);
  const auto counted = [&](Ints shape, int64_t dim, const char* dtype) {
    return message(OpCode::k_iota, {}, {{"shape", std::move(shape)}, {"dim", dim}, {"dtype", std::string(dtype)}});
  };
  CHECK(counted({300, 256}, 1, "u8") == "");
  CHECK(counted({256, 300}, -1, "u8") ==
        "iota: attribute 'shape' is [256, 300]; u8 counts to 255, and there are 300 indices along dimension 1");
  CHECK(counted({128}, 0, "i8") == "");
  CHECK(counted({129}, 0, "i8").find("i8 counts to 127") != std::string::npos);
  CHECK(counted({65537}, 0, "u16").find("u16 counts to 65535") != std::string::npos);
  CHECK(counted({(int64_t{1} << 31) + 1}, 0, "i32").find("i32 counts to 2147483647") != std::string::npos);
  CHECK(counted({2049}, 0, "f16") == "");
  CHECK(counted({2050}, 0, "f16").find("f16 counts to 2048") != std::string::npos);
  CHECK(counted({257}, 0, "bf16") == "");
  CHECK(counted({300}, 0, "bf16").find("bf16 counts to 256") != std::string::npos);
  CHECK(counted({(1 << 24) + 1}, 0, "f32") == "");
  CHECK(counted({(1 << 24) + 2}, 0, "f32").find("f32 counts to 16777216") != std::string::npos);
  CHECK(message(OpCode::k_rotary, {f32({1, 2, 3, 4})}, {{"heads", int64_t{3}}}) == "");
  CHECK(message(OpCode::k_rotary, {f32({1, 2, 3, 4})}, {{"heads", int64_t{9}}}) ==
        "rotary: attribute 'heads' is 9, expected -1 (all) or 0 to 3: the heads of x [1, 2, 3, 4]");
  CHECK(message(OpCode::k_attention, {f32({1, 2, 3, 4}), f32({1, 2, 3, 4}), f32({1, 2, 3, 4})},
                {{"key_begin", int64_t{1}}})
            .find("'key_begin' is 1, which only a piece of the keys has") != std::string::npos);
  CHECK(message(OpCode::k_fill, {}, {{"shape", Ints{int64_t{1} << 62, 4}}}).find("more than 2^63") !=
        std::string::npos);
  CHECK(message(OpCode::k_reshape, {f32({1})}, {{"shape", Ints(9, 1)}}).find("rank 9; at most 8") != std::string::npos);
}

TEST_CASE("parse_factors") {
  const Case c(OpCode::k_matmul, {f32({4, 8}), f32({8, 2})});
  CHECK(text(parse_factors("m k, k n, _ -> m n", c.view())) ==
        "m=4 map (0 - -) -> (0)\nk=8 sum (1 0 -) -> (-) partial 0\nn=2 map (- 1 -) -> (1)\n");
  CHECK(text(parse_factors("m ., . n, n -> m n", c.view())) == "m=4 map (0 - -) -> (0)\nn=2 map (- 1 -) -> (1)\n");
  const Case batched(OpCode::k_matmul, {f32({6, 5, 4, 8}), f32({6, 5, 8, 2})});
  CHECK(text(parse_factors("... m k, ... k n, _ -> ... m n", batched.view())) ==
        "b1=6 map (0 0 -) -> (0)\nb=5 map (1 1 -) -> (1)\nm=4 map (2 - -) -> (2)\nk=8 sum (3 2 -) -> (-) partial "
        "0\nn=2 map (- 3 -) -> (3)\n");
  const Case broadcast(OpCode::k_add, {f32({4, 1}), f32({4, 3})});
  CHECK(text(parse_factors("rows columns, rows columns -> rows columns", broadcast.view())) ==
        "rows=4 map (0 0) -> (0)\ncolumns=3 map (- 1) -> (1)\n");
  const Case ones(OpCode::k_add, {f32({1}), f32({1})});
  CHECK(text(parse_factors("a, a -> a", ones.view())) == "a=1 map (0 0) -> (0)\n");
  CHECK_THROWS_AS(parse_factors("m k, k n, _ -> m", c.view()), Error);
  CHECK_THROWS_AS(parse_factors("m k, m n, _ -> m n", c.view()), Error);
  CHECK_THROWS_AS(parse_factors("m k", c.view()), Error);
}

TEST_CASE("factors of the basic families") {
  CHECK(text(Case(OpCode::k_add, {f32({4, 1, 3}), f32({5, 1})}).factors()) ==
        "d0=4 map (0 -) -> (0)\nd1=5 map (- 0) -> (1)\nd2=3 map (2 -) -> (2)\n");
  const Case mm(OpCode::k_matmul, {f32({7, 4, 8}), f32({2, 8})}, {{"transpose_b", true}});
  CHECK(text(mm.factors()) ==
        "b=7 map (0 - -) -> (0)\nm=4 map (1 - -) -> (1)\nn=2 map (- 0 -) -> (2)\nk=8 sum (2 1 -) -> (-) partial 0\n");
  CHECK(mm.factors().linear == std::vector<std::vector<int>>{{0}, {1}});
  const Case biased(OpCode::k_matmul, {f32({4, 8}), f32({8, 2}), f32({2})});
  CHECK(text(biased.factors()) == "m=4 map (0 - -) -> (0)\nn=2 map (- 1 0) -> (1)\n");
  CHECK(biased.factors().linear.empty());
  const Case wg(OpCode::k_matmul_weight_grad, {f32({7, 4, 8}), f32({7, 4, 2})}, {{"bias", true}});
  CHECK(text(wg.factors()) ==
        "b=7 sum (0 0) -> (- -) partial 0 partial 1\nm=4 sum (1 1) -> (- -) partial 0 partial 1\nk=8 map (2 -) -> (0 "
        "-)\nn=2 map (- 2) -> (1 0)\n");
  CHECK(text(Case(OpCode::k_reduce_max, {f32({4, 5, 6})}, {{"axes", Ints{1}}}).factors()) ==
        "d0=4 map (0) -> (0)\nd1=5 max (1) -> (-) partial 0\nd2=6 map (2) -> (1)\n");
  CHECK(Case(OpCode::k_reduce_max, {f32({4})}).factors().linear.empty());
  CHECK(text(Case(OpCode::k_reduce_mean, {f32({4, 5})}, {{"axes", Ints{1}}, {"keep_dims", true}}).factors()) ==
        "d0=4 map (0) -> (0)\n");
  CHECK(text(Case(OpCode::k_reshape, {f32({16, 12})}, {{"shape", Ints{32, 6}}}).factors()) ==
        "d0=16 map (0) -> (0:1:2)\nd1=2 map (1:1:6) -> (0:16:1)\nd2=6 map (1:2:1) -> (1)\n");
  CHECK(text(Case(OpCode::k_transpose, {f32({4, 5})}, {{"perm", Ints{1, 0}}}).factors()) ==
        "d1=5 map (1) -> (0)\nd0=4 map (0) -> (1)\n");
  CHECK(text(Case(OpCode::k_slice, {f32({4, 5})}, {{"starts", Ints{0, 1}}, {"limits", Ints{4, 5}}}).factors()) ==
        "d0=4 map (0) -> (0)\n");
  CHECK(text(Case(OpCode::k_concat, {f32({4, 5}), f32({4, 6})}, {{"axis", int64_t{1}}}).factors()) ==
        "d0=4 map (0 0) -> (0)\n");
  CHECK(text(Case(OpCode::k_broadcast_to, {f32({4, 1})}, {{"shape", Ints{3, 4, 5}}}).factors()) ==
        "d0=3 map (-) -> (0)\nd1=4 map (0) -> (1)\nd2=5 map (-) -> (2)\n");
  CHECK(text(Case(OpCode::k_gather, {f32({9, 3}), i32({4, 5})}).factors()) ==
        "d0=4 map (- 0) -> (0)\nd1=5 map (- 1) -> (1)\nd2=3 map (1 -) -> (2)\nrows=9 lookup (0 -) -> (-) partial 0\n");
  CHECK(text(Case(OpCode::k_gather_grad, {f32({4, 5, 3}), i32({4, 5})}, {{"size", int64_t{9}}}).factors()) ==
        "d0=4 sum (0 0) -> (-) partial 0\nd1=5 sum (1 1) -> (-) partial 0\nd2=3 map (2 -) -> (1)\nrows=9 map (- -) -> "
        "(0)\n");
  CHECK(Case(OpCode::k_cumsum, {f32({4, 5})}).factors().list[1].kind == FactorKind::kScan);
  CHECK(Case(OpCode::k_concat, {f32({4}), f32({4})}).factors().linear == std::vector<std::vector<int>>{{0, 1}});
  CHECK(Case(OpCode::k_mul, {f32({4}), f32({4})}).factors().linear == std::vector<std::vector<int>>{{0}, {1}});
  CHECK(Case(OpCode::k_relu, {f32({4})}).factors().linear.empty());
}

TEST_CASE("every op with factors lists one sub-axis an operand, and a bit a result") {
  const Case cases[] = {
      Case(OpCode::k_sum_of_squares, {f32({4, 5})}),
      Case(OpCode::k_sum_of_squares, {f32({4, 5}), f32({3})}),
      Case(OpCode::k_top_k, {f32({4, 5})}, {{"k", int64_t{2}}}),
      Case(OpCode::k_one_hot, {i32({4, 5})}, {{"depth", int64_t{2}}}),
      Case(OpCode::k_iota, {}, {{"shape", Ints{4, 5}}, {"dim", int64_t{1}}}),
      Case(OpCode::k_where, {{DType::kBool, {}}, f32({3}), f32({2, 1})}),
  };
  for (const Case& c : cases) {
    const OpView v = c.view();
    CAPTURE(std::string(def(v.code).name));
    for (const Factor& f : c.factors().list) {
      REQUIRE(f.inputs.size() == v.inputs.size());
      REQUIRE(f.outputs.size() == v.outputs.size());
      REQUIRE(f.partial.size() == v.outputs.size());
      for (size_t i = 0; i < f.inputs.size(); ++i)
        if (f.inputs[i].present())
          CHECK(v.inputs[i].dims[f.inputs[i].dim] == f.inputs[i].outer * f.extent * f.inputs[i].inner);
      for (size_t i = 0; i < f.outputs.size(); ++i)
        if (f.outputs[i].present())
          CHECK(v.outputs[i].dims[f.outputs[i].dim] == f.outputs[i].outer * f.extent * f.outputs[i].inner);
    }
  }
  CHECK(Case(OpCode::k_sum_of_squares, {f32({4, 5}), f32({3})}).factors().list.empty());
}

TEST_CASE("fused: encode, decode, types, malformed data") {
  FusedBody body;
  body.steps = {{OpCode::k_add, DType::kF32, {0, 1}, 0, 0},
                {OpCode::k_cast, DType::kBF16, {2}, 0, 0},
                {OpCode::k_dropout, DType::kBF16, {3}, 0.25, 0xFEDCBA9876543210u}};
  body.results = {2, 4};
  const Attrs attrs = encode(body, 2);
  const FusedBody back = decode(attrs, 2);
  REQUIRE(back.steps.size() == 3);
  CHECK(back.steps[2].key == 0xFEDCBA9876543210u);
  CHECK(back.steps[2].value == 0.25);
  CHECK(back.steps[1].operands == std::vector<int>{2});
  CHECK(back.results == body.results);
  const Case c(OpCode::k_fused, {f32({4, 3}), f32({3})}, attrs);
  CHECK(c.out(0) == f32({4, 3}));
  CHECK(c.out(1) == TensorType{DType::kBF16, {4, 3}});
  CHECK_THROWS_AS(Case(OpCode::k_fused, {i32({4, 3}), i32({3})}, attrs), Error);  // the body says f32

  const Ints good = attr_ints(attrs, "ops");
  for (size_t cut = 0; cut < good.size(); ++cut) {  // every truncation
    Attrs bad = attrs;
    bad["ops"] = Ints(good.begin(), good.begin() + static_cast<int64_t>(cut));
    if (cut + 1 == good.size()) continue;  // one result instead of two: also a valid body
    CHECK_THROWS_AS(decode(bad, 2), Error);
  }
  for (size_t i = 0; i < good.size();
       ++i) {  // every entry replaced by wild values: an Error or a body, never anything else
    for (const int64_t wild : {int64_t{-1}, int64_t{1} << 40, INT64_MAX, INT64_MIN, int64_t{80}, int64_t{47}}) {
      Attrs bad = attrs;
      std::get<Ints>(bad["ops"])[i] = wild;
      try {
        Case(OpCode::k_fused, {f32({4, 3}), f32({3})}, bad);
      } catch (const Error&) {
      }
    }
  }
  Attrs few = attrs;
  few["values"] = std::vector<double>{1};
  CHECK_THROWS_WITH_AS(decode(few, 2), doctest::Contains("'values' has 1 entries, expected 3"), Error);
  body.steps[0].code = OpCode::k_matmul;
  CHECK_THROWS_WITH_AS(encode(body, 2), doctest::Contains("matmul is not elementwise"), Error);
}

TEST_CASE("gradient rules give each float operand a gradient of its shape and dtype") {
  struct Row {
    OpCode code;
    std::vector<TensorType> inputs;
    Attrs attrs;
  };
  const TensorType bits{DType::kBool, {4, 3}};
  const Row rows[] = {
      {OpCode::k_add, {f32({4, 3}), f32({3})}, {}},
      {OpCode::k_sub, {f32({3}), f32({4, 1})}, {}},
      {OpCode::k_mul, {f32({4, 3}), f32({})}, {}},
      {OpCode::k_div, {f32({1, 3}), f32({4, 3})}, {}},
      {OpCode::k_pow, {f32({4, 3}), f32({3})}, {}},
      {OpCode::k_maximum, {f32({4, 3}), f32({3})}, {}},
      {OpCode::k_minimum, {f32({4, 3}), f32({4, 1})}, {}},
      {OpCode::k_squared_difference, {f32({4, 3}), f32({3})}, {}},
      {OpCode::k_where, {bits, f32({4, 3}), f32({1, 3})}, {}},
      {OpCode::k_cast, {{DType::kBF16, {4}}}, {{"dtype", std::string("f32")}}},
      {OpCode::k_bce_with_logits, {{DType::kBF16, {4}}, {DType::kBF16, {4}}}, {}},
      {OpCode::k_reduce_sum, {f32({4, 3})}, {{"axes", Ints{0}}}},
      {OpCode::k_reduce_mean, {f32({4, 3})}, {}},
      {OpCode::k_reduce_max, {{DType::kBF16, {4, 3}}}, {{"axes", Ints{-1}}}},
      {OpCode::k_reduce_min, {f32({4, 3})}, {}},
      {OpCode::k_sum_of_squares, {f32({4, 3}), {DType::kBF16, {2}}}, {}},
      {OpCode::k_reshape, {f32({4, 3})}, {{"shape", Ints{12}}}},
      {OpCode::k_transpose, {f32({4, 3, 2})}, {{"perm", Ints{2, 0, 1}}}},
      {OpCode::k_broadcast_to, {f32({4, 1})}, {{"shape", Ints{2, 4, 3}}}},
      {OpCode::k_slice, {f32({4, 7})}, {{"starts", Ints{1, 0}}, {"limits", Ints{3, 7}}, {"strides", Ints{1, 3}}}},
      {OpCode::k_concat, {f32({4, 2}), f32({4, 3})}, {{"axis", int64_t{1}}}},
      {OpCode::k_pad, {f32({4, 2})}, {{"low", Ints{1, 0}}, {"high", Ints{0, 2}}}},
      {OpCode::k_gather, {f32({4, 9, 3}), i32({5, 6})}, {{"axis", int64_t{1}}}},
      {OpCode::k_cumsum, {f32({4, 3})}, {{"exclusive", true}}},
      {OpCode::k_top_k, {f32({4, 8})}, {{"k", int64_t{3}}}},
      {OpCode::k_matmul, {f32({4, 8}), f32({8, 2}), f32({2})}, {{"activation", std::string("relu")}}},
      {OpCode::k_matmul, {f32({8, 4}), f32({2, 8})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {OpCode::k_matmul, {f32({7, 8, 4}), f32({2, 8}), f32({2})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {OpCode::k_matmul, {f32({7, 4, 8}), f32({7, 8, 2}), f32({2})}, {}},
      {OpCode::k_matmul, {f32({7, 8, 4}), f32({7, 2, 8})}, {{"transpose_a", true}, {"transpose_b", true}}},
      {OpCode::k_matmul,
       {{DType::kBF16, {4, 8}}, {DType::kBF16, {8, 2}}, f32({2})},
       {{"out_dtype", std::string("f32")}}},
  };
  std::vector<Row> all(std::begin(rows), std::end(rows));
  for (const OpCode code :
       {OpCode::k_neg, OpCode::k_abs, OpCode::k_exp, OpCode::k_log, OpCode::k_log1p, OpCode::k_sqrt, OpCode::k_rsqrt,
        OpCode::k_square, OpCode::k_reciprocal, OpCode::k_sin, OpCode::k_cos, OpCode::k_erf, OpCode::k_tanh,
        OpCode::k_sigmoid, OpCode::k_softplus, OpCode::k_relu, OpCode::k_gelu, OpCode::k_gelu_erf, OpCode::k_silu})
    all.push_back({code, {f32({4, 3})}, {}});
  for (const Row& row : all) {
    Case c(row.code, row.inputs, row.attrs);
    CAPTURE(print(c.graph));
    std::vector<TensorId> seeds;
    for (const TensorId out : Op(c.graph.op(c.id)).outputs) {
      const Tensor t = c.graph.tensor(out);
      if (!is_float(t.dtype)) {
        seeds.push_back(kNone);
        continue;
      }
      const OpId one = append_op(c.graph, OpCode::k_fill, {},
                                 {{"shape", t.dims}, {"value", 1.0}, {"dtype", std::string(name_of(t.dtype))}});
      seeds.push_back(c.graph.op(one).outputs[0]);
    }
    GradBuilder builder(c.graph, c.id, seeds);
    builder.needs_grad.assign(c.graph.op(c.id).inputs.size(), true);
    def(row.code).gradient(builder);
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      const TensorId grad = builder.results()[i];
      REQUIRE((grad != kNone) == is_float(row.inputs[i].dtype));
      if (grad != kNone) CHECK(builder.type(grad) == row.inputs[i]);
    }
    CHECK_NOTHROW(verify(c.graph));
    CHECK_NOTHROW(verify_ops(c.graph));
  }
}

TEST_CASE("a fused activation that its result does not determine has no gradient") {
  Case c(OpCode::k_matmul, {f32({4, 8}), f32({8, 2})}, {{"activation", std::string("gelu")}});
  GradBuilder builder(c.graph, c.id, {c.graph.op(c.id).outputs[0]});
  builder.needs_grad.assign(3, true);
  CHECK_THROWS_WITH_AS(def(OpCode::k_matmul).gradient(builder), doctest::Contains("'gelu'"), Error);
}

TEST_CASE("cost: matmul counts multiply and add, a slice only what it moves") {
  CHECK(cost_of(Case(OpCode::k_matmul, {f32({7, 4, 8}), f32({8, 2})}).view()).flops == 2.0 * 7 * 4 * 8 * 2);
  CHECK(cost_of(Case(OpCode::k_matmul_weight_grad, {f32({7, 4, 8}), f32({7, 4, 2})}).view()).flops ==
        2.0 * 7 * 4 * 8 * 2);
  CHECK(cost_of(Case(OpCode::k_slice, {f32({1000})}, {{"limits", Ints{10}}}).view()).bytes == 80);
  CHECK(cost_of(Case(OpCode::k_add, {f32({10}), f32({10})}).view()).bytes == 120);
}

TEST_CASE("a part of a vocabulary is refused whatever its numbers are") {  // found by mutations of plans: an overflow
  for (const int64_t vocabulary : {INT64_MIN, int64_t{-1}, int64_t{15}})
    CHECK_THROWS_WITH_AS(Case(OpCode::k_cross_entropy_stats, {f32({4, 16}), TensorType{DType::kI32, {4}}},
                              {{"vocabulary", vocabulary}, {"label_begin", int64_t{0}}}),
                         doctest::Contains("do not fit 16 columns"), Error);
}
