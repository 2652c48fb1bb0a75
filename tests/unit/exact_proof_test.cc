// In exact mode a proof says what the bits are as a number: damage that leaves a plan right to rounding changes it.
#include <doctest/doctest.h>

#include <algorithm>

#include "own_programs.h"
#include "plan/row_waits.h"
#include "plan_damage.h"
#include "proof_case.h"
#include "prove/collective.h"
#include "prove/kernel.h"
#include "unit/caught.h"
#include "unit/small_models.h"
#include "unit/trained.h"

using namespace whale;
using namespace whale::test;

namespace {

EntryProof proof_of(Plan& plan) {
  for (Program& p : plan.entries[0].programs) add_row_waits(p);
  return prove(plan, plan.entries[0]);
}

// Both are proven; whether the numbers are one, and the bits that devices make.
struct Alike {
  bool order = false, bits = false;
};
Alike compare(Plan a, Plan b) {
  const EntryProof one = proof_of(a), other = proof_of(b);
  CHECK_MESSAGE(one.verdict == ProofVerdict::kProven, one.what);
  CHECK_MESSAGE(other.verdict == ProofVerdict::kProven, other.what);
  return {one.order == other.order, small::train(a, 1) == small::train(b, 1)};
}

// relu(x w1) w2, and x w1 handed out.
Plan products(const char* devices, const char* strategy, Precision precision = Precision::kFloat32) {
  using enum OpCode;
  small::Model m;
  m.g.name = "products";
  const TensorId x = m.input("x", {8, 64});
  const TensorId y = m.op(k_matmul, {x, m.variable("w1", {64, 8})}, {}, "mm1");
  const TensorId h = m.op(k_relu, {y}, {}, "act");
  m.minimize(m.op(k_reduce_mean, {m.op(k_matmul, {h, m.variable("w2", {8, 4})}, {}, "mm2")}, {}, "loss"),
             OptimizerKind::kSgd);
  m.g.outputs = {{"logits", y}};
  Plan plan = plan_of(m.g, devices, strategy, [&](CompileOptions& o) {
    o.exact = true, o.fusion = false, o.accumulation = 1, o.overlap = false, o.precision = precision;
  });
  give_own_programs(plan.entries[0]);
  return plan;
}

size_t place(const Segment& s, std::string_view name) {
  const auto at = std::ranges::find(s.instructions, name, &Instruction::name);
  if (at == s.instructions.end()) throw std::runtime_error("no " + std::string(name));
  return static_cast<size_t>(at - s.instructions.begin());
}

// An all_reduce over a group's part, of one buffer in its place.
Instruction all_reduce(const char* name, BufferId of, int32_t group) {
  Instruction i;
  i.work = work::Collective{.op = OpCode::k_all_reduce, .group = group};
  i.name = name, i.in = i.out = {of};
  return i;
}
Instruction slice_of(const char* name, BufferId from, BufferId to, Interval columns) {
  return made(OpCode::k_local_slice, name, {from}, {to},
              {{"sub_axis", Ints{1, 1, 1}}, {"begin", columns.begin}, {"end", columns.end}});
}

// The sum that act reads over one axis and then the other, and the one that is handed out the other way round;
// `exchanged`: the orders are.
Plan summed_twice(bool exchanged) {
  Plan plan = products("ref:4", "split(2, factor=k) > split(2, factor=k)");
  for (const DeviceRow& row : plan.entries[0].rows) {
    Program& p = plan.entries[0].programs[row.program];
    Segment& s = p.segments[0];
    for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const size_t at = place(s, "mm1.part");  // a reduce_scatter over each axis
    const Instruction first = s.instructions[at], second = s.instructions[at + 1];
    const BufferId sum = fresh(p, "sum", {8, 8}), other = fresh(p, "other", {8, 8});
    const int32_t a = first.as<work::Collective>()->group, b = second.as<work::Collective>()->group;
    const auto member = [&](int32_t group) -> int64_t {
      for (const auto& part : plan.groups[group].parts)
        if (const auto found = std::ranges::find(part, row.device); found != part.end()) return found - part.begin();
      return -1;
    };
    const int64_t begin = 4 * member(a) + 2 * member(b);
    const std::vector<Instruction> instead{slice_of("sum", first.in[0], sum, {0, 8}),
                                           slice_of("other", first.in[0], other, {0, 8}),
                                           all_reduce("sum.1", sum, exchanged ? b : a),
                                           all_reduce("sum.2", sum, exchanged ? a : b),
                                           all_reduce("other.1", other, exchanged ? a : b),
                                           all_reduce("other.2", other, exchanged ? b : a),
                                           slice_of("mm1.part", sum, second.out[0], {begin, begin + 2})};
    const BufferId handed_out = s.instructions[place(s, "bucket.1")].out[0];
    s.instructions.erase(s.instructions.begin() + std::ptrdiff_t(at), s.instructions.begin() + std::ptrdiff_t(at) + 2);
    s.instructions.insert(s.instructions.begin() + std::ptrdiff_t(at), instead.begin(), instead.end());
    for (const char* name : {"bucket.0", "bucket.1"}) {
      Instruction& i = s.instructions[place(s, name)];
      i.in.erase(i.in.begin()), i.out.erase(i.out.begin());
      auto& cuts = i.as<work::Collective>()->cuts;
      if (cuts.size() > 1) cuts.resize(1);
    }
    for (Instruction& i : s.instructions) std::ranges::replace(i.in, handed_out, other);
  }
  return plan;
}

}  // namespace

