// Plans that are not their program by what they add up: summands missing, twice, or by another way.
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

namespace {

Plan sums(bool exact = false, const char* strategy = "replica(1)", const char* devices = "null:1") {
  using enum OpCode;
  small::Model m;
  m.g.name = "sums";
  const TensorId x = m.input("x", {8, 4});
  const TensorId p = m.op(k_relu, {x}, {}, "p"), q = m.op(k_sigmoid, {x}, {}, "q"), r = m.op(k_tanh, {x}, {}, "r"),
                 b = m.op(k_exp, {x}, {}, "b");
  const TensorId pr = m.op(k_add, {p, r}, {}, "pr");
  const TensorId t = m.op(k_add, {m.op(k_add, {p, q}, {}, "u"), m.op(k_add, {r, b}, {}, "v")}, {}, "t");
  m.g.outputs = {{"t", t}, {"pr", pr}};
  if (exact) {
    const TensorId w = m.variable("w", {4, 3});
    m.minimize(m.op(k_reduce_mean, {m.op(k_matmul, {t, w}, {}, "mm")}, {}, "loss"), OptimizerKind::kSgd);
  }
  return plan_of(m.g, devices, strategy, [&](CompileOptions& o) { o.fusion = false, o.exact = exact; });
}

}  // namespace

TEST_CASE("unsound A: a summand is missing") {
  Plan plan = sums();
  Program& p = plan.entries[0].programs[0];
  Instruction &u = named(p, "u"), &v = named(p, "v");
  u.in = {2, 4}, u.out = {7};  // r + q: of t, p and b none
  v.in = {7, 1}, v.out = {7};  // + p
  named(p, "fetch.t").in = {7};
  drop(p, "t");
  say("A: t = (r + q) + p, without b", plan);
}

TEST_CASE("unsound B: terms of a summand that is a sum are forgotten") {
  Plan plan = sums();
  Program& p = plan.entries[0].programs[0];
  BufferId own = fresh(p, "own", {8, 4});
  for (Buffer& b : p.buffers)
    if (b.name == "q") b.offset = p.arena_bytes;
  p.arena_bytes += 128;
  Instruction &u = named(p, "u"), &v = named(p, "v"), &t = named(p, "t");
  u.in = {3, 4}, u.out = {own};    // pr + q: claimed to be q
  v.in = {own, 6}, v.out = {own};  // + b
  t.in = {own, 1}, t.out = {own};  // + p
  Instruction more = t;
  more.name = "t2", more.in = {own, 2}, more.out = {own};  // + r
  put_behind(p, "t", more);
  named(p, "fetch.t").in = {own};
  say("B: t = (p + r) + q + b + p + r", plan);
}

TEST_CASE("unsound C: a summand twice beside the sum's own terms") {
  using enum OpCode;
  small::Model m;
  m.g.name = "reduced";
  const TensorId x = m.input("x", {8, 4});
  const TensorId pp = m.op(k_relu, {x}, {}, "p"), q = m.op(k_tanh, {x}, {}, "q");
  const TensorId u = m.op(k_add, {pp, q}, {}, "u");
  m.g.outputs = {{"w", m.op(k_reduce_sum, {u}, {{"axes", Ints{0}}}, "w")}};
  Plan plan = plan_of(m.g, "null:2", "replica", [](CompileOptions& o) { o.fusion = false; });
  say("C undamaged", plan);
  Program& p = plan.entries[0].programs[0];
  const Instruction &w = named(p, "w"), &relu = named(p, "p"), &add = named(p, "u");
  (void)add;
  const BufferId copy = fresh(p, "copy", p.buffers[size_t(relu.out[0])].dims), twice = fresh(p, "twice", {4});
  Instruction again = relu, reduce = w;
  again.name = "p2", again.out = {copy};
  reduce.name = "w2", reduce.in = {copy}, reduce.out = {twice};
  Instruction sum = made(k_add, "more", {w.out[0], twice}, {w.out[0]});
  put_behind(p, "w", sum);
  put_behind(p, "w", reduce);
  put_behind(p, "p", again);
  auto& cl = body(p);
  const auto where = [&](const char* n) { return int32_t(&named(p, n) - cl.data()); };
  for (Instruction& i : cl)
    if (i.group() != kNone)
      for (Wait& w : i.waits)
        if (w.index == where("w")) w.index = where("more");
  say("C: w = sum of 2 p + q", plan);
}

