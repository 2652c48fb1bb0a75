#include "run/bound.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

BufferId root_of(const Program& program, BufferId id) {
  while (program.buffers[static_cast<size_t>(id)].alias != kNone) id = program.buffers[static_cast<size_t>(id)].alias;
  return id;
}

namespace {

class Binder {
 public:
  Binder(Machine& machine, const Entry& entry, const DeviceRow& row, int loss_output)
      : machine_(machine),
        entry_(entry),
        row_(row),
        memory_(machine.memory(static_cast<size_t>(row.device))),
        program_(entry.programs.at(static_cast<size_t>(row.program))),
        loss_output_(loss_output) {}

  std::unique_ptr<BoundProgram> bind() {
    bound_ = std::make_unique<BoundProgram>();
    bound_->program = &program_;
    bound_->row = &row_;
    arena_ = static_cast<char*>(memory_.arena(static_cast<size_t>(program_.arena_bytes)));
    bound_->streams[0] = true;
    bound_->segments.resize(program_.segments.size());
    for (size_t s = 0; s < program_.segments.size(); ++s) bind_segment(s);
    for (size_t s = 0; s < kStreams; ++s) set_scratch(static_cast<Stream>(s));
    for (const ScheduleRow& row : program_.schedule)
      for (size_t s = 0; s < kStreams; ++s)
        bound_->runs[s] += bound_->segments[static_cast<size_t>(row.segment)].streams[s].size();
    plan_loss_check();
    count_bytes();
    return std::move(bound_);
  }

 private:
  const Buffer& buffer(BufferId id) const { return program_.buffers.at(static_cast<size_t>(id)); }

  char* address(BufferId id) {
    const Buffer& root = buffer(root_of(program_, id));
    switch (root.kind) {
      case BufferKind::kArena:
      case BufferKind::kInput:
        if (root.offset < 0 || root.offset + root.bytes > program_.arena_bytes)
          throw internal("buffer '{}' lies at [{}, {}) of an arena of {} bytes", root.name, root.offset,
                         root.offset + root.bytes, program_.arena_bytes);
        return arena_ + root.offset;
      case BufferKind::kVariable: return static_cast<char*>(memory_.variable(static_cast<size_t>(root.ref)));
      case BufferKind::kStep:
        return static_cast<char*>(memory_.step_scalar(static_cast<StepScalar>(root.ref), root.dtype));
    }
    throw internal("buffer '{}' has no storage", root.name);
  }

  Operand operand(BufferId id, const std::vector<bool>& written) {
    if (id == kNone) return {};
    const Buffer& view = buffer(id);
    const Buffer& root = buffer(root_of(program_, id));
    Operand operand{address(id), view.dtype, view.dims, false, nullptr};
    if (root.kind == BufferKind::kVariable) {
      operand.constant = !written[static_cast<size_t>(root.ref)];
      operand.version = memory_.version(static_cast<size_t>(root.ref));
    }
    return operand;
  }

  void bind_segment(size_t s) {
    const Segment& segment = program_.segments[s];
    BoundSegment& bound = bound_->segments[s];
    bound.count = static_cast<uint32_t>(segment.instructions.size());
    std::vector<bool> written(machine_.plan().variables.size());
    for (const Instruction& instruction : segment.instructions)
      for (const BufferId id : instruction.out)
        if (id != kNone && buffer(root_of(program_, id)).kind == BufferKind::kVariable)
          written[static_cast<size_t>(buffer(root_of(program_, id)).ref)] = true;
    std::array<size_t, kStreams> counts{};
    for (const Instruction& instruction : segment.instructions) ++counts[static_cast<size_t>(instruction.stream)];
    for (size_t stream = 0; stream < kStreams; ++stream) bound.streams[stream].reserve(counts[stream]);
    for (size_t i = 0; i < segment.instructions.size(); ++i) {
      const Instruction& instruction = segment.instructions[i];
      try {
        bound_->streams[static_cast<size_t>(instruction.stream)] = true;
        bound.streams[static_cast<size_t>(instruction.stream)].push_back(
            bind_instruction(instruction, s, static_cast<int32_t>(i), written));
      } catch (Error& e) {
        throw Error(e.at_op(instruction.name).at_scope(scope_of(instruction)).at_device(row_.device));
      }
    }
  }

  std::string scope_of(const Instruction& instruction) const {
    std::string path;
    const auto& scopes = machine_.plan().scopes;
    for (ScopeId id = instruction.scope; id > 0 && static_cast<size_t>(id) < scopes.size();
         id = scopes[static_cast<size_t>(id)].parent)
      if (const std::string& name = scopes[static_cast<size_t>(id)].name; !name.empty())
        path = path.empty() ? name : name + "/" + path;
    return path;
  }

