// Operands that come piece by piece: attention over pieces of its keys, the ring that a gather becomes, and that it
// changes no result.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "cpu_compare.h"
#include "grad/passes.h"
#include "plan/lives.h"
#include "plan/verify.h"
#include "prove/prove.h"
#include "rewrite/fold.h"
#include "rewrite/stream.h"
#include "shard/insert.h"
#include "trained.h"
#include "unit/tasks.h"

namespace whale {
namespace {

using enum OpCode;
using test::Input;

// ---- pieces -----------------------------------------------------------------------------------------------------
struct Problem {
  int64_t b, tq, tk, h, hk, d;
  bool causal = false;
  double dropout = 0;
  bool bias = false;
};

Input noise(Dims dims, uint64_t seed) {
  Input x = test::f32(std::move(dims));
  for (int64_t i = 0; i < element_count(x.dims); ++i)
    x.values.push_back(static_cast<float>(std::sin(0.37 * static_cast<double>(i) + static_cast<double>(seed) * 1.7)));
  return x;
}
// Rows [begin, end) of dimension 1.
Input rows(const Input& x, int64_t begin, int64_t end) {
  Input out = test::f32({x.dims[0], end - begin, x.dims[2], x.dims[3]});
  const int64_t row = x.dims[2] * x.dims[3];
  for (int64_t b = 0; b < x.dims[0]; ++b)
    for (int64_t i = begin * row; i < end * row; ++i) out.values.push_back(x.values[b * x.dims[1] * row + i]);
  return out;
}
Input with(Dims dims, std::vector<double> values) {
  Input x = test::f32(std::move(dims));
  x.values = std::move(values);
  return x;
}
void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::isinf(a[i]) && a[i] == b[i])) most = std::max(most, std::abs(a[i] - b[i]));
  CHECK(most <= tolerance);
}

TEST_CASE("attention over pieces of the keys, merged, is attention over all of them") {
  const std::vector<int64_t> cuts{0, 5, 6, 17};
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu})
    for (const Problem& p : std::vector<Problem>{{2, 9, 17, 4, 4, 8},
                                                 {1, 17, 17, 4, 2, 16, true},
                                                 {2, 17, 17, 2, 1, 12, true, 0.3},
                                                 {1, 20, 17, 2, 2, 8, true, 0.2, true},  // rows without keys
                                                 {2, 9, 17, 2, 2, 8, false, 0, true}}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(p.causal);
      CAPTURE(p.dropout);
      CAPTURE(p.bias);
      const Input q = noise({p.b, p.tq, p.h, p.d}, 1), k = noise({p.b, p.tk, p.hk, p.d}, 2);
      const Input v = noise({p.b, p.tk, p.hk, p.d}, 3), dout = noise({p.b, p.tq, p.h, p.d}, 4);
      const Input bias = p.bias ? noise({1, p.h, p.tq, p.tk}, 5) : test::absent();
      Attrs attrs{{"causal", p.causal}, {"dropout", p.dropout}, {"key", int64_t{11}}};
      const auto whole = test::run_op(kind, 1, k_attention, attrs, {q, k, v, bias});
      const Input out = with({p.b, p.tq, p.h, p.d}, whole[0]), lse = with({p.b, p.h, p.tq}, whole[1]);
      std::vector<std::vector<double>> sum;
      const auto piece = [&](size_t c) {
        attrs["keys"] = p.tk;
        attrs["key_begin"] = cuts[c];
        return std::pair(rows(k, cuts[c], cuts[c + 1]), rows(v, cuts[c], cuts[c + 1]));
      };
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        const auto [kc, vc] = piece(c);
        const auto part = test::run_op(kind, 1, k_attention, attrs, {q, kc, vc, bias});
        if (c == 0) {
          sum = part;
          continue;
        }
        sum = test::run_op(
            kind, 1, k_attention_merge, {},
            {with(out.dims, sum[0]), with(lse.dims, sum[1]), with(out.dims, part[0]), with(lse.dims, part[1])});
      }
      check_near(sum[0], whole[0], 2e-6);
      check_near(sum[1], whole[1], 4e-6);
      // The gradient: dq (and dbias) are sums over the pieces, dk and dv lie as they do.
      Attrs grad_attrs{{"causal", p.causal}, {"dropout", p.dropout}, {"key", int64_t{11}}, {"bias_grad", p.bias}};
      const auto grads = test::run_op(kind, 1, k_attention_grad, grad_attrs, {dout, q, k, v, out, lse, bias});
      std::vector<double> dq(grads[0].size()), dbias(p.bias ? grads[3].size() : 0);
      for (size_t c = 0; c + 1 < cuts.size(); ++c) {
        const auto [kc, vc] = piece(c);
        grad_attrs["keys"] = p.tk;
        grad_attrs["key_begin"] = cuts[c];
        const auto part = test::run_op(kind, 1, k_attention_grad, grad_attrs, {dout, q, kc, vc, out, lse, bias});
        for (size_t i = 0; i < dq.size(); ++i) dq[i] += part[0][i];
        for (size_t i = 0; i < dbias.size(); ++i) dbias[i] += part[3][i];
        for (const size_t at : {size_t{1}, size_t{2}})
          check_near(part[at], rows(with(k.dims, grads[at]), cuts[c], cuts[c + 1]).values, 1e-5);
      }
      check_near(dq, grads[0], 1e-5);
      if (p.bias) check_near(dbias, grads[3], 1e-5);
    }
}

