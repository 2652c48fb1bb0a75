// ir/: sub-axes of reshapes, broadcasting, dtypes, attributes, scopes, the learning rate, the structural verifier.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "base/error.h"
#include "ops/op.h"

using namespace whale;

namespace {

// All shapes without extent-1 dimensions whose elements number `count`.
void factorizations(int64_t count, Dims prefix, std::vector<Dims>& out) {
  if (count == 1) {
    out.push_back(prefix);
    return;
  }
  for (int64_t d = 2; d <= count; ++d) {
    if (count % d != 0) continue;
    Dims next = prefix;
    next.push_back(d);
    factorizations(count / d, next, out);
  }
}

int64_t stride_of(const Dims& dims, int dim) { return row_major_strides(dims)[dim]; }

// Flat indices whose sub-axis is `value`, found on one side by coordinates.
std::vector<int64_t> selected(const Dims& dims, const SubAxis& sub_axis, int64_t extent, int64_t value) {
  std::vector<int64_t> out;
  const int64_t stride = stride_of(dims, sub_axis.dim), size = dims[sub_axis.dim];
  for (int64_t x = 0; x < element_count(dims); ++x) {
    const int64_t coordinate = x / stride % size;
    if (coordinate / sub_axis.inner % extent == value) out.push_back(x);
  }
  return out;
}

// The reference: a sub-axis of the flat index is a pair (low, high), x / low % (high / low). It lies within a dimension
// of stride s and extent d when s | low | high | s d. All pairs that lie within a dimension on both sides.
std::set<std::pair<int64_t, int64_t>> common_sub_axes(const Dims& a, const Dims& b, bool maximal) {
  const int64_t count = element_count(a);
  const auto inside = [](const Dims& dims, int64_t low, int64_t high) {
    for (size_t i = 0; i < dims.size(); ++i) {
      const int64_t s = stride_of(dims, static_cast<int>(i));
      if (low % s == 0 && (s * dims[i]) % high == 0) return true;
    }
    return false;
  };
  std::set<std::pair<int64_t, int64_t>> all;
  for (int64_t low = 1; low <= count; ++low)
    for (int64_t high = low * 2; high <= count; high += low)
      if (count % high == 0 && inside(a, low, high) && inside(b, low, high)) all.insert({low, high});
  if (!maximal) return all;
  std::set<std::pair<int64_t, int64_t>> top;
  for (const auto& p : all) {
    const bool covered = std::any_of(all.begin(), all.end(), [&](const auto& q) {
      return q != p && p.first % q.first == 0 && q.second % p.second == 0;
    });
    if (!covered) top.insert(p);
  }
  return top;
}

Graph small() {  // y = x w, loss = sum(y)
  Graph g;
  g.name = "small";
  g.tensors.resize(2);
  g.tensors[0] = {"x", DType::kF32, {4, 3}, TensorKind::kInput, kNone, 0, 0};
  g.tensors[1] = {"w", DType::kF32, {3, 2}, TensorKind::kVariable, kNone, 0, -1};
  g.inputs = {0};
  Variable w;
  w.tensor = 1;
  w.init = {InitKind::kNormal, 0, 0.5, "", ""};
  g.variables.push_back(w);
  Scope replica;
  replica.kind = ScopeKind::kReplica;
  replica.parent = 0;
  Scope block;
  block.kind = ScopeKind::kName;
  block.parent = 1;
  block.name = "block.0";
  g.scopes.push_back(replica);
  g.scopes.push_back(block);
  const OpId product = append_op(g, OpCode::k_matmul, {0, 1}, {}, 2);
  const OpId sum = append_op(g, OpCode::k_reduce_sum, {g.op(product).outputs[0]}, {}, 1, "total");
  g.training.loss = g.op(sum).outputs[0];
  g.outputs.push_back({"y", g.op(product).outputs[0]});
  return g;
}

}  // namespace