  BoundInstruction bind_instruction(const Instruction& instruction, size_t segment, int32_t index,
                                    const std::vector<bool>& written) {
    BoundInstruction bound;
    bound.source = &instruction;
    bound.index = index;
    for (const WaitPoint& wait : instruction.waits)
      if (wait.stream != instruction.stream) bound.waits.push_back(wait);
    for (const BufferId id : instruction.out)
      if (id != kNone && buffer(root_of(program_, id)).kind == BufferKind::kVariable)
        bound.versions.push_back(memory_.version(static_cast<size_t>(buffer(root_of(program_, id)).ref)));
    switch (instruction.kind) {
      case InstructionKind::kKernel: bind_kernel(instruction, written, bound); break;
      case InstructionKind::kCollective: bind_collective(instruction, written, bound); break;
      case InstructionKind::kFeed: bind_feed(instruction, segment, bound); break;
      case InstructionKind::kFetch: bind_fetch(instruction, segment, bound); break;
    }
    return bound;
  }

  void bind_kernel(const Instruction& instruction, const std::vector<bool>& written, BoundInstruction& bound) {
    KernelSpec spec;
    spec.op = instruction.op;
    spec.name = instruction.name;
    spec.attrs = &instruction.attrs;
    for (const BufferId id : instruction.in) spec.in.push_back(operand(id, written));
    for (const BufferId id : instruction.out) spec.out.push_back(operand(id, written));
    spec.box = instruction.box;
    spec.key = instruction.key;
    spec.context = &bound_->contexts[static_cast<size_t>(instruction.stream)];
    bound.kernel = memory_.device().bind(spec);
  }

  void bind_collective(const Instruction& instruction, const std::vector<bool>& written, BoundInstruction& bound) {
    CollectiveSpec spec;
    spec.op = instruction.op;
    const std::string& combine = attr_string(instruction.attrs, "combine");
    if (combine.empty() || combine == "sum")
      spec.combine = Combine::kSum;
    else if (combine == "max")
      spec.combine = Combine::kMax;
    else if (combine == "min")
      spec.combine = Combine::kMin;
    else
      throw internal("a collective combines by '{}'", combine);
    for (const BufferId id : instruction.in) spec.in.push_back(operand(id, written));
    for (const BufferId id : instruction.out) spec.out.push_back(operand(id, written));
    if (spec.op == OpCode::k_all_reduce)
      for (size_t i = 0; i < spec.in.size(); ++i)
        if (i >= spec.out.size() || spec.in[i].data != spec.out[i].data)
          throw internal("an all-reduce works in place, operand {} has two places", i);
    const std::vector<int64_t>& digit = attr_ints(instruction.attrs, "digit");
    const std::vector<int64_t>& cuts = attr_ints(instruction.attrs, "cuts");
    if (digit.size() == 3) spec.digit = {static_cast<int>(digit[0]), digit[1], digit[2]};
    for (size_t i = 0; i + 1 < cuts.size(); i += 2) spec.cuts.push_back({cuts[i], cuts[i + 1]});
    bound.collective = machine_.transport().bind(instruction.ref, row_.device, spec, memory_.device());
  }

  // The run of samples that one copy covers. The share of the whole batch is no union of the shares of micro-batches.
  std::vector<SampleRange> ranges(bool whole_batch, size_t micro_batch) const {
    if (whole_batch || row_.micro_batches.empty()) return {row_.samples};
    return {row_.micro_batches.at(micro_batch)};
  }

  std::vector<Copy> copies(DType dtype, const Dims& dims, int batch_dim, const std::vector<SampleRange>& ranges,
                           const Buffer& local) {
    std::vector<Copy> list;
    size_t begin = 0;
    if (batch_dim < 0) {
      list.push_back({piece_of(dtype, dims, -1, entry_.batch, {}), 0, 0});
      begin = list[0].host.run;
    } else {
      for (const SampleRange& range : ranges) {
        list.push_back({piece_of(dtype, dims, batch_dim, entry_.batch, range), begin, 0});
        begin += list.back().host.run;
      }
    }
    for (Copy& copy : list) copy.stride = begin;
    const size_t rows = list.empty() ? 0 : list[0].host.rows;
    const size_t bytes = static_cast<size_t>(element_count(local.dims) * size_of(local.dtype));
    if (begin * rows != bytes)
      throw internal("'{}' has {} bytes on this device, its samples have {}", local.name, bytes, begin * rows);
    return list;
  }

  template <class Port>
  void bind_copies(const Instruction& instruction, size_t segment, const Port& port, BufferId id,
                   BoundInstruction& bound) {
    const Buffer& local = buffer(id);
    if (local.dtype != port.dtype)
      throw internal("'{}' is {} here, {} at the plan's boundary", local.name, name_of(local.dtype),
                     name_of(port.dtype));
    bound.data = address(id);
    if (instruction.whole_batch || port.batch_dim < 0) {
      bound.copies = {copies(port.dtype, port.dims, port.batch_dim, ranges(true, 0), local)};
      return;
    }
    bound.copies.resize(std::max<size_t>(row_.micro_batches.size(), 1));
    for (const ScheduleRow& row : program_.schedule)
      if (static_cast<size_t>(row.segment) == segment) {
        auto& list = bound.copies.at(static_cast<size_t>(row.micro_batch));
        if (list.empty())
          list =
              copies(port.dtype, port.dims, port.batch_dim, ranges(false, static_cast<size_t>(row.micro_batch)), local);
      }
  }

