// Plans that are not their program by where something lies: boxes, versions, rows of the schedule.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/fused.h"
#include "own_programs.h"
#include "plan_damage.h"
#include "unit/small_models.h"
#include "unit/trained.h"
#include "unsound.h"

using namespace whale;
using namespace whale::test;

namespace {

// Of a dropout of 24 columns, of which each of two devices has some; `thirds`: of each third.
Plan dropped(bool thirds) {
  using enum OpCode;
  small::Model m;
  m.g.name = "dropped";
  const TensorId x = m.input("x", {8, 4}), w = m.variable("w", {4, 24});
  const TensorId d = m.op(k_dropout, {m.op(k_matmul, {x, w}, {}, "mm")}, {{"rate", 0.5}, {"key", int64_t{7}}}, "drop");
  TensorId y = m.op(k_square, {d});
  if (thirds) {
    const TensorId parts = m.op(k_reshape, {d}, {{"shape", Ints{8, 3, 8}}});
    const auto third = [&](int64_t n) {
      return m.op(k_slice, {parts}, {{"starts", Ints{0, n, 0}}, {"limits", Ints{8, n + 1, 8}}});
    };
    y = m.op(k_mul, {m.op(k_mul, {third(0), third(1)}), third(2)});
  }
  m.minimize(m.op(k_reduce_mean, {y}, {}, "loss"), OptimizerKind::kSgd);
  Plan plan = plan_of(m.g, "null:2", "split(2)", [](CompileOptions& o) { o.fusion = false; });
  give_own_programs(plan.entries[0]);
  return plan;
}

template <class Change>
int change_boxes(Plan& plan, Change change) {
  int n = 0;
  for (Program& p : plan.entries[0].programs)
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (auto* k = i.as<work::Kernel>(); k && has_flag(k->op, kRandom)) change(k->box), ++n;
  return n;
}

// What micro-batches read: w, by a copy that a row of the whole batch makes before them. The other one copies u.
struct Copied {
  Plan plan;
  int32_t of_w = 0, of_u = 0;  // segments
};
Copied copied(int32_t versions) {
  using enum OpCode;
  small::Model m;
  m.g.name = "copied";
  const TensorId x = m.input("x", {12, 4});
  const TensorId a = m.op(k_matmul, {x, m.variable("w", {4, 6})}, {}, "mw"),
                 b = m.op(k_matmul, {x, m.variable("u", {4, 6})}, {}, "mu");
  m.minimize(m.op(k_reduce_mean, {m.op(k_mul, {m.op(k_tanh, {a}), m.op(k_exp, {b})}, {}, "y")}, {}, "loss"),
             OptimizerKind::kSgd);
  Copied out{plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false, o.accumulation = 6; })};
  Program& p = out.plan.entries[0].programs[0];
  Instruction& mw = named(p, "mw");
  const BufferId w = mw.in[1], u = named(p, "mu").in[1], copy = fresh(p, "copy", {4, 6});
  p.buffers[copy].versions = versions;
  p.arena_bytes += (versions - 1) * 128;
  mw.in[1] = copy;
  const auto segment = [&](const char* name, BufferId of) {
    const Attrs all{{"sub_axis", Ints{0, 1, 1}}, {"begin", int64_t{0}}, {"end", int64_t{4}}};
    p.segments.push_back({.name = name, .instructions = {made(k_local_slice, name, {of}, {copy}, all)}});
    return static_cast<int32_t>(p.segments.size()) - 1;
  };
  out.of_w = segment("copy.w", w), out.of_u = segment("copy.u", u);
  return out;
}

// A row of the whole batch before the first one of this micro-batch.
void put_row(Plan& plan, int32_t micro_batch, int32_t segment, int32_t version = 0) {
  std::vector<ScheduleRow>& rows = plan.entries[0].programs[0].schedule;
  const auto at =
      std::ranges::find_if(rows, [&](const ScheduleRow& r) { return !r.whole && r.micro_batch == micro_batch; });
  rows.insert(at, ScheduleRow{.segment = segment, .version = version, .whole = true});
}

}  // namespace

TEST_CASE("unsound AM: a cut of a box has another extent") {
  Plan plan = dropped(true);
  say("AM: undamaged", plan);
  CHECK(change_boxes(plan, [](Box& box) {
          REQUIRE(box.cuts.size() == 1);
          ++box.cuts[0].extent;
        }) > 0);
  say("AM: 9 of each third for 8", plan);
}

TEST_CASE("unsound AN: two cuts of a box are of the same elements") {
  Plan plan = dropped(false);
  say("AN: undamaged", plan);
  CHECK(change_boxes(plan, [](Box& box) {
          const int64_t begin = box.origin[1];
          box.origin[1] = 0;
          box.cuts = {{{1, 1, 1}, 24, begin, 12}, {{1, 1, 1}, 24, begin == 0 ? 0 : begin - 3, 15}};
        }) > 0);
  say("AN: what both have", plan);
}

