// A pipeline of two devices written by hand: a = x * w0 on the first, p = a * w1 and loss = sum(p^2) on the second,
// backward with links, one forward and one backward in turn, two versions.
#pragma once

#include "hand_builder.h"

namespace whale::test {

struct PipelineOptions {
  int64_t batch = 8, micro_batches = 4;
  int32_t link_capacity = 1;
  bool queues = false;  // links on the communication queue
  bool update = true;   // false: an "eval" entry
  DeviceKind kind = DeviceKind::kRef;
  SampleRange range(int64_t u) const { return {batch * u / micro_batches, batch * (u + 1) / micro_batches}; }
};

enum PipelineLink : int { kActivation, kGradient, kPipelineLinks };

class PipelineProgram : private HandBuilder {
 public:
  explicit PipelineProgram(const PipelineOptions& options)
      : o_(options), n_(options.batch / options.micro_batches), versions_(2) {}

  Program first() {
    const BufferId w = add("w0", BufferKind::kVariable, {kWidth}, 0), rate = rate_buffer(),
                   g_sum = add("g_sum", BufferKind::kArena, {kWidth});
    const BufferId x = add("x", BufferKind::kInput, {n_, kWidth}, 0, kNone, versions_), a = local("a"),
                   da = local("da"), q = local("q"), g = add("g", BufferKind::kArena, {kWidth});
    segment("prologue");
    zero("zero_g", g_sum, {kWidth});
    segment("forward.0");
    move(work::Feed{0}, "feed x", x);
    op(OpCode::k_mul, "a", {x, w}, {a});
    link(work::Send{kActivation}, a);
    if (o_.update) {
      segment("backward.0");
      link(work::Receive{kGradient}, da);
      after_link(op(OpCode::k_mul, "q0", {da, x}, {q}));
      sum("g0", q, g, {0});
      accumulate("add g0", g_sum, g);
      segment("epilogue");
      commit();
      sgd("update w0", rate, w, g_sum);
    }
    schedule(0, 0, 0, true);
    forward(0);
    for (int32_t u = 0; u < o_.micro_batches; ++u) {
      if (u + 1 < o_.micro_batches) forward(u + 1);
      if (o_.update) schedule(2, u, u % versions_, false);
    }
    if (o_.update) schedule(3, 0, 0, true);
    return built();
  }

  Program second() {
    const BufferId w = add("w1", BufferKind::kVariable, {kWidth}, 1), rate = rate_buffer(),
                   g_sum = add("g_sum", BufferKind::kArena, {kWidth}), l_sum = add("l_sum", BufferKind::kArena, {});
    const BufferId a = local("a"), p = local("p"), s = local("s"), q = local("q"), da = local("da"),
                   g = add("g", BufferKind::kArena, {kWidth}), l = add("l", BufferKind::kArena, {});
    segment("prologue");
    zero("zero_g", g_sum, {kWidth});
    zero("zero_l", l_sum, {});
    segment("forward.1");
    link(work::Receive{kActivation}, a);
    after_link(op(OpCode::k_mul, "p", {a, w}, {p}));
    move(work::Fetch{1}, "fetch p", p);
    op(OpCode::k_square, "s", {p}, {s});
    sum("l", s, l, {0, 1});
    accumulate("add l", l_sum, l);
    if (o_.update) {
      segment("backward.1");
      op(OpCode::k_mul, "q1", {p, a}, {q});
      sum("g1", q, g, {0});
      accumulate("add g1", g_sum, g);
      op(OpCode::k_mul, "da", {p, w}, {da});
      link(work::Send{kGradient}, da);
    }
    segment("epilogue");
    move(work::Fetch{0}, "fetch loss", l_sum);
    zero("late", l, {});
    if (o_.update) {
      vote(l_sum);
      commit();
      sgd("update w1", rate, w, g_sum);
    }
    schedule(0, 0, 0, true);
    for (int32_t u = 0; u < o_.micro_batches; ++u) {
      forward(u);
      if (o_.update) schedule(2, u, u % versions_, false);
    }
    schedule(o_.update ? 3 : 2, 0, 0, true);
    return built();
  }

