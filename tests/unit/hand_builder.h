// Writes programs by hand, so that the execution side is tested without the planner.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/row_waits.h"

namespace whale::test {

inline constexpr int64_t kWidth = 4;

inline Attrs attrs(std::initializer_list<Attrs::value_type> list) { return list; }

class HandBuilder {
 protected:
  BufferId add(const std::string& name, BufferKind kind, Dims dims, int ref = -1, BufferId alias = kNone,
               int32_t versions = 1) {
    Buffer b;
    b.name = name;
    b.kind = kind;
    b.dtype = DType::kF32;
    b.dims = dims;
    b.ref = ref;
    b.alias = alias;
    b.versions = versions;
    b.bytes = element_count(dims) * 4;
    if (alias != kNone) {
      b.offset = program_.buffers[alias].offset;
    } else if (kind == BufferKind::kArena || kind == BufferKind::kInput) {
      b.offset = program_.arena_bytes;
      program_.arena_bytes += (b.bytes + 63) / 64 * 64 * versions + 64;
    }
    program_.buffers.push_back(b);
    return static_cast<BufferId>(program_.buffers.size()) - 1;
  }

  // Its queues wait for the row before where they need its bytes.
  Program built() {
    add_row_waits(program_);
    return program_;
  }

  void segment(const std::string& name) { program_.segments.push_back({name, {}}); }
  void schedule(int32_t micro_batch, int32_t version, bool whole) {
    schedule(static_cast<int32_t>(program_.segments.size()) - 1, micro_batch, version, whole);
  }
  void schedule(int32_t segment, int32_t micro_batch, int32_t version, bool whole) {
    program_.schedule.push_back({segment, micro_batch, version, whole});
  }

  Instruction& op(OpCode code, const std::string& name, std::vector<BufferId> in, std::vector<BufferId> out,
                  Attrs a = {}) {
    Instruction i;
    if (has_flag(code, kCollective))
      i.work = work::Collective{.op = code};
    else
      i.work = work::Kernel{.op = code, .attrs = std::move(a)};
    i.name = name;
    i.in = std::move(in);
    i.out = std::move(out);
    program_.segments.back().instructions.push_back(i);
    return program_.segments.back().instructions.back();
  }

  Instruction& move(Work work, const std::string& name, BufferId id) {
    Instruction& i = op(OpCode::k_fill, name, {}, {});
    i.work = std::move(work);
    const bool makes = i.kind() == InstructionKind::kFeed || i.kind() == InstructionKind::kReceive;
    (makes ? i.out : i.in) = {id};
    return i;
  }

  void zero(const std::string& name, BufferId id, Dims dims) {
    op(OpCode::k_fill, name, {}, {id}, attrs({{"shape", dims}, {"value", 0.0}, {"dtype", std::string("f32")}}));
  }
  void sum(const std::string& name, BufferId x, BufferId y, std::vector<int64_t> axes) {
    op(OpCode::k_reduce_sum, name, {x}, {y}, attrs({{"axes", std::move(axes)}, {"keep_dims", false}}));
  }
  void accumulate(const std::string& name, BufferId total, BufferId x) {
    const Dims dims = program_.buffers[total].dims;
    op(OpCode::k_accumulate, name, {total, x}, {add(name + "'", BufferKind::kArena, dims, -1, total)});
  }
  Instruction& sgd(const std::string& name, BufferId rate, BufferId w, BufferId g) {
    const Buffer b = program_.buffers[w];
    return op(
        OpCode::k_sgd, name, {rate, kNone, w, g}, {add(b.name + "'", BufferKind::kVariable, b.dims, b.ref, w)},
        attrs({{"momentum", 0.0}, {"nesterov", false}, {"weight_decay", 0.0}, {"decays", std::vector<int64_t>{0}}}));
  }

  void vote(BufferId loss) { move(work::Vote{}, "vote", loss); }
  void commit() { op(OpCode::k_fill, "commit", {}, {}).work = work::Commit{}; }

  Program program_;
};

inline PlanVariable hand_variable(const std::string& name, Dims dims, int32_t mesh, size_t axes) {
  PlanVariable w;
  w.name = name;
  w.dtype = DType::kF32;
  w.dims = std::move(dims);
  w.init.kind = InitKind::kOnes;
  w.mesh = mesh;
  w.storage_sharding.axes.resize(axes);
  return w;
}

// x[i][k] = small whole numbers, so that every order of summation gives the same bits.
inline std::vector<float> hand_batch(int64_t batch, int64_t step = 0) {
  std::vector<float> x(static_cast<size_t>(batch * kWidth));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 7 + static_cast<size_t>(step) * 3) % 5) - 1;
  return x;
}

}  // namespace whale::test
