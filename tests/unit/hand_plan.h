// A small plan written by hand, so that the execution side is tested without the planner: p = x * w, loss = sum(p^2),
// w -= lr * sum(x * p) over the global batch. Data parallel over any devices and micro-batches.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale::test {

inline constexpr int64_t kWidth = 4;

struct HandOptions {
  int devices = 2;
  int64_t batch = 6;
  int64_t micro_batches = 1;
  DeviceKind kind = DeviceKind::kRef;
  bool overlap = true;     // the all-reduce on the communication stream
  bool late_loss = false;  // the loss is reduced and fetched after the update
  bool update = true;      // false: an "eval" entry
  std::string name = "train";
};

inline Attrs attrs(std::initializer_list<std::pair<const std::string, Attr>> list) {
  return Attrs(list.begin(), list.end());
}

// Samples of device d in micro-batch u: contiguous, sizes as equal as they come.
inline SampleRange hand_range(const HandOptions& o, int device, int64_t u) {
  const int64_t begin = o.batch * u / o.micro_batches, size = o.batch * (u + 1) / o.micro_batches - begin;
  return {begin + size * device / o.devices, begin + size * (device + 1) / o.devices};
}

class HandProgram {
 public:
  explicit HandProgram(const HandOptions& options) : o_(options) {}