 private:
  BufferId rate_buffer() {
    return add("learning_rate", BufferKind::kStep, {}, static_cast<int>(StepScalar::kLearningRate));
  }
  BufferId local(const std::string& name) { return add(name, BufferKind::kArena, {n_, kWidth}, -1, kNone, versions_); }
  void forward(int32_t u) { schedule(1, u, u % versions_, false); }
  void link(const Work& work, BufferId id) {
    std::vector<Instruction>& list = program_.segments.back().instructions;
    const int32_t before = static_cast<int32_t>(list.size()) - 1;
    Instruction& i = move(work, "", id);
    i.name = fmt::format("{} {}", i.verb(), i.link());
    if (!o_.queues) return;
    i.queue = i.kind() == InstructionKind::kSend ? Queue::kSend : Queue::kReceive;
    if (before >= 0) i.waits = {{Queue::kCompute, before}};
  }
  void after_link(Instruction& i) {
    const std::vector<Instruction>& list = program_.segments.back().instructions;
    const auto before = static_cast<int32_t>(list.size()) - 2;
    if (o_.queues) i.waits = {{list[before].queue, before}};
  }

  PipelineOptions o_;
  int64_t n_;
  int32_t versions_;
};

inline Plan hand_pipeline(const PipelineOptions& o = {}) {
  Plan plan;
  plan.model = "hand pipeline";
  plan.micro_batches = o.micro_batches;
  plan.scopes = {Scope{}};
  plan.variables = {hand_variable("w0", {kWidth}, 0, 1), hand_variable("w1", {kWidth}, 1, 1)};
  plan.optimizer.kind = OptimizerKind::kSgd;
  Entry entry;
  entry.name = o.update ? "train" : "eval";
  entry.batch = o.batch;
  entry.inputs = {{"x", DType::kF32, {o.batch, kWidth}, 0}};
  entry.outputs = {{"loss", DType::kF32, {}, OutputMerge::kSum, -1, 1, {false}, {}},
                   {"p", DType::kF32, {o.batch, kWidth}, OutputMerge::kConcat, 0, 1, {true}, {}}};
  entry.programs = {PipelineProgram(o).first(), PipelineProgram(o).second()};
  const std::vector<Interval> piece = {{0, o.batch / o.micro_batches}, {0, kWidth}};
  entry.links = {{"a", o.link_capacity, {{0, 1, piece, piece}}}, {"da", o.link_capacity, {{1, 0, piece, piece}}}};
  for (int32_t d = 0; d < 2; ++d) {
    plan.devices.push_back({o.kind, {}, 0});
    plan.meshes.push_back({{{"replica", 1, {}, {}}}, {d}});
    DeviceRow row;
    row.device = row.program = row.mesh = d;
    row.coordinates = {0};
    SampleCut cut{{0, o.batch}, {}};
    for (int64_t u = 0; u < o.micro_batches; ++u) cut.micro_batches.push_back(o.range(u));
    row.samples = {cut};
    entry.rows.push_back(row);
  }
  plan.entries = {entry};
  return plan;
}

// The oracle.
struct PipelineModel {
  std::vector<float> w0 = std::vector<float>(kWidth, 1.0f), w1 = w0;
  float step(const std::vector<float>& x, float rate) {
    float loss = 0;
    std::vector<float> g0(kWidth, 0), g1(kWidth, 0);
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t k = i % kWidth;
      const float a = x[i] * w0[k], p = a * w1[k];
      loss += p * p;
      g1[k] += p * a;
      g0[k] += p * w1[k] * x[i];
    }
    for (size_t k = 0; k < w0.size(); ++k) {
      w0[k] -= rate * g0[k];
      w1[k] -= rate * g1[k];
    }
    return loss;
  }
};

}  // namespace whale::test