TEST_CASE("exact proofs: who reads which of two sums") {
  const Alike found = compare(summed_twice(false), summed_twice(true));
  CHECK(!found.bits);
  CHECK(!found.order);
  const Alike same = compare(summed_twice(true), summed_twice(true));
  CHECK(same.bits);
  CHECK(same.order);
}

TEST_CASE("exact proofs: zeros that are added") {
  using enum OpCode;
  small::Model m;
  m.g.name = "negative";
  const TensorId x = m.input("x", {8, 4}), y = m.op(k_neg, {m.op(k_relu, {x}, {}, "r")}, {}, "y");
  m.minimize(m.op(k_reduce_mean, {m.op(k_matmul, {y, m.variable("w", {4, 3})}, {}, "mm")}, {}, "loss"),
             OptimizerKind::kSgd);
  m.g.outputs = {{"logits", y}};
  const Plan plan = plan_of(m.g, "ref:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
  Plan with = plan;
  Program& p = with.entries[0].programs[0];
  Segment& s = p.segments[0];
  const BufferId of = named(p, "y").out[0], zeros = fresh(p, "zeros", {8, 4}), sum = fresh(p, "sum", {8, 4});
  for (size_t k = place(s, "y") + 1; k < s.instructions.size(); ++k)
    std::ranges::replace(s.instructions[k].in, of, sum);
  put_behind(p, "y", made(k_add, "sum", {of, zeros}, {sum}));
  put_behind(
      p, "y",
      made(k_fill, "zeros", {}, {zeros}, {{"shape", Ints{8, 4}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
  for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
  const Alike found = compare(plan, with);  // -0 + 0 is 0
  CHECK(!found.order);
}

TEST_CASE("exact proofs: parts of a product in a wider type") {
  const Plan plan = products("ref:4", "split(4, factor=k)", Precision::kBFloat16);
  Plan wide = plan;
  for (Program& p : wide.entries[0].programs) {
    Segment& s = p.segments[0];
    for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
    Instruction& product = s.instructions[place(s, "mm1")];
    const BufferId narrow = product.out[0], sum = fresh(p, "sum", {8, 8}), all = fresh(p, "all", {8, 8}, DType::kBF16);
    product.as<work::Kernel>()->attrs["out_dtype"] = std::string("f32"), product.out = {sum};
    const Instruction scatter = s.instructions[place(s, "mm1.part")];
    const auto& c = *scatter.as<work::Collective>();
    Instruction part = slice_of("mm1.part", all, scatter.out[0], {});
    for (size_t m = 0; m < 4; ++m)
      if (&p == &wide.entries[0].programs[wide.entries[0].rows[m].program])
        part = slice_of("mm1.part", all, scatter.out[0], c.cuts[0].cuts[m]);
    s.instructions[place(s, "mm1.part")] = part;
    put_before(p, "mm1.part", made(OpCode::k_cast, "all", {sum}, {all}, {{"dtype", std::string("bf16")}}));
    put_before(p, "all", all_reduce("sum.all", sum, c.group));
    Instruction& bucket = s.instructions[place(s, "bucket.0")];
    const auto at = std::ranges::find(bucket.in, narrow) - bucket.in.begin();
    const BufferId handed_out = bucket.out.at(static_cast<size_t>(at));
    bucket.in.erase(bucket.in.begin() + at), bucket.out.erase(bucket.out.begin() + at);
    if (bucket.in.empty()) drop(p, "bucket.0");
    for (Instruction& i : s.instructions) std::ranges::replace(i.in, handed_out, all);
  }
  const Alike found = compare(plan, wide);
  CHECK(!found.bits);
  CHECK(!found.order);
}

// A kernel that makes all of an op at once may have other bits than the ones that make it in parts.
TEST_CASE("exact proofs: another kernel has another number") {
  using enum OpCode;
  small::Model m;
  m.g.name = "classes";
  const TensorId x = m.input("x", {4, 3}), y = m.input("y", {4}, DType::kI32);
  const TensorId logits = m.op(k_matmul, {x, m.variable("w", {3, 5})}, {}, "mm");
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y})}, {}, "loss"), OptimizerKind::kSgd);
  m.g.outputs = {{"logits", logits}};
  const auto order_on = [&](const char* devices, const char* strategy) {
    Plan plan = plan_of(m.g, devices, strategy, [](CompileOptions& o) { o.exact = true; });
    return proof_of(plan).order;
  };
  const std::string one = order_on("null:1", "replica(1)");
  CHECK(one.size() == 16);
  CHECK(one == order_on("null:2", "pipeline(2)"));
  CHECK(one != order_on("null:2", "split(2)"));
}