TEST_CASE("refine_reshape finds exactly the sub-axes that both sides have, for all pairs of small shapes") {
  for (const int64_t count : {1, 2, 12, 24, 30, 36, 64}) {
    std::vector<Dims> shapes;
    factorizations(count, {}, shapes);
    for (const Dims& a : shapes) {
      for (const Dims& b : shapes) {
        CAPTURE(to_string(a));
        CAPTURE(to_string(b));
        std::set<std::pair<int64_t, int64_t>> found;
        int64_t last = count + 1;
        for (const SharedSubAxis& s : refine_reshape(a, b)) {
          REQUIRE(s.from.outer * s.extent * s.from.inner == a[s.from.dim]);
          REQUIRE(s.to.outer * s.extent * s.to.inner == b[s.to.dim]);
          REQUIRE(s.extent > 1);
          for (int64_t value = 0; value < s.extent; ++value)
            REQUIRE(selected(a, s.from, s.extent, value) == selected(b, s.to, s.extent, value));
          const int64_t low = stride_of(a, s.from.dim) * s.from.inner;
          REQUIRE(low < last);  // outermost first
          last = low;
          found.insert({low, low * s.extent});
        }
        REQUIRE(found == common_sub_axes(a, b, true));
      }
    }
  }
}

TEST_CASE("refine_reshape: extents of 1 carry no sub-axis, batches pass through merged dimensions") {
  const auto merged = refine_reshape({16, 1, 128, 64}, {2048, 64});
  REQUIRE(merged.size() == 3);
  CHECK(merged[0].extent == 16);
  CHECK(merged[0].from == SubAxis{0, 1, 1});
  CHECK(merged[0].to == SubAxis{0, 1, 128});
  CHECK(merged[1].from == SubAxis{2, 1, 1});
  CHECK(merged[1].to == SubAxis{0, 16, 1});
  CHECK(refine_reshape({3, 5}, {5, 3}).empty());
  CHECK(refine_reshape({0, 4}, {0}).empty());
  CHECK_THROWS_WITH_AS(refine_reshape({2, 3}, {5}), doctest::Contains("[2, 3] (6 elements)"), Error);
}

TEST_CASE("shapes: counts, strides, broadcasting") {
  CHECK(element_count({}) == 1);
  CHECK(element_count({3, 0, 1 << 30, 1 << 30, 1 << 30}) == 0);
  CHECK_THROWS_AS(element_count({int64_t{1} << 40, int64_t{1} << 40}), Error);
  CHECK_THROWS_AS(element_count({-1}), Error);
  CHECK(row_major_strides({2, 3, 4}) == Dims{12, 4, 1});
  CHECK(broadcast_dims({4, 1, 3}, {5, 1}) == Dims{4, 5, 3});
  CHECK(broadcast_dims({}, {2}) == Dims{2});
  CHECK(broadcast_dims({1}, {0}) == Dims{0});
  CHECK_THROWS_WITH_AS(broadcast_dims({4, 3}, {2, 3}), doctest::Contains("[4, 3] and [2, 3]"), Error);
  CHECK_THROWS_AS(broadcast_dims({2}, {0}), Error);
}

TEST_CASE("dtypes: names both ways, numbers") {
  for (int number = 1; number <= 9; ++number) {
    REQUIRE(is_valid_dtype(number));
    const auto t = static_cast<DType>(number);
    CHECK(parse_dtype(name_of(t)) == t);
    CHECK((is_float(t) + is_integer(t) + (t == DType::kBool)) == 1);
  }
  CHECK_FALSE(is_valid_dtype(0));
  CHECK_FALSE(is_valid_dtype(11));
  CHECK(parse_dtype("bfloat16") == DType::kBF16);
  CHECK(size_of(DType::kF64) == 8);
  CHECK_THROWS_WITH_AS(parse_dtype("float"), doctest::Contains("'float'"), Error);
  CHECK_THROWS_AS(size_of(static_cast<DType>(77)), Error);
}

