// A small plan written by hand: p = x * w, loss = sum(p^2), w -= lr * sum(x * p) over the global batch. Data parallel
// over any devices and micro-batches.
#pragma once

#include "cluster/shares.h"
#include "hand_builder.h"
#include "plan/groups.h"

namespace whale::test {

struct HandOptions {
  int devices = 2;
  int64_t batch = 6;
  int64_t micro_batches = 1;
  DeviceKind kind = DeviceKind::kRef;
  bool overlap = true;  // the all-reduce on the communication queue
  bool update = true;   // false: an "eval" entry
  std::string name = "train";
};

// Samples of device d in micro-batch u: contiguous, sizes as equal as they come.
inline SampleRange hand_range(const HandOptions& o, int device, int64_t u) {
  const auto even = [](int64_t total, int64_t n, int64_t k) {
    return cut_by_shares(total, std::vector<double>(static_cast<size_t>(n), 1))[k];
  };
  const Interval run = even(o.batch, o.micro_batches, u), mine = even(run.size(), o.devices, device);
  return {run.begin + mine.begin, run.begin + mine.end};
}

class HandProgram : private HandBuilder {
 public:
  explicit HandProgram(const HandOptions& options) : o_(options) {}

  Program make(int device) {
    program_ = {};
    const BufferId w = add("w", BufferKind::kVariable, {kWidth}, 0);
    const BufferId rate = add("learning_rate", BufferKind::kStep, {}, static_cast<int>(StepScalar::kLearningRate));
    const BufferId g_sum = add("g_sum", BufferKind::kArena, {kWidth}), l_sum = add("l_sum", BufferKind::kArena, {});
    segment("prologue");
    zero("zero_g", g_sum, {kWidth});
    zero("zero_l", l_sum, {});
    schedule(0, 0, true);
    for (int64_t u = 0; u < o_.micro_batches; ++u) {
      body(hand_range(o_, device, u).size(), w, g_sum, l_sum);
      schedule(static_cast<int32_t>(u), 0, false);
    }
    epilogue(w, rate, g_sum, l_sum);
    schedule(0, 0, true);
    return built();
  }

 private:
  void body(int64_t n, BufferId w, BufferId g_sum, BufferId l_sum) {
    segment("body/" + std::to_string(n));
    const BufferId x = add("x", BufferKind::kInput, {n, kWidth}, 0), p = add("p", BufferKind::kArena, {n, kWidth});
    const BufferId q = add("q", BufferKind::kArena, {n, kWidth}), s = add("s", BufferKind::kArena, {n, kWidth});
    const BufferId g = add("g", BufferKind::kArena, {kWidth}), l = add("l", BufferKind::kArena, {});
    move(work::Feed{0}, "feed x", x);
    op(OpCode::k_mul, "p", {x, w}, {p});
    move(work::Fetch{1}, "fetch p", p);
    op(OpCode::k_mul, "q", {p, x}, {q});
    sum("g", q, g, {0});
    op(OpCode::k_square, "s", {p}, {s});
    sum("l", s, l, {0, 1});
    accumulate("add g", g_sum, g);
    accumulate("add l", l_sum, l);
  }

  int32_t reduce(const std::string& name, BufferId x) {
    Instruction& i = op(OpCode::k_all_reduce, name, {x}, {x});
    if (o_.overlap) i.queue = Queue::kReplica;
    return static_cast<int32_t>(program_.segments.back().instructions.size()) - 1;
  }

  void loss(BufferId l_sum) {
    const int32_t reduced = reduce("reduce loss", l_sum);
    move(work::Fetch{0}, "fetch loss", l_sum).waits = {{o_.overlap ? Queue::kReplica : Queue::kCompute, reduced}};
  }

  void epilogue(BufferId w, BufferId rate, BufferId g_sum, BufferId l_sum) {
    segment("epilogue");
    loss(l_sum);
    if (o_.update) {
      vote(l_sum);
      commit();
      const int32_t reduced = reduce("reduce g", g_sum);
      sgd("update w", rate, w, g_sum).waits = {{o_.overlap ? Queue::kReplica : Queue::kCompute, reduced}};
    }
  }

  HandOptions o_;
};

inline Entry hand_entry(const HandOptions& o) {
  Entry entry;
  entry.name = o.name;
  entry.batch = o.batch;
  entry.inputs = {{"x", DType::kF32, {o.batch, kWidth}, 0}};
  entry.outputs = {{"loss", DType::kF32, {}, OutputMerge::kSum, -1, 0, {false}, {}},
                   {"p", DType::kF32, {o.batch, kWidth}, OutputMerge::kConcat, 0, 0, {true}, {}}};
  for (int d = 0; d < o.devices; ++d) {
    entry.programs.push_back(HandProgram(o).make(d));
    DeviceRow row;
    row.device = row.program = d;
    row.coordinates = {d};
    SampleCut cut;
    for (int64_t u = 0; u < o.micro_batches; ++u) cut.micro_batches.push_back(hand_range(o, d, u));
    cut.whole = hand_range({.devices = o.devices, .batch = o.batch}, d, 0);
    row.samples = {cut};
    entry.rows.push_back(row);
  }
  return entry;
}

inline Plan hand_plan(const HandOptions& o = {}) {
  Plan plan;
  plan.model = "hand";
  plan.micro_batches = o.micro_batches;
  std::vector<int32_t> all;
  for (int d = 0; d < o.devices; ++d) {
    plan.devices.push_back({o.kind, {}, 0});
    all.push_back(d);
  }
  plan.meshes = {{{{"replica", o.devices, {}, {}}}, all}};
  plan.groups = groups_of(plan.meshes);
  if (o.devices == 1) plan.groups = {{"replica", {all}}};  // whose collectives are there all the same
  plan.scopes = {Scope{}};
  plan.variables = {hand_variable("w", {kWidth}, 0, 1)};
  plan.optimizer.kind = OptimizerKind::kSgd;
  plan.optimizer.learning_rate = 0.01;
  plan.entries = {hand_entry(o)};
  return plan;
}

// The oracle: one device, plain loops.
struct HandModel {
  std::vector<float> w = std::vector<float>(kWidth, 1.0f);
  float step(const std::vector<float>& x, float rate) {
    float loss = 0;
    std::vector<float> g(kWidth, 0);
    for (size_t i = 0; i < x.size(); ++i) {
      const float p = x[i] * w[i % kWidth];
      loss += p * p;
      g[i % kWidth] += p * x[i];
    }
    for (size_t k = 0; k < w.size(); ++k) w[k] -= rate * g[k];
    return loss;
  }
};

}  // namespace whale::test
