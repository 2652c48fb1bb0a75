// Plans that are not their program, each of which some rule of the prover once took for it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/error.h"
#include "own_programs.h"
#include "plan/row_waits.h"
#include "plan_damage.h"
#include "proof_case.h"
#include "prove/terms.h"
#include "unit/caught.h"
#include "unit/small_models.h"
#include "unsound.h"

using namespace whale;
using namespace whale::test;

TEST_CASE("unsound J: positions lost beside a broadcast") {
  using enum OpCode;
  small::Model m;
  m.g.name = "any";
  const TensorId x = m.input("x", {8, 4});
  const TensorId b = m.variable("bias", {4});
  const TensorId t = m.op(k_add, {m.op(k_relu, {x}, {}, "p"), b}, {}, "t");
  m.g.outputs = {{"t", t}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
  say("J undamaged", plan);
  Program& p = plan.entries[0].programs[0];
  const Instruction t0 = named(p, "t");
  const BufferId xs = fresh(p, "xs", {4, 4}), zero = fresh(p, "zero", {4, 4}), zb = fresh(p, "zb", {4}),
                 bb = fresh(p, "bb", {4, 4}), c = fresh(p, "c", {4, 4}), out = fresh(p, "out", {8, 4});
  auto& list = body(p);
  const auto at = &named(p, "t") - list.data();
  list.erase(list.begin() + at);
  list.insert(list.begin() + at,
              {made(k_local_slice, "s", {t0.in[0]}, {xs},
                    {{"sub_axis", Ints{0, 1, 1}}, {"begin", int64_t{0}}, {"end", int64_t{4}}}),
               made(k_fill, "z", {}, {zero}, {{"shape", Ints{4, 4}}, {"value", 0.0}, {"dtype", std::string("f32")}}),
               made(k_fill, "zb", {}, {zb}, {{"shape", Ints{4}}, {"value", 0.0}, {"dtype", std::string("f32")}}),
               made(k_add, "t.1", {zero, t0.in[1]}, {bb}), made(k_add, "t.2", {xs, zb}, {c}),
               made(k_add, "t.3", {c, bb}, {c}), made(k_concat, "cat", {c, c}, {out}, {{"axis", int64_t{0}}})});
  named(p, "fetch.t").in = {out};
  say("J: rows 0:4 twice", plan);
}

TEST_CASE("unsound K: sums in a type that nobody asked for") {
  for (const DType to : {DType::kBF16, DType::kF16}) {
    Plan plan = plan_of(small::mlp(8).g, "null:1", "replica(1)",
                        [](CompileOptions& o) { o.accumulation = 2, o.fusion = false; });
    Program& p = plan.entries[0].programs[0];
    for (Buffer& b : p.buffers)
      if (b.name == "loss.zero" || b.name == "loss.sum") b.dtype = to, b.bytes = 2;
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (has(i.name, "loss.zero")) i.as<work::Kernel>()->attrs["dtype"] = std::string(name_of(to));
    say("K: the loss is added up in 16 bits", plan);
  }
}

TEST_CASE("unsound H: adasum that nobody asked for") {
  Plan plan = plan_of(small::mlp(8, OptimizerKind::kAdam).g, "null:2", "replica");
  Program& p = plan.entries[0].programs[0];
  Instruction& i = named(p, "bucket.0");
  Instruction alone = i;
  size_t at = 0;
  for (size_t k = 0; k < i.in.size(); ++k)
    if (has(p.buffers[size_t(i.in[k])].name, "loss")) at = k;
  alone.in = {i.in[at]}, alone.out = {i.out[at]}, alone.name = "alone";
  i.in.erase(i.in.begin() + long(at)), i.out.erase(i.out.begin() + long(at));
  auto* c = i.as<work::Collective>();
  c->op = OpCode::k_adasum, c->weights = {4, 4};
  put_behind(p, "bucket.0", alone);
  say("H: adasum", plan);
}

TEST_CASE("unsound Z: a constant that is no number") {
  Plan plan = plan_of(small::mlp(8).g, "null:2", "replica", [](CompileOptions& o) { o.fusion = false; });
  int n = 0;
  for (Program& p : plan.entries[0].programs)
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (is_op(i, "fill")) {
          Attr& v = i.as<work::Kernel>()->attrs.at("value");
          v = std::nan(""), ++n;
        }
  say("Z: fills with NaN", plan);
}

TEST_CASE("unsound X: the box of a random op") {
  Plan plan = plan_of(small::gpt(6).g, "null:2", "replica", [](CompileOptions& o) { o.fusion = false; });
  give_own_programs(plan.entries[0]);
  plan.entries[0].programs.push_back(plan.entries[0].programs[size_t(plan.entries[0].rows[1].program)]);
  plan.entries[0].rows[1].program = int32_t(plan.entries[0].programs.size()) - 1;
  say("X undamaged", plan);
  int n = 0;
  for (const DeviceRow& row : plan.entries[0].rows) {
    if (row.samples[0].whole.begin == 0) continue;
    Program& p = plan.entries[0].programs[size_t(row.program)];
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (auto* k = i.as<work::Kernel>(); k && has_flag(k->op, kRandom) && k->box.batch.present()) {
          k->box.origin[size_t(k->box.batch.dim)] = row.samples[0].whole.begin, ++n;
        }
  }
  say("X: origin beside samples", plan);
}

TEST_CASE("unsound L2: a weight is rounded where only gradients are asked to be") {
  using enum OpCode;
  small::Model m;
  m.g.name = "decay";
  const TensorId x = m.input("x", {8, 4}), y = m.input("y", {8}, DType::kI32);
  const TensorId w = m.variable("w", {4, 3});
  const TensorId mm = m.op(k_matmul, {x, w}, {}, "mm");
  const TensorId ce = m.op(k_reduce_mean, {m.op(k_cross_entropy, {mm, y}, {}, "ce")}, {}, "mean");
  const TensorId c = m.op(k_fill, {}, {{"shape", Ints{}}, {"value", 0.01}, {"dtype", std::string("f32")}});
  const TensorId extra = m.op(k_reduce_sum, {m.op(k_mul, {m.op(k_mul, {w, c}), w})});
  m.minimize(m.op(k_add, {ce, extra}, {}, "loss"), OptimizerKind::kSgd);
  Plan plan = plan_of(m.g, "null:1", "replica(1)",
                      [](CompileOptions& o) { o.gradient_dtype = DType::kBF16, o.fusion = false; });
  say("L2 undamaged", plan);
  Program& p = plan.entries[0].programs[0];
  const BufferId low = fresh(p, "low", {4, 3}, DType::kBF16), back = fresh(p, "back", {4, 3});
  const BufferId weight = named(p, "mm").in[1];
  named(p, "mm").in[1] = back;
  auto& list = body(p);
  const size_t at = size_t(&named(p, "mm") - list.data());
  shift(p.segments[0], at, 2);
  list.insert(list.begin() + long(at), {made(k_cast, "down", {weight}, {low}, {{"dtype", std::string("bf16")}}),
                                        made(k_cast, "up", {low}, {back}, {{"dtype", std::string("f32")}})});
  say("L2: matmul of the weight in bf16", plan);
}

TEST_CASE("unsound: every replica draws the same mask over what is the same all along") {
  using enum OpCode;
  for (const bool damaged : {false, true})
    for (const char* strategy : {"replica(2)", "split(2)"}) {
      small::Model m;
      m.g.name = "mask";
      const TensorId x = m.input("x", {8, 4}), w = m.variable("w", {4, 6});
      const TensorId ones = m.op(k_fill, {}, {{"shape", Dims{8, 6}}, {"value", 1.0}}, "ones");
      const TensorId mask = m.op(k_dropout, {ones}, {{"rate", 0.5}}, "mask");
      const TensorId y = m.op(k_mul, {m.op(k_matmul, {x, w}, {}, "mm"), mask}, {}, "y");
      m.minimize(m.op(k_reduce_mean, {y}, {}, "loss"), OptimizerKind::kSgd);
      Plan plan = plan_of(m.g, "null:2", strategy, [](CompileOptions& o) { o.fusion = false; });
      give_own_programs(plan.entries[0]);
      int placed = 0;
      for (Program& p : plan.entries[0].programs)
        for (Segment& s : p.segments)
          for (Instruction& i : s.instructions) {
            auto* kernel = i.as<work::Kernel>();
            if (kernel == nullptr || kernel->op != k_dropout) continue;
            ++placed;
            if (!damaged) continue;
            std::ranges::fill(kernel->box.origin, 0);
            kernel->box.batch = {}, kernel->box.cuts.clear();
          }
      REQUIRE(placed > 0);
      CAPTURE(strategy);
      const EntryProof proof = prove(plan, plan.entries[0]);
      CHECK_MESSAGE((proof.verdict == ProofVerdict::kProven) == !damaged, proof.what);
    }
}

TEST_CASE("unsound: a plan without an entry") {
  small::Model m = small::mlp(8);
  Plan plan = plan_of(m.g, "null:2", "replica(2)");
  CHECK(prove(plan).verdict == ProofVerdict::kProven);
  plan.entries.erase(plan.entries.begin());
  CHECK(prove(plan).verdict == ProofVerdict::kRefuted);
  plan.entries.clear();
  CHECK(prove(plan).verdict == ProofVerdict::kRefuted);
}

namespace {

BufferId seen_as(Program& p, BufferId id, Dims dims) {
  Buffer b = p.buffers[size_t(id)];
  if (b.alias == kNone) b.alias = id;
  b.name = "view", b.dims = std::move(dims);
  p.buffers.push_back(b);
  return BufferId(p.buffers.size()) - 1;
}

}  // namespace

TEST_CASE("unsound N: operands in other shapes") {
  const Plan plan = plan_of(small::gpt(4, OptimizerKind::kSgd, 1, 4, 8, 12).g, "null:2", "split(2)",
                            [](CompileOptions& o) { o.fusion = false; });
  Plan same = plan;
  say("N: undamaged", same);
  int views = 0;
  for (size_t k = 0; k < body(same.entries[0].programs[0]).size(); ++k) {
    Plan bad = plan;
    Program& p = bad.entries[0].programs[0];
    Instruction& i = body(p)[k];
    const size_t at = is_op(i, "matmul") ? 1 : 0;
    const auto* collective = i.as<work::Collective>();
    const bool moves = collective && collective->op == OpCode::k_reduce_scatter;
    if (!(is_op(i, "matmul") || is_op(i, "gelu") || moves) || i.in.size() <= at) continue;
    Dims dims = p.buffers[size_t(i.in[at])].dims;
    if (dims.size() < 2 || dims[0] % 2) continue;
    dims[0] /= 2, dims.insert(dims.begin() + 1, 2);
    i.in[at] = seen_as(p, i.in[at], dims);
    say(i.name.c_str(), bad);
    ++views;
  }
  CHECK(views > 4);
}

TEST_CASE("unsound Q: in 16 bits a bias is rounded that one device adds as it is") {
  using enum OpCode;
  small::Model m;
  m.g.name = "bias";
  const TensorId x = m.input("x", {8, 4}), w = m.variable("w", {4, 6}), b = m.variable("b", {6});
  m.g.outputs = {{"y", m.op(k_tanh, {m.op(k_add, {m.op(k_matmul, {x, w}, {}, "mm"), b}, {}, "sum")}, {}, "t")}};
  for (const char* strategy : {"replica(2)", "split(2, factor=columns)"}) {
    Plan plan = plan_of(m.g, "null:2", strategy, [](CompileOptions& o) { o.precision = Precision::kBFloat16; });
    say("Q: undamaged", plan);
    Program& p = plan.entries[0].programs[0];
    Instruction& mm = named(p, "mm");
    if (mm.in.size() < 3 || mm.in[2] == kNone) continue;  // told apart in the statement
    const BufferId low = fresh(p, "low", p.buffers[size_t(mm.in[2])].dims, DType::kBF16);
    const Instruction round = made(k_cast, "round", {mm.in[2]}, {low}, {{"dtype", std::string("bf16")}});
    mm.in[2] = low;
    put_before(p, "mm", round);
    say("Q: the bias rounded first", plan);
  }
  // Where a split takes them apart, the statement says so.
  m.g.outputs = {{"y", m.op(k_tanh, {m.op(k_add, {m.op(k_matmul, {x, w}), b})})}};
  const Proof apart = prove(
      plan_of(m.g, "null:2", "split(2, factor=k)", [](CompileOptions& o) { o.precision = Precision::kBFloat16; }));
  CHECK_MESSAGE(has(text(apart), "rounded before their bias"), text(apart));
}

TEST_CASE("unsound R: what a session reads beside the programs") {
  const Plan plan = plan_of(small::mlp(8, OptimizerKind::kAdam).g, "null:2", "replica");
  Plan same = plan;
  say("R: undamaged", same);
  const std::pair<const char*, std::function<void(Plan&)>> damages[] = {
      {"learning rate", [](Plan& p) { p.optimizer.learning_rate *= 100; }},
      {"beta1", [](Plan& p) { p.optimizer.beta1 = 0.5; }},
      {"schedule", [](Plan& p) { p.lr_schedule.kind = LrScheduleKind::kCosine; }},
      {"precision", [](Plan& p) { p.precision = Precision::kBFloat16; }},
      {"initial value", [](Plan& p) { p.variables[0].init.a += 1; }},
      {"trained", [](Plan& p) { p.variables[0].trainable = !p.variables[0].trainable; }},
      {"state's initial value",
       [](Plan& p) { p.variables.back().init.kind = InitKind::kConstant, p.variables.back().init.a = 1; }},
      {"state's name", [](Plan& p) { p.variables.back().state_name += "x"; }},
  };
  for (const auto& [what, damage] : damages) {
    Plan bad = plan;
    damage(bad);
    say(what, bad);
  }
}

TEST_CASE("unsound V: a message of what is the same all along goes to one half twice") {
  using enum OpCode;
  small::Model m;
  m.g.name = "message";
  const TensorId x = m.input("x", {8, 4}), first = m.variable("w1", {4, 4}), second = m.variable("w2", {4, 4}),
                 b = m.variable("b", {4});
  const TensorId c = m.op(k_exp, {m.op(k_mul, {number(m, "ones", 1), b}, {}, "bb")}, {}, "c");
  const TensorId h = m.op(k_add, {m.op(k_relu, {m.op(k_matmul, {x, first}, {}, "mm1")}, {}, "act"), c}, {}, "hc");
  const TensorId y = m.op(k_matmul, {m.op(k_mul, {h, c}, {}, "hc2"), second}, {}, "mm2");
  m.minimize(m.op(k_reduce_mean, {y}, {}, "loss"), OptimizerKind::kSgd);
  m.g.outputs = {{"y", y}};
  const Plan plan = plan_of(m.g, "null:2", "pipeline(2)", [](CompileOptions& o) { o.fusion = false; });
  int tried = 0;
  for (size_t e = 0; e < plan.entries.size(); ++e)
    for (size_t l = 0; l < plan.entries[e].links.size(); ++l) {
      Plan bad = plan;
      Link& link = bad.entries[e].links[l];
      Transfer one = link.transfers[0], other = one;
      if (one.source.empty() || one.source[0].end % 2) continue;
      const int64_t half = one.source[0].end / 2;
      one.source[0] = one.target[0] = other.target[0] = {0, half}, other.source[0] = {half, 2 * half};
      link.transfers = {one, other};
      say("V: to one half twice", bad, e), ++tried;
    }
  CHECK(tried > 1);
}

TEST_CASE("unsound X: constants that are no number, and below zero") {
  using enum OpCode;
  small::Model m;
  m.g.name = "numbers";
  const TensorId x = m.input("x", {8, 4});
  m.g.outputs = {{"y1", m.op(k_mul, {x, number(m, "nan", std::nan(""))}, {}, "y1")},
                 {"y2", m.op(k_mul, {x, number(m, "two", 2)}, {}, "y2")},
                 {"y3", m.op(k_div, {x, number(m, "zero", 0)}, {}, "y3")}};
  Plan plan = alone(m);
  say("X: undamaged", plan);
  const std::pair<const char*, double> kDamages[] = {{"two", 3}, {"nan", 3}, {"two", std::nan("")}, {"zero", -0.0}};
  for (const auto& [name, value] : kDamages) {
    Plan bad = plan;
    for (Instruction& i : body(bad.entries[0].programs[0]))
      if (i.name == name) i.as<work::Kernel>()->attrs.at("value") = value;
    say(name, bad);
  }
  for (Instruction& i : body(plan.entries[0].programs[0]))
    if (is_op(i, "fill") && i.name != "zero") i.as<work::Kernel>()->attrs.at("value") = 3.0;
  say("X: both are 3", plan);
}

TEST_CASE("unsound Z: a collective writes its results over operands") {
  Plan plan = plan_of(small::mlp(8, OptimizerKind::kAdam).g, "null:2", "replica(2)",
                      [](CompileOptions& o) { o.fusion = false, o.zero = 1; });
  say("Z: undamaged", plan);
  int tried = 0;
  const std::vector<Segment> segments = plan.entries[0].programs[0].segments;
  for (size_t s = 0; s < segments.size(); ++s)
    for (const Instruction& i : segments[s].instructions) {
      const auto* c = i.as<work::Collective>();
      if (!c || c->op == OpCode::k_all_reduce) continue;
      for (const BufferId from : i.in)
        for (const BufferId to : i.out) {
          Plan bad = plan;
          Program& p = bad.entries[0].programs[0];
          const Buffer in = p.buffers[size_t(from)];
          Buffer& out = p.buffers[size_t(to)];
          const BufferId storage = in.alias == kNone ? from : in.alias;
          const Buffer& place = p.buffers[size_t(storage)];
          const bool fits = in.kind == BufferKind::kArena && out.kind == BufferKind::kArena && out.alias == kNone &&
                            in.at + out.bytes <= place.bytes;
          if (!fits) continue;
          for (Buffer& b : p.buffers)
            if (b.alias == to) b.alias = storage, b.offset = place.offset, b.at += in.at;
          out.alias = storage, out.offset = place.offset, out.at = in.at, out.versions = place.versions;
          say("Z: a result in an operand's place", bad), ++tried;
        }
    }
  CHECK(tried > 3);
}

TEST_CASE("unsound AA: rows are put together over one of them") {
  using enum OpCode;
  small::Model m;
  m.g.name = "rows";
  m.g.outputs = {{"t", m.op(k_tanh, {m.op(k_exp, {m.input("x", {8, 4})}, {}, "r")}, {}, "t")}};
  Plan plan = alone(m);
  Program& p = plan.entries[0].programs[0];
  const auto half = [&](const char* name) { return fresh(p, name, rows(4)); };
  const auto part = [](int64_t begin) {
    return Attrs{{"sub_axis", Ints{0, 1, 1}}, {"begin", begin}, {"end", begin + 4}};
  };
  const BufferId all = fresh(p, "R", rows(8)), second = half("s2"), t2 = half("t2"), t1 = half("t1"), z = half("z"),
                 moved = half("u"), out = fresh(p, "T", rows(8));
  const auto seen_as = [&](const char* name, int64_t n) {
    Buffer b = p.buffers[size_t(all)];
    b.name = name, b.alias = all, b.dims = rows(n), b.bytes = n * 16, b.at = 0;
    p.buffers.push_back(b);
    return BufferId(p.buffers.size() - 1);
  };
  const BufferId first = seen_as("s1", 4), over = seen_as("R2", 8);
  named(p, "r").out = {all};
  for (const Instruction& i :
       {made(k_local_slice, "ls2", {all}, {second}, part(4)), made(k_tanh, "t.2", {second}, {t2}), filled("z", z, 0, 4),
        made(k_concat, "zeros first", {z, first}, {over}, {{"axis", int64_t{0}}}),
        made(k_local_slice, "ls1", {over}, {moved}, part(4)), made(k_tanh, "t.1", {moved}, {t1}),
        made(k_concat, "cat", {t1, t2}, {out}, {{"axis", int64_t{0}}})})
    put_before(p, "t", i);
  const BufferId old = named(p, "t").out[0];
  drop(p, "t");
  for (Instruction& i : body(p)) std::replace(i.in.begin(), i.in.end(), old, out);
  say("AA: over one of them", plan);
}

TEST_CASE("unsound AB: parts are rounded before they are added") {
  using enum OpCode;
  for (const char* to : {"bf16", "f16"}) {
    small::Model m;
    m.g.name = "rounded";
    const TensorId y = m.op(k_matmul, {m.input("x", {8, 4}), m.variable("w", {4, 3})}, {}, "mm"),
                   r = m.op(k_reduce_sum, {y}, {{"axes", Ints{0}}}, "r"),
                   c = m.op(k_cast, {r}, {{"dtype", std::string(to)}}, "c");
    m.minimize(m.op(k_reduce_mean, {m.op(k_cast, {c}, {{"dtype", std::string("f32")}}, "b")}, {}, "loss"),
               OptimizerKind::kSgd);
    Plan plan = plan_of(m.g, "null:2", "replica(2)", [](CompileOptions& o) { o.fusion = false; });
    say("AB: undamaged", plan);
    Program& p = plan.entries[0].programs[0];
    const BufferId sum = named(p, "r").out[0], low = fresh(p, "low", {3}, parse_dtype(to)), old = named(p, "c").out[0];
    std::string adds;
    for (const Instruction& i : body(p))
      if (i.as<work::Collective>() && i.in[0] == sum) adds = i.name;
    Instruction cast = named(p, "c");
    cast.in = {sum}, cast.out = {low}, cast.waits.clear();
    drop(p, "c");
    put_before(p, adds.c_str(), cast);
    const auto place = [&](const std::string& name) {
      return int32_t(std::ranges::find(body(p), name, &Instruction::name) - body(p).begin());
    };
    Instruction& reduce = named(p, adds.c_str());
    reduce.in = reduce.out = {low}, reduce.waits = {{named(p, "c").queue, place("c")}};
    for (Instruction& i : body(p)) std::replace(i.in.begin(), i.in.end(), old, low);
    named(p, "b").waits = {{reduce.queue, place(adds)}};
    say("AB: each part rounded", plan);
  }
}

// (q(half) k + q k(other half)) is no sum of what is linear in either, though every half is there once.
TEST_CASE("unsound AD: zero times what is no number") {
  using enum OpCode;
  for (const bool divided : {false, true}) {
    small::Model m;
    m.g.name = "zeros";
    const TensorId x = m.input("x", {8, 4}), zero = number(m, "zero", 0), c = number(m, "c", 2);
    const TensorId none = m.op(k_mul, {zero, c}, {}, "none");
    m.g.outputs = {{"y", m.op(k_mul, {m.op(k_add, {m.op(k_exp, {none}, {}, "e"), x}, {}, "a"), x}, {}, "y")}};
    Plan plan = alone(m);
    say("AD: undamaged", plan);
    Program& p = plan.entries[0].programs[0];
    Instruction& e = named(p, "e");
    const BufferId bad = fresh(p, "bad", rows(8)), nothing = fresh(p, "nothing", rows(8)),
                   made_bad = fresh(p, "m", rows(8));
    e.in = {made_bad};
    put_before(p, "e", filled("nothing", nothing, 0)),
        put_before(p, "e", filled("bad", bad, divided ? 0 : std::nan("")));
    put_before(p, "e", made(divided ? k_div : k_mul, "m", {nothing, bad}, {made_bad}));
    in_order(p);
    say(divided ? "AD: 0 / 0" : "AD: 0 x NaN", plan);
  }
}

// matmul(p, u) + matmul(u, q) has q p nowhere and p q twice.
TEST_CASE("unsound AF: a variable that a step changes is left out") {
  Plan plan = plan_of(small::mlp(8, OptimizerKind::kAdam).g, "null:1", "replica(1)");
  for (PlanVariable& v : plan.variables)
    if (has(v.name, "/m")) v.name += ".other";
  say("AF: moments by another name", plan);
}

// Ones, of which each sum, or each window at an edge, is another number.
TEST_CASE("unsound AG: what is made of the same all along is not") {
  using enum OpCode;
  for (const bool pools : {false, true}) {
    small::Model m;
    m.g.name = "ones";
    const TensorId x = m.input("x", {8, 4, 1});
    const TensorId ones =
        m.op(k_fill, {}, {{"shape", Ints{8, 4, 1}}, {"value", 1.0}, {"dtype", std::string("f32")}}, "ones");
    const TensorId s =
        pools ? m.op(k_avg_pool, {ones},
                     {{"window", Ints{3}}, {"strides", Ints{1}}, {"padding", Ints{1, 1}}, {"include_pad", true}}, "s")
              : m.op(k_cumsum, {ones}, {{"axis", int64_t{1}}}, "s");
    m.g.outputs = {{"t", m.op(k_add, {x, s}, {}, "t")}};
    Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
    say("AG: undamaged", plan);
    Program& p = plan.entries[0].programs[0];
    const BufferId made_s = named(p, "s").out[0], half = fresh(p, "half", {8, 2, 1}),
                   twice = fresh(p, "twice", {8, 4, 1});
    for (BufferId& id : named(p, "t").in)
      if (id == made_s) id = twice;
    const int64_t begin = pools ? 1 : 0;
    put_behind(p, "s", made(k_concat, "twice", {half, half}, {twice}, {{"axis", int64_t{1}}}));
    put_behind(p, "s",
               made(k_local_slice, "half", {made_s}, {half},
                    {{"sub_axis", Ints{1, 1, 1}}, {"begin", begin}, {"end", begin + 2}}));
    in_order(p);
    say(pools ? "AG: two of a pooling, twice" : "AG: two of a cumsum, twice", plan);
  }
}

// [any 2 of 4, 3, any 1 of 4], read as [1, 3, 2]: which of the rows are beside each other is not said again.
TEST_CASE("unsound AH: what is the same all along is read in another shape") {
  using enum OpCode;
  small::Model m;
  m.g.name = "fit";
  const TensorId x = m.input("x", {4, 3, 4}), v = m.variable("v", {1, 3, 1});
  const TensorId b = m.op(k_broadcast_to, {v}, {{"shape", Ints{4, 3, 4}}}, "b");
  m.g.outputs = {{"y", m.op(k_add, {x, m.op(k_tanh, {b}, {}, "r")}, {}, "y")}};
  const Plan right = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
  for (const bool wrong : {false, true}) {
    Plan plan = right;
    Program& p = plan.entries[0].programs[0];
    const Instruction of = named(p, "b"), r = named(p, "r");
    const BufferId rows = fresh(p, "rows", {2, 3, 1});
    BufferId view = rows;
    if (wrong) {
      Buffer other = p.buffers[rows];
      other.name = "view", other.dims = {1, 3, 2}, other.alias = rows, other.at = 0;
      p.buffers.push_back(other);
      view = static_cast<BufferId>(p.buffers.size()) - 1;
    }
    const int64_t columns = wrong ? 2 : 1;
    const BufferId some = fresh(p, "some", {wrong ? 1 : 2, 3, columns}), all = fresh(p, "all", {4, 3, columns});
    const BufferIds four(wrong ? 4 : 2, some), wide(wrong ? 2 : 4, all);
    put_before(p, "y", made(k_broadcast_to, "b2", {of.in[0]}, {rows}, {{"shape", Ints{2, 3, 1}}}));
    put_before(p, "y", made(k_tanh, "r2", {view}, {some}));
    put_before(p, "y", made(k_concat, "all", four, {all}, {{"axis", int64_t{0}}}));
    put_before(p, "y", made(k_concat, "wide", wide, {r.out[0]}, {{"axis", int64_t{2}}}));
    drop(p, "r"), drop(p, "b");
    in_order(p);
    say(wrong ? "AH: rows as columns" : "AH: undamaged, in pieces", plan);
  }
}

TEST_CASE("unsound AI: a part of an output is handed out for all of it") {
  using enum OpCode;
  small::Model m;
  m.g.name = "out";
  m.g.outputs = {{"p", m.op(k_matmul, {m.input("x", {8, 4}), m.variable("w", {4, 4})}, {}, "p")}};
  const Plan right = plan_of(m.g, "null:2", "split");
  for (const OutputMerge merge : {OutputMerge::kSame, OutputMerge::kSum}) {
    Plan plan = right;
    say("AI: undamaged", plan);
    PlanOutput& o = plan.entries[0].outputs[0];
    o.merge = merge, o.cut_by.assign(o.cut_by.size(), false);
    say("AI: one device's half", plan);
  }
}

TEST_CASE("unsound AJ: an index has another limit") {
  using enum OpCode;
  small::Model m;
  m.g.name = "looked up";
  const TensorId ids = m.input("ids", {8}, DType::kI32), two = m.op(k_add, {ids, ids}, {}, "two");
  m.g.outputs = {{"y", m.op(k_embedding, {m.variable("w", {20, 4}), two}, {}, "y")}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)");
  say("AJ: undamaged", plan);
  Instruction& y = named(plan.entries[0].programs[0], "y");
  REQUIRE(attr_int(y.kernel()->attrs, kIndexLimit) == 20);
  y.as<work::Kernel>()->attrs[kIndexLimit] = int64_t{21};
  say("AJ: a row behind the last one", plan);
}