TEST_CASE("attributes: getters and text") {
  const Attrs attrs{
      {"i", int64_t{3}}, {"f", 2.0}, {"s", std::string("hi")}, {"v", std::vector<int64_t>{1, 2}}, {"b", true}};
  CHECK(attr_int(attrs, "i") == 3);
  CHECK(attr_int(attrs, "none", 7) == 7);
  CHECK(attr_float(attrs, "f") == 2.0);
  CHECK(attr_string(attrs, "none").empty());
  CHECK(attr_ints(attrs, "v").size() == 2);
  CHECK(attr_bool(attrs, "b"));
  CHECK_THROWS_WITH_AS(attr_int(attrs, "s"), doctest::Contains("'s' is \"hi\", expected an integer"), Error);
  CHECK(to_string(Attr(2.0)) == "2.0");
  CHECK(to_string(Attr(1e-5)) == "1e-05");
  CHECK(to_string(Attr(std::vector<double>{1, 0.5})) == "[1.0, 0.5]");
}

TEST_CASE("learning rate: warm-up from 0, then decay to the final fraction") {
  LearningRateSchedule s{LrScheduleKind::kCosine, 10, 110, 0.1};
  CHECK(learning_rate_at(2, s, 0) == 0);
  CHECK(learning_rate_at(2, s, 5) == doctest::Approx(1));
  CHECK(learning_rate_at(2, s, 10) == doctest::Approx(2));
  CHECK(learning_rate_at(2, s, 60) == doctest::Approx(2 * 0.55));
  CHECK(learning_rate_at(2, s, 110) == doctest::Approx(0.2));
  CHECK(learning_rate_at(2, s, 100000) == doctest::Approx(0.2));
  s.kind = LrScheduleKind::kLinear;
  CHECK(learning_rate_at(2, s, 35) == doctest::Approx(2 * (1 - 0.9 * 0.25)));
  s.kind = LrScheduleKind::kInverseSqrt;
  CHECK(learning_rate_at(2, s, 40) == doctest::Approx(1));
  CHECK(learning_rate_at(2, s, 100000000) == doctest::Approx(0.2));
  CHECK(learning_rate_at(3, {}, 12345) == 3);
}

TEST_CASE("use counts and scope paths") {
  const Graph g = small();
  CHECK(g.scope_path(2) == "replica/block.0");
  CHECK(g.scope_path(0).empty());
  CHECK(use_counts(g) == std::vector<int>{1, 1, 2, 1});
}