TEST_CASE("a piece must lie inside the keys, and has no gradient of its own") {
  small::Model m;
  const TensorId q = m.input("q", {1, 4, 2, 8}), k = m.input("k", {1, 3, 2, 8});
  CHECK_THROWS_WITH_AS(m.op(k_attention, {q, k, k}, {{"keys", int64_t{4}}, {"key_begin", int64_t{2}}}),
                       doctest::Contains("keys [2, 5) are no piece of 4 keys"), Error);
  CHECK_NOTHROW(m.op(k_attention, {q, k, k}, {{"keys", int64_t{5}}, {"key_begin", int64_t{2}}}));
}

// ---- plans ------------------------------------------------------------------------------------------------------
Plan plan_of(const small::Model& m, const std::string& devices, const std::string& strategy, int64_t accumulation = 0) {
  CompileOptions options;
  options.strategy = strategy;
  options.accumulation = accumulation;
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}

// Instructions of an op in the training program of a device.
std::vector<const Instruction*> all_of(const Program& p, OpCode op) {
  std::vector<const Instruction*> out;
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      if (i.op() == op) out.push_back(&i);
  return out;
}

TEST_CASE("a split of the sequence goes round: no device has all keys, none is gathered") {
  const int64_t seq = 24, layers = 2;
  const small::Model gpt = small::gpt(2, OptimizerKind::kAdamW, layers, seq);
  for (const int64_t n : {2, 3, 4}) {
    CAPTURE(n);
    const Plan plan = plan_of(gpt, fmt::format("null:{}", n), fmt::format("split({}, factor=sequence)", n));
    for (const Entry& e : plan.entries)
      for (const Program& p : e.programs) {
        const auto dims = [&](BufferId b) { return p.buffers[b].dims; };
        const bool train = e.name == "train";
        const auto forward = all_of(p, k_attention), backward = all_of(p, k_attention_grad);
        CHECK(static_cast<int64_t>(forward.size()) == n * layers);
        CHECK(static_cast<int64_t>(backward.size()) == (train ? n * layers : 0));
        // Keys and values of n - 1 rounds; backward their gradients too, which go all the way round.
        const int64_t shifts = 2 * (n - 1) + (train ? 2 * (n - 1) + 2 * n : 0);
        CHECK(static_cast<int64_t>(all_of(p, k_shift).size()) == shifts * layers);
        std::set<int64_t> begins;
        for (const Instruction* i : forward) {
          CHECK(dims(i->in[1])[1] == seq / n);
          CHECK(dims(i->in[2])[1] == seq / n);
          CHECK(attr_int(i->kernel()->attrs, "keys") == seq);
          begins.insert(attr_int(i->kernel()->attrs, "key_begin"));
        }
        CHECK(static_cast<int64_t>(begins.size()) == n);
        for (const Instruction* i : backward) CHECK(dims(i->in[2])[1] == seq / n);
        for (const Buffer& b : p.buffers)
          if (b.name.find("attention") != b.name.npos && b.dims.size() == 4) CHECK(b.dims[1] == seq / n);
      }
  }
}

// The most pieces of keys and values that lie in memory at once, by the plan's own lives of storage.
int64_t most_pieces(const Program& p) {
  std::set<BufferId> held;
  for (const Instruction* i : all_of(p, k_attention))
    for (const size_t at : {size_t{1}, size_t{2}}) held.insert(storage_of(p, i->in[at]));
  const std::vector<Life> lives = lives_of(p);
  int64_t most = 0;
  for (const BufferId a : held) {
    int64_t n = 0;
    for (const BufferId b : held) {
      const Life &x = lives[a], &y = lives[b];
      n += y.first <= x.first && x.first <= y.last;
    }
    most = std::max(most, n);
  }
  return most;
}