TEST_CASE("exact proofs: sums in another order have another number") {
  using enum OpCode;
  small::Model m;
  m.g.name = "halves";
  const TensorId x = m.input("x", {8, 4});
  const TensorId h = m.op(k_relu, {m.op(k_matmul, {x, m.variable("w1", {4, 6})}, {}, "mm1")}, {}, "act");
  m.minimize(m.op(k_reduce_mean, {m.op(k_matmul, {h, m.variable("w2", {6, 4})}, {}, "mm2")}, {}, "loss"),
             OptimizerKind::kSgd);
  const auto exact = [&](const char* strategy, int devices, int64_t micro_batches) {
    return plan_of(m.g, fmt::format("null:{}", devices), strategy,
                   [&](CompileOptions& o) { o.exact = true, o.fusion = false, o.accumulation = micro_batches; });
  };
  // 0 + 2 + 1 + 3 of four parts of a split; where there are two, they are the same sum in either order.
  for (const size_t parts : {size_t{2}, size_t{4}}) {
    Plan plan = exact(parts == 2 ? "split(2, factor=k)" : "split(4, factor=k)", static_cast<int>(parts), 1);
    const EntryProof before = proof_of(plan);
    CHECK_MESSAGE(before.verdict == ProofVerdict::kProven, before.what);
    CHECK(before.order.size() == 16);
    CHECK_MESSAGE(has(before.what, "with order " + before.order), before.what);
    Group other = plan.groups.at(0);
    std::swap(other.parts[0][parts / 2 - 1], other.parts[0][parts / 2]);
    plan.groups.push_back(other);
    for (Program& p : plan.entries[0].programs)
      for (Segment& s : p.segments)
        for (Instruction& i : s.instructions)
          if (auto* c = i.as<work::Collective>(); c && c->op == k_all_reduce)
            c->group = static_cast<int32_t>(plan.groups.size()) - 1;
    const EntryProof after = proof_of(plan);
    CHECK_MESSAGE(after.verdict == ProofVerdict::kProven, after.what);
    CHECK((after.order == before.order) == (parts == 2));
  }
  // (0 + 2) + (1 + 3) of four micro-batches, each on a device of its own.
  Plan rows = exact("replica(4)", 4, 4);
  CHECK(proof_of(rows).verdict == ProofVerdict::kProven);
  for (Program& p : rows.entries[0].programs)
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (auto* k = i.as<work::Kernel>(); k && k->op == k_local_slice && attr_ints(k->attrs, "sub_axis")[0] == 0)
          for (const auto& [from, to] : {std::pair{1, 2}, {2, 1}})
            if (attr_int(k->attrs, "begin") == from) {
              k->attrs["begin"] = int64_t{to}, k->attrs["end"] = int64_t{to} + 1;
              break;
            }
  for (Program& p : rows.entries[0].programs) add_row_waits(p);
  const EntryProof turned = proof_of(rows);
  CHECK_MESSAGE(turned.verdict == ProofVerdict::kRefuted, turned.what);
  CHECK(has(turned.what, "no halves of a node of the tree"));
  // The mean of each micro-batch before they are added, and of their sum.
  Plan plan = exact("replica(1)", 1, 2);
  const EntryProof before = proof_of(plan);
  Program& p = plan.entries[0].programs[0];
  Instruction scaled, fill;
  for (const Instruction& i : p.segments.back().instructions)
    if (i.kernel() && i.kernel()->op == k_mul) scaled = i;
  const BufferId number = fresh(p, "number", {}), sum = scaled.in.at(0);
  for (Instruction& i : p.segments.back().instructions) {
    if (i.out == BufferIds{scaled.in[1]}) fill = i;
    for (BufferId& id : i.in)
      if (id == scaled.out[0]) id = sum;
  }
  drop(p, scaled.name.c_str());
  for (Instruction* i : {&fill, &scaled}) i->waits.clear();
  fill.out = {number};
  for (Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (has(s.instructions[k].name, "reduce_sum")) {
        const BufferId of = s.instructions[k].out[0];
        if (has(p.buffers[size_t(of)].name, ".sum")) continue;
        scaled.in = {of, number}, scaled.out = {of};
        shift(s, k + 1, 2);
        s.instructions.insert(s.instructions.begin() + std::ptrdiff_t(k) + 1, {fill, scaled});
        break;
      }
  for (Program& each : plan.entries[0].programs) add_row_waits(each);
  const EntryProof after = proof_of(plan);
  CHECK_MESSAGE(after.verdict == ProofVerdict::kProven, after.what);
  CHECK(after.order != before.order);
  plan.options.exact = false;
  CHECK(proof_of(plan).order.empty());
}

// 0 x is -0 where x is less than 0.
TEST_CASE("exact proofs: a product with zeros is no zeros") {
  using enum OpCode;
  const auto fill = [](const char* name, BufferId to, Dims dims) {
    return made(k_fill, name, {}, {to}, {{"shape", std::move(dims)}, {"value", 0.0}, {"dtype", std::string("f32")}});
  };
  const auto in_order = [](Plan& plan) {
    for (Segment& s : plan.entries[0].programs[0].segments)
      for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
  };
  const auto is_proven = [](Plan plan) { return proof_of(plan).verdict == ProofVerdict::kProven; };
  for (const bool turned : {true, false}) {
    small::Model m;
    m.g.name = "zero";
    const TensorId x = m.input("x", {8, 4});
    const TensorId z = m.op(k_fill, {}, {{"shape", Ints{8, 4}}, {"value", 0.0}, {"dtype", std::string("f32")}}, "z");
    const TensorId q = m.op(k_mul, {z, x}, {}, "q"), n = m.op(k_neg, {m.op(k_relu, {x}, {}, "r")}, {}, "n");
    const Attrs turn{{"perm", Ints{1, 0}}};
    m.g.outputs = {
        {"y", turned ? m.op(k_add, {m.op(k_transpose, {n}, turn, "nt"), m.op(k_transpose, {q}, turn, "qt")}, {}, "y")
                     : m.op(k_add, {n, q}, {}, "y")}};
    const Plan right =
        plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false, o.exact = true; });
    CHECK(is_proven(right));
    Plan other = right;
    Program& p = other.entries[0].programs[0];
    if (turned) {  // a transpose of them
      named(p, "qt") = fill("qt", named(p, "qt").out[0], {4, 8});
      in_order(other);
      CHECK(!is_proven(other));
      other.options.exact = false;
      CHECK(is_proven(other));
      continue;
    }
    named(p, "q") = fill("q", named(p, "q").out[0], {8, 4});
    in_order(other);
    CHECK(!is_proven(other));
    other.options.exact = false;
    CHECK(is_proven(other));
    Plan half = right;  // the first rows of a buffer one way, the others another
    Program& h = half.entries[0].programs[0];
    const Instruction product = named(h, "q");
    const BufferId whole = product.out[0], rest = fresh(h, "rest", {4, 4});
    put_behind(h, "q", made(k_concat, "both", {rest, fresh(h, "first", {4, 4})}, {whole}, {{"axis", int64_t{0}}}));
    const BufferId first = named(h, "both").in[1], all = fresh(h, "all", {8, 4});
    named(h, "q").out = {all};
    put_behind(h, "q", fill("rest", rest, {4, 4}));
    put_behind(h, "q",
               made(k_local_slice, "first", {all}, {first},
                    {{"sub_axis", Ints{0, 1, 1}}, {"begin", int64_t{4}}, {"end", int64_t{8}}}));
    in_order(half);
    CHECK(!is_proven(half));
  }
}