TEST_CASE("verify accepts a graph and names what is wrong with each broken one") {
  REQUIRE_NOTHROW(verify(small()));
  REQUIRE_NOTHROW(verify_ops(small()));
  struct Mutation {
    const char* message;
    std::function<void(Graph&)> apply;
  };
  const Mutation mutations[] = {
      {"scope 0 must be the root", [](Graph& g) { g.scopes.clear(); }},
      {"expected an earlier scope", [](Graph& g) { g.scopes[1].parent = 2; }},
      {"expected an earlier scope", [](Graph& g) { g.scopes[2].parent = -1; }},
      {"only scope 0 is the root", [](Graph& g) { g.scopes[1].kind = ScopeKind::kRoot; }},
      {"has kind number 99", [](Graph& g) { g.scopes[1].kind = static_cast<ScopeKind>(99); }},
      {"has no name", [](Graph& g) { g.scopes[2].name.clear(); }},
      {"must be finite",
       [](Graph& g) {
         g.scopes[1].shares = {1, std::nan("")};
       }},
      {"at least one must be positive",
       [](Graph& g) {
         g.scopes[1].shares = {0, 0};
       }},
      {"2 shares for a count of 3",
       [](Graph& g) {
         g.scopes[1].count = 3, g.scopes[1].shares = {1, 2};
       }},
      {"expected 'sample' or 'micro_batch'", [](Graph& g) { g.scopes[1].by = "rows"; }},
      {"schedule is 'fast'", [](Graph& g) { g.scopes[1].schedule = "fast"; }},
      {"must not be negative", [](Graph& g) { g.scopes[1].count = -1; }},
      {"dtype number 0", [](Graph& g) { g.tensors[0].dtype = DType{}; }},
      {"negative extent", [](Graph& g) { g.tensors[0].dims = {-4}; }},
      {"rank 9", [](Graph& g) { g.tensors[0].dims.assign(9, 1); }},
      {"too large", [](Graph& g) { g.tensors[0].dims = {int64_t{1} << 60}; }},
      {"batch dimension 2", [](Graph& g) { g.tensors[0].batch_dim = 2; }},
      {"no input but has batch dimension", [](Graph& g) { g.tensors[1].batch_dim = 0; }},
      {"fed from outside but op 0", [](Graph& g) { g.tensors[0].producer = 0; }},
      {"has producer 7", [](Graph& g) { g.tensors[2].producer = 7; }},
      {"does not list it there", [](Graph& g) { g.tensors[2].output = 1; }},
      {"does not list it there", [](Graph& g) { g.tensors[2].producer = 1; }},
      {"has scope 9", [](Graph& g) { g.ops[0].scope = 9; }},
      {"operand 0 is tensor 12", [](Graph& g) { g.ops[0].inputs[0] = 12; }},
      {"operand 0 is tensor -2", [](Graph& g) { g.ops[0].inputs[0] = -2; }},
      {"which is made later", [](Graph& g) { g.ops[0].inputs[0] = 3; }},
      {"does not list it there", [](Graph& g) { std::swap(g.ops[0], g.ops[1]); }},
      {"something else makes it", [](Graph& g) { g.ops[1].outputs.push_back(2); }},
      {"output 1 is tensor 44", [](Graph& g) { g.ops[1].outputs.push_back(44); }},
      {"origin is op 1", [](Graph& g) { g.ops[1].origin = 1; }},
      {"op 1 has no name", [](Graph& g) { g.ops[1].name.clear(); }},
      {"which is no input", [](Graph& g) { g.inputs.push_back(1); }},
      {"listed twice", [](Graph& g) { g.inputs.push_back(0); }},
      {"not in the list of inputs", [](Graph& g) { g.inputs.clear(); }},
      {"input has no name", [](Graph& g) { g.tensors[0].name.clear(); }},
      {"which is no variable", [](Graph& g) { g.variables[0].tensor = 0; }},
      {"'w' is listed twice", [](Graph& g) { g.variables.push_back(g.variables[0]); }},
      {"not in the list of variables", [](Graph& g) { g.variables.clear(); }},
      {"variable has no name", [](Graph& g) { g.tensors[1].name.clear(); }},
      {"keep that name", [](Graph& g) { g.tensors[1].name = "__metadata__"; }},
      {"cannot be trained", [](Graph& g) { g.tensors[1].dtype = DType::kI32; }},
      {"its next value", [](Graph& g) { g.variables[0].next = 0; }},
      {"which is no parameter", [](Graph& g) { g.variables[0].role = Role::kState, g.variables[0].state_name = "m"; }},
      {"is no optimizer state", [](Graph& g) { g.variables[0].owner = 1; }},
      {"'w': its initial value is 300, which u8 does not have",
       [](Graph& g) {
         g.tensors[1].dtype = DType::kU8, g.variables[0].init.kind = InitKind::kConstant, g.variables[0].init.a = 300;
       }},
      {"must be finite", [](Graph& g) { g.variables[0].init.b = INFINITY; }},
      {"output 'y' is tensor 50", [](Graph& g) { g.outputs[0].tensor = 50; }},
      {"two outputs are named 'y'", [](Graph& g) { g.outputs.push_back(g.outputs[0]); }},
      {"that name is the loss's", [](Graph& g) { g.outputs[0].name = "loss"; }},
      {"are those of gradients", [](Graph& g) { g.outputs[0].name = "grad:w"; }},
      {"expected a floating point scalar", [](Graph& g) { g.training.loss = 2; }},
      {"the loss is tensor 9", [](Graph& g) { g.training.loss = 9; }},
      {"beta1 is 1, expected 0 <= beta1 < 1", [](Graph& g) { g.training.optimizer.beta1 = 1; }},
      {"clip_threshold is 0, expected above 0",
       [](Graph& g) {
         g.training.optimizer.kind = OptimizerKind::kAdafactor, g.training.optimizer.clip_threshold = 0;
       }},
      {"learning_rate is nan", [](Graph& g) { g.training.optimizer.learning_rate = std::nan(""); }},
      {"accumulation is 0", [](Graph& g) { g.training.accumulation = 0; }},
      {"must end after its 5 warm-up steps",
       [](Graph& g) {
         g.training.lr_schedule = {LrScheduleKind::kCosine, 5, 5, 0};
       }},
  };
  for (const Mutation& mutation : mutations) {
    CAPTURE(mutation.message);
    Graph g = small();
    mutation.apply(g);
    CHECK_THROWS_WITH_AS(verify(g), doctest::Contains(mutation.message), Error);
  }
}