  Program make(int device) {
    program_ = {};
    const BufferId w = add("w", BufferKind::kVariable, {kWidth}, 0);
    const BufferId rate = add("learning_rate", BufferKind::kStep, {}, static_cast<int>(StepScalar::kLearningRate));
    const BufferId g_sum = add("g_sum", BufferKind::kArena, {kWidth}), l_sum = add("l_sum", BufferKind::kArena, {});
    program_.segments.push_back({"prologue", {}});
    op(OpCode::k_fill, "zero_g", {}, {g_sum},
       attrs({{"shape", std::vector<int64_t>{kWidth}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
    op(OpCode::k_fill, "zero_l", {}, {l_sum},
       attrs({{"shape", std::vector<int64_t>{}}, {"value", 0.0}, {"dtype", std::string("f32")}}));
    program_.schedule.push_back({0, 0});
    for (int64_t u = 0; u < o_.micro_batches; ++u) {
      body(hand_range(o_, device, u).size(), w, g_sum, l_sum);
      program_.schedule.push_back({static_cast<int32_t>(program_.segments.size()) - 1, static_cast<int32_t>(u)});
    }
    epilogue(w, rate, g_sum, l_sum);
    program_.schedule.push_back({static_cast<int32_t>(program_.segments.size()) - 1, 0});
    program_.arena_bytes = offset_;
    return program_;
  }

 private:
  BufferId add(const std::string& name, BufferKind kind, Dims dims, int ref = -1, BufferId alias = kNone) {
    Buffer b;
    b.name = name;
    b.kind = kind;
    b.dtype = DType::kF32;
    b.dims = dims;
    b.ref = ref;
    b.alias = alias;
    b.bytes = element_count(dims) * 4;
    if (alias != kNone) {
      b.offset = program_.buffers[static_cast<size_t>(alias)].offset;
    } else if (kind == BufferKind::kArena || kind == BufferKind::kInput) {
      b.offset = offset_;
      offset_ += (b.bytes + 63) / 64 * 64 + 64;
    }
    program_.buffers.push_back(b);
    return static_cast<BufferId>(program_.buffers.size()) - 1;
  }

  Instruction& op(OpCode code, const std::string& name, std::vector<BufferId> in, std::vector<BufferId> out,
                  Attrs a = {}) {
    Instruction i;
    i.op = code;
    i.name = name;
    i.in = std::move(in);
    i.out = std::move(out);
    i.attrs = std::move(a);
    program_.segments.back().instructions.push_back(i);
    return program_.segments.back().instructions.back();
  }

  Instruction& transfer(InstructionKind kind, const std::string& name, BufferId id, int ref) {
    Instruction& i = op(OpCode::k_fill, name, {}, {});
    i.kind = kind;
    i.ref = ref;
    (kind == InstructionKind::kFeed ? i.out : i.in) = {id};
    return i;
  }

  void body(int64_t n, BufferId w, BufferId g_sum, BufferId l_sum) {
    program_.segments.push_back({"body/" + std::to_string(n), {}});
    const BufferId x = add("x", BufferKind::kInput, {n, kWidth}, 0), p = add("p", BufferKind::kArena, {n, kWidth});
    const BufferId q = add("q", BufferKind::kArena, {n, kWidth}), s = add("s", BufferKind::kArena, {n, kWidth});
    const BufferId g = add("g", BufferKind::kArena, {kWidth}), l = add("l", BufferKind::kArena, {});
    const Attrs rows = attrs({{"axes", std::vector<int64_t>{0}}, {"keep_dims", false}});
    const Attrs all = attrs({{"axes", std::vector<int64_t>{0, 1}}, {"keep_dims", false}});
    transfer(InstructionKind::kFeed, "feed x", x, 0);
    op(OpCode::k_mul, "p", {x, w}, {p});
    transfer(InstructionKind::kFetch, "fetch p", p, 1);
    op(OpCode::k_mul, "q", {p, x}, {q});
    op(OpCode::k_reduce_sum, "g", {q}, {g}, rows);
    op(OpCode::k_square, "s", {p}, {s});
    op(OpCode::k_reduce_sum, "l", {s}, {l}, all);
    op(OpCode::k_accumulate, "add g", {g_sum, g}, {add("g_sum'", BufferKind::kArena, {kWidth}, -1, g_sum)});
    op(OpCode::k_accumulate, "add l", {l_sum, l}, {add("l_sum'", BufferKind::kArena, {}, -1, l_sum)});
  }

  int32_t reduce(const std::string& name, BufferId x) {
    Instruction& i =
        op(OpCode::k_all_reduce, name, {x}, {x}, attrs({{"group", int64_t{0}}, {"combine", std::string("sum")}}));
    i.kind = InstructionKind::kCollective;
    i.ref = 0;
    if (o_.overlap) i.stream = Stream::kCommunication;
    return static_cast<int32_t>(program_.segments.back().instructions.size()) - 1;
  }

  void loss(BufferId l_sum) {
    const int32_t reduced = reduce("reduce loss", l_sum);
    transfer(InstructionKind::kFetch, "fetch loss", l_sum, 0).waits = {
        {o_.overlap ? Stream::kCommunication : Stream::kCompute, reduced}};
  }

  void epilogue(BufferId w, BufferId rate, BufferId g_sum, BufferId l_sum) {
    program_.segments.push_back({"epilogue", {}});
    if (!o_.late_loss) loss(l_sum);
    if (o_.update) {
      const int32_t reduced = reduce("reduce g", g_sum);
      op(OpCode::k_sgd, "update w", {rate, kNone, w, g_sum}, {add("w'", BufferKind::kVariable, {kWidth}, 0, w)},
         attrs({{"momentum", 0.0}, {"nesterov", false}, {"weight_decay", 0.0}, {"decays", std::vector<int64_t>{0}}}))
          .waits = {{o_.overlap ? Stream::kCommunication : Stream::kCompute, reduced}};
    }
    if (o_.late_loss) loss(l_sum);
  }

  HandOptions o_;
  Program program_;
  int64_t offset_ = 0;
};

inline Entry hand_entry(const HandOptions& o) {
  Entry entry;
  entry.name = o.name;
  entry.batch = o.batch;
  entry.inputs = {{"x", DType::kF32, {o.batch, kWidth}, 0}};
  entry.outputs = {{"loss", DType::kF32, {}, OutputMerge::kSum, -1},
                   {"p", DType::kF32, {o.batch, kWidth}, OutputMerge::kConcat, 0}};
  for (int d = 0; d < o.devices; ++d) {
    entry.programs.push_back(HandProgram(o).make(d));
    DeviceRow row;
    row.device = row.program = d;
    row.coordinates = {d};
    for (int64_t u = 0; u < o.micro_batches; ++u) row.micro_batches.push_back(hand_range(o, d, u));
    row.samples = {row.micro_batches.front().begin, row.micro_batches.back().end};
    entry.rows.push_back(row);
  }
  return entry;
}

inline Plan hand_plan(const HandOptions& o = {}) {
  Plan plan;
  plan.model = "hand";
  plan.micro_batches = o.micro_batches;
  plan.mesh = {{"replica", o.devices, {}}};
  Group group{"replica", {}};
  for (int d = 0; d < o.devices; ++d) {
    plan.devices.push_back({o.kind, {}, 0});
    group.devices.push_back(d);
  }
  plan.groups = {group};
  plan.scopes = {Scope{}};
  PlanVariable w;
  w.name = "w";
  w.dtype = DType::kF32;
  w.dims = {kWidth};
  w.init.kind = InitKind::kOnes;
  plan.variables = {w};
  plan.optimizer.kind = OptimizerKind::kSgd;
  plan.optimizer.learning_rate = 0.01;
  plan.entries = {hand_entry(o)};
  return plan;
}

// x[i][k] = small whole numbers, so that every order of summation gives the same bits.
inline std::vector<float> hand_batch(int64_t batch, int64_t step = 0) {
  std::vector<float> x(static_cast<size_t>(batch * kWidth));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7 + static_cast<size_t>(step) * 3) % 5) - 1;
  return x;
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