  void bind_feed(const Instruction& instruction, size_t segment, BoundInstruction& bound) {
    bind_copies(instruction, segment, entry_.inputs.at(static_cast<size_t>(instruction.ref)), instruction.out.at(0),
                bound);
  }

  void bind_fetch(const Instruction& instruction, size_t segment, BoundInstruction& bound) {
    PlanOutput port = entry_.outputs.at(static_cast<size_t>(instruction.ref));
    if (port.merge != OutputMerge::kConcat) port.batch_dim = -1;
    bind_copies(instruction, segment, port, instruction.in.at(0), bound);
    if (instruction.ref == loss_output_) {
      bound_->loss = bound.data;
      bound_->loss_dtype = port.dtype;
      loss_root_ = root_of(program_, instruction.in.at(0));
    }
  }

  void set_scratch(Stream stream) {
    size_t bytes = 0;
    const auto each = [&](auto body) {
      for (BoundSegment& segment : bound_->segments)
        for (BoundInstruction& bound : segment.streams[static_cast<size_t>(stream)])
          if (bound.kernel) body(*bound.kernel);
    };
    each([&](Kernel& kernel) { bytes = std::max(bytes, kernel.scratch_bytes()); });
    if (bytes == 0) return;
    void* scratch = memory_.scratch(stream, bytes);
    each([&](Kernel& kernel) { kernel.set_scratch(scratch); });
  }

  // When the loss is final before the first instruction that writes a variable, that instruction looks at it first: a
  // non-finite loss then stops the step before anything has changed.
  void plan_loss_check() {
    if (loss_root_ == kNone) return;
    int64_t loss_row = -1;
    int32_t loss_index = -1;
    const auto& schedule = program_.schedule;
    for (size_t r = 0; r < schedule.size(); ++r) {
      const auto& list = program_.segments[static_cast<size_t>(schedule[r].segment)].instructions;
      for (size_t i = 0; i < list.size(); ++i)
        for (const BufferId id : list[i].out)
          if (id != kNone && root_of(program_, id) == loss_root_) {
            loss_row = static_cast<int64_t>(r);
            loss_index = static_cast<int32_t>(i);
          }
    }
    std::array<BoundInstruction*, kStreams> first{};
    for (size_t r = 0; r < schedule.size(); ++r)
      for (size_t s = 0; s < kStreams; ++s)
        for (BoundInstruction& bound : bound_->segments[static_cast<size_t>(schedule[r].segment)].streams[s]) {
          if (bound.versions.empty() || first[s] != nullptr) continue;
          const int64_t row = static_cast<int64_t>(r);
          if (row < loss_row || (row == loss_row && bound.index <= loss_index)) return;  // too early to know
          first[s] = &bound;
          if (row != loss_row) continue;
          const Segment& segment = program_.segments[static_cast<size_t>(schedule[r].segment)];
          const Stream maker = segment.instructions[static_cast<size_t>(loss_index)].stream;
          if (maker != static_cast<Stream>(s)) bound.waits.push_back({maker, loss_index});
        }
    for (BoundInstruction* bound : first)
      if (bound != nullptr) bound->checks_loss = bound_->loss_checked_before_update = true;
  }

  void count_bytes() {
    std::vector<bool> counted(program_.buffers.size());
    for (const Segment& segment : program_.segments)
      for (const Instruction& instruction : segment.instructions) {
        const bool update = instruction.kind == InstructionKind::kKernel && has_flag(instruction.op, kUpdateOp);
        if (instruction.kind != InstructionKind::kCollective && !update) continue;
        for (const BufferId id : instruction.in) {
          if (id == kNone) continue;
          const BufferId root = root_of(program_, id);
          if (buffer(root).kind != BufferKind::kArena || counted[static_cast<size_t>(root)]) continue;
          counted[static_cast<size_t>(root)] = true;
          bound_->gradient_bytes += static_cast<size_t>(buffer(root).bytes);
        }
      }
    for (const Buffer& b : program_.buffers)
      if (b.kind == BufferKind::kInput && b.alias == kNone) bound_->input_bytes += static_cast<size_t>(b.bytes);
  }

  Machine& machine_;
  const Entry& entry_;
  const DeviceRow& row_;
  DeviceMemory& memory_;
  const Program& program_;
  int loss_output_;
  std::unique_ptr<BoundProgram> bound_;
  char* arena_ = nullptr;
  BufferId loss_root_ = kNone;
};

}  // namespace

std::unique_ptr<BoundProgram> bind_program(Machine& machine, const Entry& entry, const DeviceRow& row,
                                           int loss_output) {
  return Binder(machine, entry, row, loss_output).bind();
}

}  // namespace whale