TEST_CASE("attributes are a sorted map of names") {
  std::mt19937 random(7);
  std::map<std::string, Attr> expected;
  Attrs attrs;
  for (int step = 0; step < 2000; ++step) {
    const std::string name(1 + random() % 3, static_cast<char>('a' + random() % 6));
    const auto value = static_cast<int64_t>(step);
    switch (random() % 4) {
      case 0: CHECK(attrs.erase(name) == expected.erase(name)); break;
      case 1: CHECK(attrs.try_emplace(name, value).second == expected.try_emplace(name, value).second); break;
      case 2: attrs[name] = expected[name] = value; break;
      default:
        CHECK(attrs.contains(name) == expected.contains(name));
        CHECK(attr_int(attrs, name, -1) ==
              (expected.contains(name) ? std::get<int64_t>(expected.at(name)) : int64_t{-1}));
    }
    REQUIRE(std::equal(attrs.begin(), attrs.end(), expected.begin(), expected.end(),
                       [](const auto& a, const auto& b) { return a.first == b.first && a.second == b.second; }));
  }
  CHECK_THROWS_AS(attrs.at("none"), std::out_of_range);
  const Attrs listed{{"b", int64_t{1}}, {"a", true}, {"b", int64_t{2}}};
  CHECK(listed == Attrs{{"a", true}, {"b", int64_t{1}}});
}

TEST_CASE("verify_ops compares attributes and types with the op definitions") {
  Graph g = small();
  g.tensors[2].dims = {4, 5};
  CHECK_THROWS_WITH_AS(verify_ops(g), doctest::Contains("matmul: results are (f32[4,5]), expected (f32[4,2])"), Error);
  g = small();
  g.ops[0].attrs.erase("activation");
  CHECK_THROWS_WITH_AS(verify_ops(g), doctest::Contains("attributes are incomplete"), Error);
  g = small();
  g.ops[0].inputs.pop_back();
  CHECK_THROWS_WITH_AS(verify_ops(g), doctest::Contains("has 2 operands, expected 3"), Error);
  g = small();
  g.ops[0].code = static_cast<OpCode>(9999);
  try {
    verify_ops(g);
    FAIL("an unknown op number passed");
  } catch (const Error& e) {
    CHECK(e.message() == "no op has number 9999");
    CHECK(e.where().op == "matmul_0");
    CHECK(e.where().scope == "replica/block.0");
  }
}

TEST_CASE("print: golden text") {
  CHECK(print(small()) == R"(graph small
  %0 = input x : f32[4,3] batch 0
  %1 = variable w : f32[3,2] normal(0, 0.5)
  %2 = matmul %0, %1 : f32[4,2]  # matmul_0 replica/block.0
  %3 = reduce_sum %2 : f32[]  # total replica
  output y = %2
  loss = %3
)");
}