TEST_CASE("exact proofs: a number of -0 is not 0") {
  using enum OpCode;
  small::Model m;
  m.g.name = "padded";
  const TensorId p = m.op(k_pad, {m.input("x", {4, 4})}, {{"low", Ints{0, 1}}, {"high", Ints{0, 1}}}, "pad");
  m.g.outputs = {{"y", m.op(k_reciprocal, {p}, {}, "r")}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
  CHECK(proof_of(plan).verdict == ProofVerdict::kProven);
  named(plan.entries[0].programs[0], "pad").as<work::Kernel>()->attrs["value"] = -0.0;
  CHECK(proof_of(plan).verdict == ProofVerdict::kRefuted);

  // 0 times a number that is less than 0 is -0.
  const auto times = [](double number) {
    small::Model other;
    other.g.name = "times";
    other.g.outputs = {{"y", other.op(k_neg, {other.input("x", {4, 4})}, {}, "y")}};
    Plan with = plan_of(other.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
    Program& p = with.entries[0].programs[0];
    const BufferId zero = fresh(p, "zero", {4, 4}), factor = fresh(p, "factor", {4, 4}),
                   product = fresh(p, "0", {4, 4}), sum = fresh(p, "sum", {4, 4});
    const auto fill = [&](BufferId to, double value) {
      const Attrs all{{"shape", Ints{4, 4}}, {"value", value}, {"dtype", std::string("f32")}};
      put_before(p, "fetch.y", made(k_fill, "number", {}, {to}, all));
    };
    fill(zero, 0), fill(factor, number);
    put_before(p, "fetch.y", made(k_mul, "product", {zero, factor}, {product}));
    put_before(p, "fetch.y", made(k_add, "sum", {named(p, "y").out[0], product}, {sum}));
    named(p, "fetch.y").in = {sum};
    for (Instruction& i : p.segments[0].instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const EntryProof proof = proof_of(with);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    return proof.order;
  };
  CHECK(times(1) != times(-1));

  small::Model with;
  with.g.name = "initial";
  with.g.outputs = {{"y", with.op(k_mul, {with.input("x", {4, 4}), with.variable("w", {4, 4})}, {}, "y")}};
  with.g.variables[0].init = {.kind = InitKind::kConstant, .a = 0, .b = 0, .file = {}, .key = {}};
  Plan initial = plan_of(with.g, "null:1", "replica(1)");
  CHECK(proof_of(initial).verdict == ProofVerdict::kProven);
  initial.variables[0].init.a = -0.0;
  CHECK(proof_of(initial).verdict == ProofVerdict::kRefuted);
}

// Rows of a product, each made at once or in two halves, put together two and two and then all.
TEST_CASE("exact proofs: parts made in unlike ways lie where they lie in the tensor") {
  using enum OpCode;
  small::Model m;
  m.g.name = "put";
  m.g.outputs = {{"y", m.op(k_matmul, {m.input("x", {4, 8}), m.variable("w", {8, 6})}, {}, "y")}};
  const Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
  const auto order = [&](const std::vector<int>& halved) {
    Plan other = plan;
    Program& p = other.entries[0].programs[0];
    const Instruction old = named(p, "y");
    const auto put_in = [&](const Instruction& i) { put_before(p, "y", i); };
    const auto slice = [&](BufferId from, Dims dims, int64_t dim, int64_t begin, int64_t end) {
      const BufferId to = fresh(p, "slice", std::move(dims));
      put_in(
          made(k_local_slice, "slice", {from}, {to}, {{"sub_axis", Ints{dim, 1, 1}}, {"begin", begin}, {"end", end}}));
      return to;
    };
    const auto product = [&](const char* name, BufferId a, BufferId b) {
      Instruction i = old;
      i.name = name, i.in[0] = a, i.in[1] = b, i.out = {fresh(p, name, {1, 6})};
      put_in(i);
      return i.out[0];
    };
    const auto row = [&](int64_t n) {
      const BufferId x = slice(old.in[0], {1, 8}, 0, n, n + 1);
      if (std::ranges::count(halved, n) == 0) return product("row", x, old.in[1]);
      const auto half = [&](int64_t begin) {
        return product("half", slice(x, {1, 4}, 1, begin, begin + 4), slice(old.in[1], {4, 6}, 0, begin, begin + 4));
      };
      const BufferId a = half(0), b = half(4);
      put_in(made(k_add, "halves", {a, b}, {a}));
      return a;
    };
    const auto put_together = [&](const BufferIds& parts) {
      const BufferId to = fresh(p, "rows", {static_cast<int64_t>(parts.size()), 6});
      put_in(made(k_concat, "rows", parts, {to}, {{"axis", int64_t{0}}}));
      return to;
    };
    const BufferId a = put_together({row(0), row(halved[0])}), b = put_together({row(3 - halved[0]), row(3)});
    const auto one = [&](BufferId two, int64_t n) { return slice(two, {1, 6}, 0, n, n + 1); };
    const BufferId all = halved[0] == 1 ? put_together({one(a, 0), one(a, 1), one(b, 0), one(b, 1)})
                                        : put_together({one(a, 0), one(b, 0), one(a, 1), one(b, 1)});
    drop(p, "y");
    named(p, "fetch.y").in = {all};
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const EntryProof proof = proof_of(other);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    return proof.order;
  };
  CHECK(order({1, 3}) != order({2, 3}));
  CHECK(order({1, 3}) == order({1, 3}));
}

// The sum of each row, made at once or in two halves, in two columns each.
TEST_CASE("exact proofs: of what is the same all along no place is said") {
  using enum OpCode;
  small::Model m;
  m.g.name = "spread";
  const TensorId sums = m.op(k_reduce_sum, {m.input("x", {4, 8})}, {{"axes", Ints{1}}, {"keep_dims", true}}, "sums");
  m.g.outputs = {{"y", m.op(k_broadcast_to, {sums}, {{"shape", Ints{4, 4}}}, "y")}};
  const Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
  for (const int64_t begin : {0, 2}) {
    Plan other = plan;
    Program& p = other.entries[0].programs[0];
    const Instruction whole = named(p, "sums");
    const auto slice = [&](BufferId from, Dims dims, int64_t at) {
      const BufferId to = fresh(p, "slice", dims);
      put_before(p, "y",
                 made(k_local_slice, "slice", {from}, {to},
                      {{"sub_axis", Ints{1, 1, 1}}, {"begin", at}, {"end", at + dims[1]}}));
      return to;
    };
    const auto half = [&](int64_t at) {
      Instruction i = whole;
      i.name = "half", i.in = {slice(whole.in[0], {4, 4}, at)}, i.out = {fresh(p, "half", {4, 1})};
      put_before(p, "y", i);
      return i.out[0];
    };
    const auto columns = [&](BufferId of) {
      const BufferId to = fresh(p, "columns", {4, 2});
      put_before(p, "y", made(k_broadcast_to, "columns", {of}, {to}, {{"shape", Ints{4, 2}}}));
      return to;
    };
    const BufferId a = half(0), b = half(4), both = fresh(p, "both", {4, 4}), all = fresh(p, "all", {4, 4});
    put_before(p, "y", made(k_add, "halves", {a, b}, {a}));
    const BufferId left = columns(whole.out[0]), right = columns(a);
    put_before(p, "y", made(k_concat, "both", {left, right}, {both}, {{"axis", int64_t{1}}}));
    const BufferId some = slice(both, {4, 2}, begin);
    put_before(p, "y", made(k_concat, "all", {some, some}, {all}, {{"axis", int64_t{1}}}));
    drop(p, "y");
    named(p, "fetch.y").in = {all};
    for (Instruction& i : p.segments[0].instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const EntryProof proof = proof_of(other);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    CHECK(proof.order.empty());
  }
}

// Planning asks for neither in exact mode.
TEST_CASE("exact proofs: sums in another type, by another rule") {
  using enum OpCode;
  small::Model m;
  m.g.name = "types";
  const TensorId y = m.op(k_matmul, {m.input("x", {8, 4}), m.variable("w", {4, 6})}, {}, "mm");
  m.minimize(m.op(k_reduce_mean, {m.op(k_square, {y}, {}, "sq")}, {}, "loss"), OptimizerKind::kSgd);
  const auto exactly = [](CompileOptions& o) { o.exact = true, o.fusion = false; };
  Plan plan = plan_of(m.g, "null:1", "replica(1)", exactly);
  plan.options.accumulate_dtype = DType::kBF16, plan.options.gradient_dtype = DType::kF16;
  const auto order = [&](DType type) {
    Plan other = plan;
    Program& p = other.entries[0].programs[0];
    const auto update =
        std::ranges::find_if(p.segments[0].instructions, [](const Instruction& i) { return is_op(i, "sgd"); });
    const std::string name = update->name;
    const BufferId sum = fresh(p, "sum", {4, 6}, type), back = fresh(p, "back", {4, 6});
    const BufferId gradient = std::exchange(update->in[3], back);
    const Attrs zero{{"shape", Ints{4, 6}}, {"value", 0.0}, {"dtype", std::string(name_of(type))}};
    put_before(p, name.c_str(), made(k_fill, "zero", {}, {sum}, zero));
    put_before(p, name.c_str(), made(k_accumulate, "sum", {sum, gradient}, {sum}));
    put_before(p, name.c_str(), made(k_cast, "back", {sum}, {back}, {{"dtype", std::string("f32")}}));
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const EntryProof proof = proof_of(other);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    return proof.order;
  };
  CHECK(order(DType::kBF16) != order(DType::kF16));

  proof::Reference ref(plan, plan.entries[0], proof::form_of(plan.entries[0]));
  const auto made_by = std::ranges::find(ref.graph().ops, k_matmul_weight_grad, &Op::code);
  REQUIRE(made_by != ref.graph().ops.end());
  const proof::Value gradient{.tensor = ref.root(made_by->outputs[0]), .region = proof::Region::whole({4, 6})};
  REQUIRE(ref.is_of_gradients(gradient.tensor));
  const auto held = std::make_shared<const proof::Value>(gradient);
  const work::Collective adasum{.op = k_adasum};
  const proof::Exchange exchange{.work = &adasum, .in = {held}, .in_dims = {Dims{4, 6}}, .out_dims = {Dims{4, 6}}};
  for (const bool exact : {false, true}) {
    proof::Tree tree(ref, plan.entries[0], exact);
    bool ended = false;
    try {
      proof::exchanged(ref, tree, exchange);
    } catch (const proof::Stop& stop) {
      ended = !stop.covered;
    }
    CHECK(ended == exact);
  }
}

// A kernel and a transport may take another one of 0 and -0 for the larger; sums they round alike.
TEST_CASE("exact proofs: who combines parts") {
  using enum OpCode;
  for (const auto& [code, combine] : {std::pair{k_reduce_sum, Combine::kSum}, {k_reduce_max, Combine::kMax}}) {
    small::Model m;
    m.g.name = "parts";
    m.g.outputs = {{"y", m.op(code, {m.input("x", {4, 2})}, {{"axes", Ints{1}}}, "y")}};
    const Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true; });
    proof::Reference ref(plan, plan.entries[0], proof::form_of(plan.entries[0]));
    proof::Tree tree(ref, plan.entries[0], true);
    proof::Kernels kernels(ref, {}, tree);
    const Op& op = ref.graph().op(ref.ops_of(code).at(0));
    const auto part = [&](int64_t column) {
      const auto region = proof::Region::whole({4, 2}).cut({4, 2}, SubAxis{1, 1, 1}, {column, column + 1});
      const proof::Value x{.tensor = ref.root(op.inputs[0]), .region = *region};
      proof::KernelCall call{.code = code, .attrs = op.attrs, .name = "y"};
      call.in = {{&x, {4, 1}}}, call.out = {{{4}, DType::kF32}};
      return kernels.run(call).at(0);
    };
    const proof::Value a = part(0), b = part(1);
    proof::KernelCall call{.code = k_accumulate, .attrs = {{"combine", std::string(name_of(combine))}}, .name = "y"};
    call.in = {{&a, {4}}, {&b, {4}}}, call.out = {{{4}, DType::kF32}};
    const proof::Value by_kernel = kernels.run(call).at(0);
    const work::Collective all_reduce{.op = k_all_reduce, .combine = combine};
    const auto held = [](const proof::Value& v) { return std::make_shared<const proof::Value>(v); };
    const Dims dims{4};
    const proof::Exchange exchange{
        .work = &all_reduce, .in = {held(a), held(b)}, .in_dims = {dims, dims}, .out_dims = {dims, dims}};
    const proof::Held by_transport = proof::exchanged(ref, tree, exchange).at(0);
    CHECK(by_kernel.terms.whole());
    CHECK(by_transport->terms.whole());
    CHECK((by_kernel.order == by_transport->order) == (combine == Combine::kSum));
  }
}

// Attention over keys [0:4) and [4:8): the first piece made at once, or in two; its sums of exponentials likewise.
TEST_CASE("exact proofs: pieces of attention are weighed by sums that were made somehow") {
  using enum OpCode;
  small::Model m;
  m.g.name = "pieces";
  const TensorId q = m.input("q", {2, 4, 2, 4}), k = m.input("k", {2, 8, 2, 4}), v = m.input("v", {2, 8, 2, 4});
  m.g.outputs = {{"y", m.op(k_neg, {m.op(k_attention, {q, k, v}, {}, "all")}, {}, "y")}};
  const Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.exact = true, o.fusion = false; });
  const auto order = [&](bool merged_sums) {
    Plan other = plan;
    Program& p = other.entries[0].programs[0];
    const Instruction all = named(p, "all");
    const auto put_in = [&](const Instruction& i) { put_before(p, "all", i); };
    const auto piece = [&](int64_t begin, int64_t end) {
      Instruction a = all;
      a.name = "piece";
      for (const size_t operand : {size_t{1}, size_t{2}}) {
        a.in[operand] = fresh(p, "keys", {2, end - begin, 2, 4});
        put_in(made(k_local_slice, "keys", {all.in[operand]}, {a.in[operand]},
                    {{"sub_axis", Ints{1, 1, 1}}, {"begin", begin}, {"end", end}}));
      }
      a.out = {fresh(p, "out", {2, 4, 2, 4}), fresh(p, "sums", {2, 2, 4})};
      Attrs& attrs = a.as<work::Kernel>()->attrs;
      attrs["keys"] = int64_t{8}, attrs["key_begin"] = begin;
      put_in(a);
      return a.out;
    };
    const BufferIds left = piece(0, 4), right = piece(4, 8), first = piece(0, 2), second = piece(2, 4);
    const BufferIds both{fresh(p, "out", {2, 4, 2, 4}), fresh(p, "sums", {2, 2, 4})};
    put_in(made(k_attention_merge, "both", {first[0], first[1], second[0], second[1]}, both));
    put_in(made(k_attention_merge, "merged", {left[0], merged_sums ? both[1] : left[1], right[0], right[1]},
                {all.out[0], fresh(p, "sums", {2, 2, 4})}));
    drop(p, "all");
    for (Instruction& i : p.segments[0].instructions) i.waits.clear(), i.queue = Queue::kCompute;
    const EntryProof proof = proof_of(other);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    return proof.order;
  };
  CHECK(order(false) != order(true));
}