TEST_CASE("unsound AO: a kernel counts the elements of its result, and draws for fewer") {
  using enum OpCode;
  small::Model m;
  m.g.name = "one for a row";
  const TensorId x = m.input("x", {8, 4});
  const TensorId d = m.op(k_dropout, {m.op(k_matmul, {x, m.variable("w", {4, 1})}, {}, "h")},
                          {{"rate", 0.5}, {"key", int64_t{7}}}, "drop");
  m.minimize(m.op(k_reduce_mean, {m.op(k_add, {d, m.op(k_matmul, {x, m.variable("w2", {4, 6})}, {}, "h2")}, {}, "y")},
                  {}, "loss"),
             OptimizerKind::kSgd);
  Plan plan = plan_of(m.g, "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
  say("AO: undamaged", plan);
  Program& p = plan.entries[0].programs[0];
  const Instruction drawn = named(p, "drop");
  Instruction& y = named(p, "y");
  std::ranges::replace(y.in, drawn.out[0], drawn.in[0]);
  if (y.in[0] != drawn.in[0]) std::swap(y.in[0], y.in[1]);
  FusedBody body;
  body.steps = {{k_dropout, DType::kF32, {0}, 0.5, drawn.kernel()->key}, {k_add, DType::kF32, {2, 1}, 0, 0}};
  body.results = {3};
  auto* k = y.as<work::Kernel>();
  k->op = k_fused, k->attrs = complete_attrs(def(k_fused), encode(body, 2)), k->box = drawn.kernel()->box;
  drop(p, "drop");
  in_order(p);
  say("AO: dropout of a column within a sum of six", plan);
}

TEST_CASE("unsound AP: micro-batches that others stand for read another version") {
  for (const bool wrong : {false, true}) {
    Copied c = copied(2);
    put_row(c.plan, 0, c.of_w, 0), put_row(c.plan, 0, wrong ? c.of_u : c.of_w, 1);
    for (ScheduleRow& r : c.plan.entries[0].programs[0].schedule)
      if (!r.whole && (r.micro_batch == 2 || r.micro_batch == 3)) r.version = 1;
    say(wrong ? "AP: u for w" : "AP: undamaged", c.plan);
  }
}

TEST_CASE("unsound AQ: what micro-batches read is written anew between them") {
  for (const bool wrong : {false, true}) {
    Copied c = copied(1);
    put_row(c.plan, 5, c.of_w), put_row(c.plan, 2, wrong ? c.of_u : c.of_w), put_row(c.plan, 0, c.of_w);
    say(wrong ? "AQ: u for w" : "AQ: undamaged", c.plan);
  }
}

// What the second device fetches of the loss it hands nobody; what it votes on is the loss.
TEST_CASE("a device votes on what its vote reads") {
  using enum OpCode;
  Plan plan = plan_of(small::mlp().g, "ref:2", "replica(2)", [](CompileOptions& o) { o.fusion = false; });
  Entry& e = plan.entries[0];
  if (e.programs.size() == 1) e.programs.push_back(e.programs[0]), e.rows[1].program = 1;
  Program& p = e.programs[1];
  for (Program& each : e.programs) in_order(each);
  const BufferId both = fresh(p, "both", {2});
  const auto half = [&](const char* name, int64_t at) {
    Buffer b = p.buffers[both];
    b.name = name, b.dims = {}, b.bytes = 4, b.alias = both, b.at = at;
    p.buffers.push_back(b);
    return static_cast<BufferId>(p.buffers.size()) - 1;
  };
  const BufferId loss = half("loss.copy", 0), other = half("other", 4);
  int votes = 0, fetches = 0;
  for (Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      Instruction& i = s.instructions[k];
      if (const auto* f = i.as<work::Fetch>(); f && f->output == e.loss()) i.in = {other}, ++fetches;
      if (i.kind() != InstructionKind::kVote || votes++ > 0) continue;
      const BufferId of = std::exchange(i.in[0], loss);
      const Attrs nan{{"shape", Ints{}}, {"value", std::nan("")}, {"dtype", std::string("f32")}};
      s.instructions.insert(
          s.instructions.begin() + static_cast<std::ptrdiff_t>(k),
          {made(k_stop_gradient, "loss.copy", {of}, {loss}), made(k_fill, "other", {}, {other}, nan)});
      k += 2;
    }
  REQUIRE(votes == 1);
  REQUIRE(fetches == 1);
  for (Program& each : e.programs) add_row_waits(each);
  CHECK(prove(plan, e).verdict == ProofVerdict::kProven);
  CHECK(small::train(plan, 2).losses.size() == 2);
}

// Devices that have no elements of what is summed make zeros, and go on with them.
TEST_CASE("exact proofs: more devices than elements of a sum") {
  using enum OpCode;
  for (const OpCode code : {k_mul, k_div}) {
    small::Model m;
    m.g.name = "few";
    const TensorId y = m.op(k_matmul, {m.input("x", {4, 2}), m.variable("w", {2, 3})}, {}, "few.product");
    m.minimize(m.op(k_reduce_mean, {m.op(k_square, {m.op(code, {y, m.variable("s", {})})})}), OptimizerKind::kSgd);
    const Plan plan = plan_of(m.g, "null:3", "split(3, factor=k)", [](CompileOptions& o) { o.exact = true; });
    const EntryProof proof = prove(plan, plan.entries[0]);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
  }
}