TEST_CASE("unsound I: exact mode, another order") {
  Plan plan = sums(true);
  Program& p = plan.entries[0].programs[0];
  // ((r + q) + p) + b instead of (p + q) + (r + b)
  Instruction &u = named(p, "u"), &v = named(p, "v"), &t = named(p, "t");
  const BufferId own = fresh(p, "own", {8, 4});
  u.in = {2, 4}, u.out = {own}, v.in = {own, 1}, v.out = {own}, t.in = {own, 6}, t.out = {own};
  for (Instruction& i : body(p))
    for (BufferId& id : i.in)
      if (id == 8) id = own;
  say("I: another order in exact mode", plan);
}

TEST_CASE("unsound E: counted terms that overlap") {
  using proof::Set, proof::Terms;
  const auto some = [](int64_t begin, int64_t end) {
    Terms t;
    t.add_summand(7, {{{1, 0}, 2, Set::first(1), true}, {{1, 1}, 4, Set(Interval{begin, end}), false}});
    return t;
  };
  Terms t = some(0, 3), half;
  half.add_summand(7, {{{1, 0}, 2, Set::first(1), true}});
  CHECK(!(t.join(some(1, 4)) == kNone && t.join(half) == kNone && t.whole()));
}

TEST_CASE("unsound O: a sum of more summands than anybody counts") {
  using enum OpCode;
  small::Model m;
  m.g.name = "many";
  const OpCode each[] = {k_relu, k_sigmoid, k_tanh, k_exp};
  std::vector<TensorId> leaf;
  TensorId chain = m.input("x", {8, 4});
  for (size_t i = 0; i < 20; ++i) leaf.push_back(chain = m.op(each[i % 4], {chain}, {}, "s" + std::to_string(i)));
  TensorId big = leaf[0];
  for (size_t i = 1; i < 17; ++i) big = m.op(k_add, {big, leaf[i]}, {}, "big" + std::to_string(i));
  m.g.outputs = {{"big", m.op(k_neg, {big}, {}, "nbig")}, {"pq", m.op(k_add, {leaf[17], leaf[18]}, {}, "pq")}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
  say("O: undamaged", plan);
  Program& p = plan.entries[0].programs[0];
  const BufferId own = fresh(p, "own", {8, 4});
  const Instruction more = made(k_add, "more", {named(p, "pq").out[0], named(p, "nbig").in[0]}, {own});
  put_before(p, "fetch.pq", more);
  named(p, "fetch.pq").in = {own};
  say("O: pq + big handed out as pq", plan);
}

TEST_CASE("unsound P: two images of one summand have one name") {
  using enum OpCode;
  small::Model m;
  m.g.name = "names";
  const TensorId x = m.input("x", {8, 4}), v = m.variable("v", {4}), w = m.variable("w", {4});
  const auto sum = [&](OpCode op, const char* name) {
    return m.op(k_reduce_sum, {m.op(op, {x})}, {{"axes", Ints{0}}}, name);
  };
  const TensorId a = m.op(k_add, {sum(k_relu, "p"), sum(k_tanh, "s")}, {}, "a");
  m.g.outputs = {{"y", m.op(k_add, {m.op(k_mul, {a, v}, {}, "f"), m.op(k_mul, {a, w}, {}, "g")}, {}, "y")}};
  Plan plan = plan_of(m.g, "null:2", "replica", [](CompileOptions& o) { o.fusion = false; });
  give_own_programs(plan.entries[0]);
  if (plan.entries[0].rows[1].program == plan.entries[0].rows[0].program) {
    plan.entries[0].programs.push_back(plan.entries[0].programs[0]);
    plan.entries[0].rows[1].program = 1;
  }
  say("P: undamaged", plan);
  Program& p = plan.entries[0].programs[1];
  const BufferId zero = fresh(p, "zero", {4});
  put_before(p, "y",
             made(k_fill, "z", {}, {zero}, {{"shape", Ints{4}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
  Instruction& y = named(p, "y");
  y.in[y.in[1] == named(p, "g").out[0] ? 1 : 0] = zero;
  say("P: device 1 adds zeros in place of its share of g", plan);
}

TEST_CASE("unsound S: what is linear in a summand is none") {
  using enum OpCode;
  small::Model m;
  m.g.name = "negative";
  const TensorId x = m.input("x", {8, 4}), p = m.op(k_relu, {x}, {}, "p"), q = m.op(k_tanh, {x}, {}, "q"),
                 u = m.op(k_add, {p, q}, {}, "u");
  m.g.outputs = {{"u", u}, {"n", m.op(k_neg, {u}, {}, "n")}};
  Plan plan = alone(m);
  Program& r = plan.entries[0].programs[0];
  const BufferId z = fresh(r, "z", rows(8)), one = named(r, "p").out[0], other = named(r, "q").out[0];
  put_before(r, "u", filled("z", z, 0));
  const BufferId a = again(r, "u", k_add, "a", {one, z});
  const BufferId c = again(r, "u", k_neg, "c", {again(r, "u", k_add, "b", {z, other})});
  named(r, "u").in = {a, c};
  say("S: p - q for p + q", plan);
}

TEST_CASE("unsound T: one summand by two ways") {
  using enum OpCode;
  small::Model m;
  m.g.name = "two_ways";
  const TensorId x = m.input("x", {8, 4}), v = m.variable("v", {4}), w = m.variable("w", {4});
  const TensorId p = m.op(k_relu, {x}, {}, "p"), q = m.op(k_tanh, {x}, {}, "q"), u = m.op(k_add, {p, q}, {}, "u");
  m.g.outputs = {{"s", m.op(k_add, {m.op(k_mul, {u, v}, {}, "n"), m.op(k_mul, {u, w}, {}, "t")}, {}, "s")}};
  Plan plan = alone(m);
  Program& r = plan.entries[0].programs[0];
  const BufferId z = fresh(r, "z", rows(8)), one = fresh(r, "P", rows(8)), other = fresh(r, "Q", rows(8)),
                 first = buffer(r, "v"), second = buffer(r, "w");
  Instruction p2 = named(r, "p"), q2 = named(r, "q");
  p2.out = {one}, q2.out = {other}, p2.name = "p.2", q2.name = "q.2";
  put_behind(r, "p", p2), put_behind(r, "p", q2);
  const auto op = [&](OpCode code, const char* name, BufferIds in) { return again(r, "fetch.s", code, name, in); };
  put_before(r, "fetch.s", filled("z", z, 0));
  const BufferId vp = op(k_add, "s.1", {op(k_mul, "n.1", {op(k_add, "u.1", {one, z}), first}), z});
  const BufferId wq = op(k_add, "s.2", {z, op(k_mul, "t.2", {op(k_add, "u.2", {z, other}), second})});
  const BufferId both = op(k_add, "s.3", {vp, wq});
  const BufferId all = op(k_add, "s.4", {z, op(k_mul, "t.3", {op(k_add, "u.3", {one, other}), second})});
  named(r, "fetch.s").in = {op(k_add, "s.5", {both, all})};
  say("T: v p + w q + w (p + q), no rule", plan);
}

TEST_CASE("unsound U: a sum of numbers lacks one") {
  using enum OpCode;
  small::Model m;
  m.g.name = "numbers";
  const TensorId x = m.input("x", {8, 4});
  TensorId c[3];
  constexpr const char* kNames[] = {"c1", "c2", "c3"};
  for (int k = 0; k < 3; ++k) c[k] = m.op(k_exp, {number(m, "f", k + 1)}, {}, kNames[k]);
  const TensorId t = m.op(k_add, {m.op(k_add, {c[0], c[1]}, {}, "c12"), c[2]}, {}, "t");
  m.g.outputs = {{"y", m.op(k_mul, {x, m.op(k_tanh, {t}, {}, "e")}, {}, "y")}};
  Plan plan = alone(m);
  say("U: undamaged", plan);
  Program& r = plan.entries[0].programs[0];
  const BufferId first = fresh(r, "c1.own", rows(8)), third = fresh(r, "c3.own", rows(8)),
                 sum = fresh(r, "sum", rows(8));
  named(r, "c1").out = {first}, named(r, "c3").out = {third};
  drop(r, "t"), drop(r, "c12");
  put_before(r, "e", made(k_add, "t", {first, third}, {sum}));
  named(r, "e").in = {sum};
  say("U: tanh of all but one", plan);
}

TEST_CASE("unsound W: some rows of a sum that is the same all along in one summand") {
  using enum OpCode;
  for (const bool turned : {false, true}) {
    small::Model m;
    m.g.name = "rows";
    const TensorId x = m.input("x", {8, 4}), b = m.variable("bias", {4});
    const TensorId p = m.op(k_relu, {x}, {}, "p"), q = m.op(k_tanh, {x}, {}, "q"),
                   bb = m.op(k_exp, {m.op(k_mul, {number(m, "twos", 2), b}, {}, "ob")}, {}, "bb");
    m.g.outputs = {{"t", m.op(k_add, {m.op(k_add, {p, q}, {}, "u"), bb}, {}, "t")}};
    Plan plan = alone(m);
    Program& r = plan.entries[0].programs[0];
    const auto half = [&](const char* name) { return fresh(r, name, rows(4)); };
    const BufferId xs = half("xs"), one = half("P"), other = half("Q"), twos = half("twos"), ob = half("ob"),
                   same = half("bb"), c = half("c"), d = half("d"), out = fresh(r, "out", rows(8));
    Instruction feed = body(r)[0], fetch = named(r, "fetch.t");
    for (const Instruction& i : body(r))
      if (i.kind() == InstructionKind::kFeed) feed = i;
    fetch.in = {out}, fetch.waits.clear();
    body(r) = {feed,
               made(k_local_slice, "s", {buffer(r, "x")}, {xs},
                    {{"sub_axis", Ints{0, 1, 1}}, {"begin", int64_t{0}}, {"end", int64_t{4}}}),
               made(k_relu, "p.1", {xs}, {one}),
               made(k_tanh, "q.1", {xs}, {other}),
               filled("twos.1", twos, 2, 4),
               made(k_mul, "ob.1", {twos, buffer(r, "bias")}, {ob}),
               made(k_exp, "bb.1", {ob}, {same}),
               made(k_add, "t.1", turned ? BufferIds{same, one} : BufferIds{one, same}, {c}),
               made(k_add, "t.2", {other, c}, {d}),
               made(k_concat, "cat", {d, d}, {out}, {{"axis", int64_t{0}}}),
               fetch};
    say("W: rows 0:4 twice", plan);
  }
}

TEST_CASE("unsound AC: one sum by both operands of a product") {
  using enum OpCode;
  small::Model m;
  m.g.name = "gated";
  const TensorId x = m.input("x", {4, 3, 8}), s = m.op(k_reduce_sum, {x}, {{"axes", Ints{0}}}, "s");
  const TensorId q = m.op(k_matmul, {s, m.variable("wq", {8, 8})}, {}, "q"),
                 k = m.op(k_matmul, {s, m.variable("wk", {8, 8})}, {}, "k");
  m.g.outputs = {{"y", m.op(k_mul, {q, k}, {}, "y")}};
  for (const bool wrong : {false, true}) {
    Plan plan = alone(m);
    Program& p = plan.entries[0].programs[0];
    const Instruction sum = named(p, "s"), gate = named(p, "q"), other = named(p, "k"), product = named(p, "y");
    const auto half = [&](const char* name, const Instruction& of, int64_t begin) {  // of s, as q or k has it
      const BufferId part = fresh(p, "part", {2, 3, 8}), some = fresh(p, "some", {3, 8}), out = fresh(p, name, {3, 8});
      put_before(p, "s",
                 made(k_local_slice, "part", {sum.in[0]}, {part},
                      {{"sub_axis", Ints{0, 1, 1}}, {"begin", begin}, {"end", begin + 2}}));
      Instruction sums = sum, made_of = of;
      sums.name = "some", sums.in = {part}, sums.out = {some};
      made_of.name = name, made_of.in[0] = some, made_of.out = {out};
      put_before(p, "s", sums), put_before(p, "s", made_of);
      return out;
    };
    const BufferId a = fresh(p, "a", {3, 8}), b = fresh(p, "b", {3, 8});
    const BufferId first = half("q.0", gate, 0), second = wrong ? half("k.1", other, 2) : half("q.1", gate, 2);
    Instruction one = product, two = product;
    one.name = "y.0", one.in = {first, other.out[0]}, one.out = {a};
    two.name = "y.1", two.in = {wrong ? gate.out[0] : second, wrong ? second : other.out[0]}, two.out = {b};
    put_before(p, "y", one), put_before(p, "y", two);
    named(p, "y") = made(k_add, "y", {a, b}, product.out);
    in_order(p);
    say(wrong ? "AC: half of q and the other half of k (no rule)" : "AC: undamaged, in two halves of q", plan);
  }
}

TEST_CASE("unsound AE: a summand by one operand, the other one by the other") {
  using enum OpCode;
  small::Model m;
  m.g.name = "squares";
  const TensorId x = m.input("x", {8, 4}), w = m.variable("w", {4, 4});
  const TensorId p = m.op(k_tanh, {w}, {}, "p"), q = m.op(k_sigmoid, {w}, {}, "q"), u = m.op(k_add, {p, q}, {}, "u");
  m.g.outputs = {{"y", m.op(k_matmul, {x, m.op(k_matmul, {u, u}, {}, "uu")}, {}, "y")}};
  Plan plan = alone(m);
  say("AE: undamaged", plan);
  Program& r = plan.entries[0].programs[0];
  in_order(r);
  const Instruction product = named(r, "uu"), sum = named(r, "u");
  const auto square = [&](const char* name) { return fresh(r, name, {4, 4}); };
  const BufferId z = square("z"), one = square("one"), other = square("other"), a = square("a"), b = square("b");
  const BufferId first = square("first"), second = square("second");
  Instruction again_p = named(r, "p"), again_q = named(r, "q");
  again_p.out = {first}, again_q.out = {second}, again_p.name = "p.2", again_q.name = "q.2";
  Instruction left = product, right = product;
  left.name = "uu.0", left.in = {one, sum.out[0], kNone}, left.out = {a};
  right.name = "uu.1", right.in = {sum.out[0], other, kNone}, right.out = {b};
  left.in.resize(product.in.size(), kNone), right.in.resize(product.in.size(), kNone);
  put_before(r, "uu", again_p), put_before(r, "uu", again_q);
  put_before(r, "uu",
             made(k_fill, "z", {}, {z}, {{"shape", Ints{4, 4}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
  put_before(r, "uu", made(k_add, "one", {first, z}, {one})),
      put_before(r, "uu", made(k_add, "other", {z, second}, {other}));
  put_before(r, "uu", left), put_before(r, "uu", right);
  named(r, "uu") = made(k_add, "uu", {a, b}, product.out);
  for (Program& each : plan.entries[0].programs) add_row_waits(each);
  CHECK(prove(plan, plan.entries[0]).verdict != ProofVerdict::kProven);
}

namespace {

// A model of p = tanh(x), q = sigmoid(z), their sum u and what `of` makes of it, each in a buffer of its own; `t` is
// what is handed out.
Plan of_sum(const std::function<TensorId(small::Model&, TensorId)>& of) {
  using enum OpCode;
  small::Model m;
  m.g.name = "of a sum";
  const TensorId x = m.input("x", {8, 4}), z = m.input("z", {8, 4});
  const TensorId p = m.op(k_tanh, {x}, {}, "p"), q = m.op(k_sigmoid, {z}, {}, "q");
  m.g.outputs = {{"t", of(m, m.op(k_add, {p, q}, {}, "u"))}, {"p", p}, {"q", q}};
  Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
  in_order(plan.entries[0].programs[0]);
  return plan;
}

void hand_out(Program& p, BufferId other) { named(p, "fetch.t").in = {other}; }

}  // namespace

TEST_CASE("unsound AK: a whole summand beside parts of its own") {
  using enum OpCode;
  Plan plan = of_sum([](small::Model& m, TensorId u) { return m.op(k_neg, {u}, {}, "n"); });
  say("AK: undamaged", plan);
  Program& r = plan.entries[0].programs[0];
  const auto rows = [&](const char* name) { return fresh(r, name, {8, 4}); };
  const BufferId np = rows("np"), nq = rows("nq"), a = rows("a"), b = rows("b"), n = rows("n.2");
  Instruction whole = named(r, "n");
  whole.name = "n.2", whole.out = {n};
  const Instruction last = whole;
  put_behind(r, "n", made(k_add, "n.b", {a, nq}, {b}));
  put_behind(r, "n", made(k_add, "n.a", {np, n}, {a}));
  put_behind(r, "n", last);
  put_behind(r, "n", made(k_neg, "n.q", named(r, "q").out, {nq}));
  put_behind(r, "n", made(k_neg, "n.p", named(r, "p").out, {np}));
  hand_out(r, b);
  say("AK: -p + n - q", plan);
}

TEST_CASE("unsound AL: one tensor is read twice, with unlike terms") {
  using enum OpCode;
  for (const OpCode code : {k_add, k_sub}) {
    Plan plan = of_sum([&](small::Model& m, TensorId u) { return m.op(code, {u, u}, {}, "d"); });
    say("AL: undamaged", plan);
    Program& r = plan.entries[0].programs[0];
    const auto rows = [&](const char* name) { return fresh(r, name, {8, 4}); };
    const BufferId zero = rows("zero"), p = rows("p0"), q = rows("q0"), a = rows("a"), b = rows("b"), c = rows("c");
    Instruction left = named(r, "d"), right = left;
    left.name = "d.a", left.in = {q, left.in[0]}, left.out = {a};
    right.name = "d.b", right.in = {p, p}, right.out = {b};
    put_before(
        r, "d",
        made(k_fill, "zero", {}, {zero}, {{"shape", Ints{8, 4}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
    put_before(r, "d", made(k_add, "u.q", {zero, named(r, "q").out[0]}, {q}));
    put_before(r, "d", made(k_add, "u.p", {named(r, "p").out[0], zero}, {p}));
    put_before(r, "d", left), put_before(r, "d", right);
    put_before(r, "d", made(k_add, "d.c", {a, b}, {c}));
    drop(r, "d");
    hand_out(r, c);
    say("AL: no rule for q op u + p op p", plan);
  }
}