TEST_CASE("while one piece is worked on the next one comes, and no more") {
  const small::Model gpt = small::gpt(2, OptimizerKind::kAdamW, 1, 64);
  for (const int64_t n : {4, 8}) {
    const Plan plan = plan_of(gpt, fmt::format("null:{}", n), fmt::format("split({}, factor=sequence)", n));
    for (const Program& p : plan.entries[1].programs) {  // evaluation: nothing is kept for a backward pass
      CHECK(most_pieces(p) <= 2 * 3);                    // keys and values: here, coming, and going
      // A shift runs beside the round: the round before does not wait for it.
      for (const Segment& s : p.segments)
        for (size_t k = 0; k < s.instructions.size(); ++k) {
          if (s.instructions[k].op() != k_attention) continue;
          const auto next = std::find_if(s.instructions.begin() + static_cast<int64_t>(k), s.instructions.end(),
                                         [](const Instruction& i) { return i.op() == k_attention_merge; });
          for (const Wait& w : s.instructions[k].waits)
            if (w.queue == Queue::kSplit && s.instructions[w.index].op() == k_shift)
              CHECK(std::find(s.instructions[k].in.begin(), s.instructions[k].in.end(),
                              s.instructions[w.index].out[0]) != s.instructions[k].in.end());
          CHECK(next != s.instructions.end());
        }
    }
  }
}

TEST_CASE("memory falls with the number of devices") {
  const small::Model gpt = small::gpt(1, OptimizerKind::kAdamW, 1, 512, 16, 8);
  const auto arena = [&](int64_t n) {
    const Plan plan = plan_of(gpt, fmt::format("null:{}", n), fmt::format("split({}, factor=sequence)", n));
    return plan.entries[1].programs[0].arena_bytes;
  };
  CHECK(static_cast<double>(arena(8)) < 0.65 * static_cast<double>(arena(4)));
}

TEST_CASE("going round changes no result") {
  const small::Model even = small::gpt(2, OptimizerKind::kSgd, 2, 12), odd = small::gpt(2, OptimizerKind::kSgd, 2, 13);
  for (const auto& [devices, strategy, accumulation] : std::vector<std::tuple<const char*, const char*, int64_t>>{
           {"ref:2", "split(2, factor=sequence)", 1},
           {"ref:3", "split(3, factor=sequence, shares=[3,2,1])", 1},
           {"ref:4", "replica(2) > split(2, factor=sequence)", 1},
           {"ref:4", "split(2, factor=sequence) > replica(2)", 1},
           {"ref:4", "split(2, factor=sequence) > split(2)", 1},
           {"ref:4", "pipeline(2, micro_batches=2) > split(2, factor=sequence)", 0},
           {"ref:3", "split(3, factor=sequence)", 2},
           {"ref:3", "split(3, factor=sequence, shares=[1,0,2])", 1},  // gathered: one has no share
           {"cpu@0*2", "split(2, factor=sequence)", 1}})
    for (const small::Model* m : {&even, &odd}) {
      CAPTURE(devices);
      CAPTURE(strategy);
      const auto one = small::train(plan_of(*m, "ref:1", "local", accumulation ? accumulation : 2), 3, 32);
      CHECK(distance(one, small::train(plan_of(*m, devices, strategy, accumulation), 3, 32)) < 3e-6);
    }
}

TEST_CASE("what has no samples does not go round") {
  struct Case {
    int64_t batch, last;
    const char *devices, *strategy;
  };
  for (const Case& c : std::vector<Case>{
           {3, 3, "null:8", "replica(2) > pipeline(2, micro_batches=2) > split(2, factor=sequence)"},
           {8, 2, "null:4", "pipeline(2, micro_batches=4, schedule=zb_h1) > split(2, factor=sequence)"}}) {
    CAPTURE(c.strategy);
    CompileOptions options;
    options.strategy = c.strategy;
    if (c.last != c.batch) options.train_batches = {c.last};
    const Plan plan = compile(small::gpt(c.batch).g, parse_devices(c.devices, {0, 1, 2, 3}), options);
    CHECK_NOTHROW(verify(plan));
    CHECK(prove(plan).verdict == ProofVerdict::kProven);
    int64_t with = 0, without = 0;  // rows of the body
    for (const Entry& e : plan.entries)
      for (const DeviceRow& d : e.rows) {
        const Program& p = e.programs[d.program];
        if (e.name != "train" || e.batch != c.last) continue;
        for (const ScheduleRow& row : p.schedule) {
          if (row.whole) continue;
          const int64_t samples = d.samples[0].micro_batches[row.micro_batch].size();
          const auto& list = p.segments[row.segment].instructions;
          const auto meet = std::ranges::count_if(list, [](const Instruction& i) { return i.group() != kNone; });
          (samples == 0 ? without : with) += meet;
        }
      }
    CHECK(with > 0);
    CHECK(without == 0);
  }
}

TEST_CASE("a sum that goes around is rounded when it is whole along all axes") {
  small::Model gpt = small::gpt(2, OptimizerKind::kSgd, 1, 12, 24, 32, 6);
  gpt.g.training.precision = Precision::kBFloat16;
  const Plan plan = plan_of(gpt, "ref:6", "split(2, factor=sequence) > split(3)");
  size_t sums = 0;
  for (const Program& p : plan.entries[0].programs) {
    std::set<BufferId> gone_round;
    for (const Instruction* i : all_of(p, k_shift)) gone_round.insert(i->out.begin(), i->out.end());
    for (const Instruction* i : all_of(p, k_reduce_scatter)) {
      if (!gone_round.contains(i->in[0])) continue;
      ++sums;
      CHECK(p.buffers[i->in[0]].dtype == DType::kF32);
    }
  }
  CHECK(sums > 0);
  const auto one = small::train(plan_of(gpt, "ref:1", "local"), 3, 32);
  CHECK(distance(one, small::train(plan, 3, 32)) < 1e-2);
}

TEST_CASE("two runs of a ring have the same bits") {
  const small::Model gpt = small::gpt(2, OptimizerKind::kAdamW, 2, 13);
  const Plan plan = plan_of(gpt, "cpu@0*3", "split(3, factor=sequence)");
  CHECK(small::train(plan, 2, 32) == small::train(plan, 2, 32));
}

// ---- shardings --------------------------------------------------------------------------------------------------
ShardedGraph laid_out(small::Model m, int64_t devices, const std::string& strategy) {
  const TaskGraphs tasks = small::tasks_of(m.g, devices, strategy);
  canonicalise(m.g);
  decompose_splits(m.g, tasks);
  differentiate(m.g);
  add_updates(m.g);
  clean(m.g);
  assign_regions(m.g);
  ShardedGraph lg = small::lay_out(m.g, tasks, {.fetch_gradients = {}});
  stream_gathers(lg);
  verify(lg);
  return lg;
}

TEST_CASE("the verifier sees a piece that is another device's") {
  ShardedGraph lg = laid_out(small::gpt(2, OptimizerKind::kAdamW, 1, 12), 3, "split(3, factor=sequence)");
  int shifts = 0;
  for (const Op& op : lg.graph.ops) {
    if (op.code != k_shift) continue;
    ++shifts;
    AxisSharding &from = lg.at(op.inputs[0], 1), &to = lg.at(op.outputs[0], 1);
    CHECK(to.rotate == (from.rotate + 1) % 3);
  }
  CHECK(shifts == 4 + 4 + 6);
  for (const Op& op : lg.graph.ops)
    if (op.code == k_attention && op.name.ends_with(".1")) {
      ShardedGraph wrong = lg;
      wrong.at(op.inputs[2], 1).rotate = 2;  // values of other places than the keys
      CHECK_THROWS_WITH(verify(wrong), doctest::Contains("the pieces of an op are of different shares"));
    }
  ShardedGraph moved = lg;  // a sum of pieces that are not the same ones
  for (const Op& op : lg.graph.ops)
    if (op.code == k_add && op.name.find(".k.grad.2.to2") != op.name.npos) moved.at(op.inputs[0], 1).rotate = 1;
  CHECK_THROWS_WITH(verify(moved), doctest::Contains("no factor explains"));
}

TEST_CASE("without being asked a ring is taken where time or memory say so") {
  // Queries, keys and values cut by their sequence because their inputs are.
  const auto rings = [](int64_t seq, int64_t n) {
    small::Model m;
    const TensorId x = m.input("x", {1, seq, 2, 64});
    const TensorId s = m.variable("scale", {2, 64});
    const TensorId h = m.op(k_mul, {x, s});
    const TensorId y = m.op(k_attention, {h, m.op(k_sin, {h}), m.op(k_exp, {h})}, {}, "attention");
    m.minimize(m.op(k_reduce_mean, {y}), OptimizerKind::kSgd);
    const TaskGraphs tasks = small::tasks_of(m.g, n, fmt::format("split({})", n));
    canonicalise(m.g);
    differentiate(m.g);
    add_updates(m.g);
    assign_regions(m.g);
    ShardedGraph lg = small::lay_out(m.g, tasks, {.fetch_gradients = {}});
    stream_gathers(lg);
    verify(lg);
    return std::count_if(lg.graph.ops.begin(), lg.graph.ops.end(), [](const Op& op) { return op.code == k_shift; });
  };
  CHECK(rings(16, 4) == 0);
  CHECK(rings(65536, 4) > 0);
}

}  // namespace
}  // namespace whale
