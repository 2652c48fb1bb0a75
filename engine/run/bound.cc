#include "run/bound.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "plan/placed.h"
#include "run/feeds.h"

namespace whale {

BufferId root_of(const Program& program, BufferId id) {
  while (program.buffers[id].alias != kNone) id = program.buffers[id].alias;
  return id;
}

namespace {

constexpr int64_t kVersionAlignment = 64;  // of the versions of a buffer

class Binder {
 public:
  Binder(Machine& machine, const Entry& entry, Links& links, const DeviceRow& row)
      : machine_(machine),
        entry_(entry),
        links_(links),
        row_(row),
        memory_(machine.memory(static_cast<size_t>(row.device))),
        bound_(std::make_unique<BoundProgram>()),
        program_(program_of_row()) {}

  std::unique_ptr<BoundProgram> bind() {
    bound_->program = &program_;
    bound_->row = &row_;
    arena_ = static_cast<char*>(memory_.arena(static_cast<size_t>(program_.arena_bytes)));
    if (program_.host_bytes > 0)
      host_arena_ = static_cast<char*>(memory_.host_arena(static_cast<size_t>(program_.host_bytes)));
    bound_->queues[0] = true;
    for (auto& contexts : bound_->contexts) contexts.resize(row_.samples.size());
    bind_segments();
    for (size_t s = 0; s < kQueues; ++s) set_scratch(static_cast<Queue>(s));
    for (const int32_t segment : bound_->rows)
      for (size_t s = 0; s < kQueues; ++s) bound_->runs[s] += bound_->segments[segment].queues[s].size();
    count_votes();
    count_bytes();
    return std::move(bound_);
  }

 private:
  const Program& program_of_row() {
    const Program& program = entry_.programs.at(static_cast<size_t>(row_.program));
    return program.holes.empty() ? program : bound_->placed.emplace(bound(program, row_));
  }

  const Buffer& buffer(BufferId id) const { return program_.buffers.at(static_cast<size_t>(id)); }

  char* address(BufferId id) {
    const Buffer& root = buffer(root_of(program_, id));
    switch (root.kind) {
      case BufferKind::kArena:
      case BufferKind::kInput:
        return (root.memory == Memory::kHost ? host_arena_ : arena_) + offset(root) + buffer(id).at;
      case BufferKind::kVariable: return variable(root) + buffer(id).at;
      case BufferKind::kStep:
        return static_cast<char*>(memory_.step_scalar(static_cast<StepScalar>(root.ref), root.dtype));
    }
    throw internal("buffer '{}' has no storage", root.name);
  }

  static int64_t version_stride(const Buffer& root) {
    return (root.bytes + kVersionAlignment - 1) / kVersionAlignment * kVersionAlignment;
  }

  int64_t offset(const Buffer& root) const {
    const int64_t end = root.offset + (root.versions - 1) * version_stride(root) + root.bytes;
    const int64_t arena = root.memory == Memory::kHost ? program_.host_bytes : program_.arena_bytes;
    if (root.offset < 0 || root.versions < 1 || end > arena)
      throw internal("buffer '{}' lies at [{}, {}) of an arena of {} bytes", root.name, root.offset, end, arena);
    if (root.versions == 1) return root.offset;
    return root.offset + version_ % root.versions * version_stride(root);
  }

  char* variable(const Buffer& root) {
    const size_t index = static_cast<size_t>(root.ref);
    void* data = memory_.variable(index);
    const PlanVariable& variable = machine_.plan().variables.at(index);
    if (data == nullptr)
      throw internal("variable '{}' is not on this device, its mesh is {}", root.name, variable.mesh);
    if (static_cast<int64_t>(memory_.variable_bytes(index)) != element_count(root.dims) * size_of(root.dtype))
      throw internal("variable '{}' has {} bytes on this device, the program takes it as {} {}", root.name,
                     memory_.variable_bytes(index), name_of(root.dtype), to_string(root.dims));
    return static_cast<char*>(data);
  }

  Operand operand(BufferId id, const std::vector<bool>& written) {
    if (id == kNone) return {};
    const Buffer& view = buffer(id);
    const Buffer& root = buffer(root_of(program_, id));
    Operand operand{address(id), view.dtype, view.dims, false, nullptr};
    if (root.kind == BufferKind::kVariable) {
      operand.constant = !written[root.ref];
      operand.version = memory_.version(static_cast<size_t>(root.ref));
    }
    return operand;
  }

  // Once for each version that it is run on; a segment that touches no buffer with several versions is the same on all.
  void bind_segments() {
    std::vector<bool> versioned(program_.segments.size());
    for (size_t s = 0; s < versioned.size(); ++s)
      for (const Instruction& instruction : program_.segments[s].instructions)
        for (const auto* ids : {&instruction.in, &instruction.out})
          for (const BufferId id : *ids)
            if (id != kNone && buffer(root_of(program_, id)).versions > 1) versioned[s] = true;
    std::map<std::pair<int32_t, int32_t>, int32_t> known;
    for (const ScheduleRow& row : program_.schedule) {
      const size_t segment = static_cast<size_t>(row.segment);
      const std::pair<int32_t, int32_t> key{row.segment, versioned.at(segment) ? row.version : 0};
      const auto [at, fresh] = known.emplace(key, static_cast<int32_t>(known.size()));
      bound_->rows.push_back(at->second);
      if (!fresh) continue;
      version_ = key.second;
      bound_->segments.push_back(bind_segment(segment));
    }
    for (size_t r = 0; r < program_.schedule.size(); ++r) add_pieces(program_.schedule[r], bound_->rows[r]);
  }

  BoundSegment bind_segment(size_t s) {
    const Segment& segment = program_.segments[s];
    BoundSegment bound;
    bound.segment = static_cast<int32_t>(s);
    bound.count = static_cast<uint32_t>(segment.instructions.size());
    std::vector<bool> written(machine_.plan().variables.size());
    for (const Instruction& instruction : segment.instructions)
      for (const BufferId id : instruction.out)
        if (id != kNone && buffer(root_of(program_, id)).kind == BufferKind::kVariable)
          written[buffer(root_of(program_, id)).ref] = true;
    std::array<size_t, kQueues> counts{};
    for (const Instruction& instruction : segment.instructions) ++counts[static_cast<size_t>(instruction.queue)];
    for (size_t queue = 0; queue < kQueues; ++queue) bound.queues[queue].reserve(counts[queue]);
    for (size_t i = 0; i < segment.instructions.size(); ++i) {
      const Instruction& instruction = segment.instructions[i];
      try {
        bound_->queues[static_cast<size_t>(instruction.queue)] = true;
        bound.queues[static_cast<size_t>(instruction.queue)].push_back(
            bind_instruction(instruction, static_cast<int32_t>(i), written));
      } catch (Error& e) {
        throw located(e, instruction);
      } catch (const std::bad_alloc& e) {
        Error error = as_error(e, fmt::format("make the kernel of op '{}'", instruction.name));
        throw located(error, instruction);
      }
    }
    return bound;
  }

  Error located(Error& e, const Instruction& instruction) const {
    return e.at_op(instruction.name).at_scope(scope_of(instruction)).at_device(row_.device);
  }

  std::string scope_of(const Instruction& instruction) const {
    std::string path;
    const auto& scopes = machine_.plan().scopes;
    for (ScopeId id = instruction.scope; id > 0 && static_cast<size_t>(id) < scopes.size(); id = scopes[id].parent)
      if (const std::string& name = scopes[id].name; !name.empty()) path = path.empty() ? name : name + "/" + path;
    return path;
  }

  BoundInstruction bind_instruction(const Instruction& instruction, int32_t index, const std::vector<bool>& written) {
    BoundInstruction bound;
    bound.source = &instruction;
    bound.index = index;
    for (const Wait& wait : instruction.waits)
      if (wait.queue != instruction.queue) bound.waits.push_back(wait);
    for (const BufferId id : instruction.out)
      if (id != kNone && buffer(root_of(program_, id)).kind == BufferKind::kVariable)
        bound.versions.push_back(memory_.version(static_cast<size_t>(buffer(root_of(program_, id)).ref)));
    switch (instruction.kind()) {
      case InstructionKind::kKernel: bind_kernel(instruction, written, bound); break;
      case InstructionKind::kCollective: bind_collective(instruction, written, bound); break;
      case InstructionKind::kFeed: bound.data = address(instruction.out.at(0)); break;
      case InstructionKind::kFetch: bind_fetch(instruction, bound); break;
      case InstructionKind::kSend:
      case InstructionKind::kReceive: bind_link(instruction, written, bound); break;
      case InstructionKind::kCopy: bind_copies(instruction, bound); break;
      case InstructionKind::kVote: bound.data = address(instruction.in.at(0)); break;
      case InstructionKind::kCommit: break;
    }
    return bound;
  }

  void bind_kernel(const Instruction& instruction, const std::vector<bool>& written, BoundInstruction& bound) {
    const work::Kernel& kernel = *instruction.kernel();
    KernelSpec spec;
    spec.op = kernel.op;
    spec.name = instruction.name;
    spec.attrs = &kernel.attrs;
    for (const BufferId id : instruction.in) spec.in.push_back(operand(id, written));
    for (const BufferId id : instruction.out) spec.out.push_back(operand(id, written));
    spec.box = kernel.box;
    spec.key = kernel.key;
    samples_of(instruction);
    spec.step = memory_.step_parameters();
    spec.row = &bound_->contexts[static_cast<size_t>(instruction.queue)][kernel.samples];
    bound.kernel = kernel_of(instruction, spec);
    if (attr_int(kernel.attrs, kIndexLimit) > 0) bind_index_check(spec, bound);
    if (has_flag(kernel.op, kSkipsUpdates)) bound.data = address(instruction.out.at(0));
  }

  // Which op of the model a device cannot compute stands in the message: the model, or the devices, have to change.
  std::unique_ptr<Kernel> kernel_of(const Instruction& instruction, const KernelSpec& spec) {
    try {
      return memory_.device().bind(spec);
    } catch (const Error& e) {
      if (e.code() != Code::kUnimplemented) throw;
      const std::string scope = scope_of(instruction);
      throw unimplemented("op '{}'{}: {}", spec.name, scope.empty() ? "" : fmt::format(" in scope '{}'", scope),
                          e.message());
    }
  }

  void bind_index_check(const KernelSpec& spec, BoundInstruction& bound) {
    const IndexOperand& index = def(spec.op).index;
    if (index.input < 0) throw internal("{} has no index to check", def(spec.op).name);
    auto check = std::make_unique<BoundInstruction::IndexCheck>();
    check->operand = spec.in.at(static_cast<size_t>(index.input));
    check->range = index_range(spec.op, *spec.attrs, attr_int(*spec.attrs, kIndexLimit));
    check->host.resize(static_cast<size_t>(element_count(check->operand.dims) * size_of(check->operand.dtype)));
    bound.index_check = std::move(check);
  }

  void bind_collective(const Instruction& instruction, const std::vector<bool>& written, BoundInstruction& bound) {
    CollectiveSpec spec{*instruction.as<work::Collective>(), {}, {}};
    for (const BufferId id : instruction.in) spec.in.push_back(operand(id, written));
    for (const BufferId id : instruction.out) spec.out.push_back(operand(id, written));
    if (spec.op == OpCode::k_all_reduce)
      for (size_t i = 0; i < spec.in.size(); ++i)
        if (i >= spec.out.size() || spec.in[i].data != spec.out[i].data)
          throw internal("an all-reduce works in place, operand {} has two places", i);
    bound.collective = machine_.transport().bind(row_.device, spec, memory_.device());
  }

  void bind_copies(const Instruction& instruction, BoundInstruction& bound) {
    for (size_t i = 0; i < instruction.out.size(); ++i) {
      const BufferId from = instruction.in.at(i), to = instruction.out[i];
      if (buffer(from).bytes != buffer(to).bytes)
        throw internal("'{}' of {} bytes is copied to '{}' of {}", buffer(from).name, buffer(from).bytes,
                       buffer(to).name, buffer(to).bytes);
      if (buffer(to).bytes > 0)
        bound.copies.push_back({address(to), address(from), static_cast<size_t>(buffer(to).bytes)});
    }
  }

  void bind_link(const Instruction& instruction, const std::vector<bool>& written, BoundInstruction& bound) {
    const bool sending = instruction.kind() == InstructionKind::kSend;
    const BufferId id = sending ? instruction.in.at(0) : instruction.out.at(0);
    bound.collective = links_.bind(instruction.link(), row_.device, operand(id, written), sending, memory_.device());
  }

  const SampleCut& samples_of(const Instruction& instruction) const {
    const int32_t cut = instruction.samples();
    if (cut < 0 || static_cast<size_t>(cut) >= row_.samples.size())
      throw internal("'{}' follows sample cut {} of {}", instruction.name, cut, row_.samples.size());
    return row_.samples[cut];
  }

  void bind_fetch(const Instruction& instruction, BoundInstruction& bound) {
    const BufferId id = instruction.in.at(0);
    bound.data = address(id);
    if (instruction.as<work::Fetch>()->output != entry_.loss()) return;
    bound_->loss = bound.data;
    bound_->loss_dtype = buffer(id).dtype;
  }

  // What the feeds and fetches of one row of the schedule move.
  void add_pieces(const ScheduleRow& row, int32_t segment) {
    for (auto& queue : bound_->segments[segment].queues)
      for (BoundInstruction& bound : queue) {
        const Instruction& instruction = *bound.source;
        try {
          if (const auto* feed = instruction.as<work::Feed>())
            add_piece(row, *feed, bound);
          else if (const auto* fetch = instruction.as<work::Fetch>())
            add_runs(row, *fetch, bound);
        } catch (Error& e) {
          throw located(e, instruction);
        }
      }
  }

  static void check_port(const Buffer& local, DType dtype, size_t bytes) {
    if (local.dtype != dtype)
      throw internal("'{}' is {} here, {} at the plan's boundary", local.name, name_of(local.dtype), name_of(dtype));
    if (const auto here = static_cast<size_t>(element_count(local.dims) * size_of(local.dtype)); here != bytes)
      throw internal("'{}' has {} bytes on this device, its part at the plan's boundary {}", local.name, here, bytes);
  }

  void add_piece(const ScheduleRow& row, const work::Feed& feed, BoundInstruction& bound) {
    const PlanInput& port = entry_.inputs.at(static_cast<size_t>(feed.input));
    const FedSamples samples = fed_samples(entry_, row_, row, *bound.source);
    bound.pieces.resize(samples.count);
    SampleRuns& piece = bound.pieces.at(samples.number);
    piece = sample_runs(port.dtype, port.dims, port.batch_dim, entry_.batch, samples.range);
    check_port(buffer(bound.source->out.at(0)), port.dtype, piece.bytes());
  }

  void add_runs(const ScheduleRow& row, const work::Fetch& fetch, BoundInstruction& bound) {
    std::vector<HandedRun> runs = handed_over(machine_.plan(), entry_, row_, row, fetch);
    if (!hands_over(row_, entry_.outputs.at(static_cast<size_t>(fetch.output)))) return;
    const bool each = by_micro_batch(entry_, row_, row, fetch);
    const size_t u = each ? static_cast<size_t>(row.micro_batch) : 0;
    bound.runs.resize(each ? samples_of(*bound.source).micro_batches.size() : 1);
    size_t bytes = 0;
    for (const HandedRun& run : runs) bytes += run.bytes;
    check_port(buffer(bound.source->in.at(0)), entry_.outputs[fetch.output].dtype, bytes);
    bound.runs.at(u) = std::move(runs);
  }

  void set_scratch(Queue queue) {
    size_t bytes = 0;
    const auto each = [&](auto body) {
      for (BoundSegment& segment : bound_->segments)
        for (BoundInstruction& bound : segment.queues[static_cast<size_t>(queue)])
          if (bound.kernel) body(*bound.kernel);
    };
    each([&](Kernel& kernel) { bytes = std::max(bytes, kernel.scratch_bytes()); });
    if (bytes == 0) return;
    void* scratch = memory_.scratch(queue, bytes);
    each([&](Kernel& kernel) { kernel.set_scratch(scratch); });
  }

  // Where all checks come before the commit, it can wait for those of all devices.
  void count_votes() {
    bool committed = false;
    for (const int32_t row : bound_->rows) {
      const BoundSegment& segment = bound_->segments[row];
      int32_t commit = INT32_MAX;
      for (const auto& queue : segment.queues)
        for (const BoundInstruction& bound : queue) {
          bound_->votes += bound.source->kind() == InstructionKind::kVote;
          if (bound.source->kind() == InstructionKind::kCommit) commit = bound.index;
        }
      for (const auto& queue : segment.queues)
        for (const BoundInstruction& bound : queue) {
          if (!bound.index_check) continue;
          ++bound_->index_checks;
          if (committed || bound.index > commit) bound_->indices_checked_before_commit = false;
        }
      committed = committed || commit != INT32_MAX;
    }
  }

  void count_bytes() {
    std::vector<bool> counted(program_.buffers.size());
    for (const Segment& segment : program_.segments)  // copies of variables are no gradients
      for (const Instruction& instruction : segment.instructions)
        for (size_t i = 0; instruction.copies_to(Memory::kDevice) && i < instruction.out.size(); ++i)
          if (buffer(root_of(program_, instruction.in[i])).kind == BufferKind::kVariable)
            counted[root_of(program_, instruction.out[i])] = true;
    for (const Segment& segment : program_.segments)
      for (const Instruction& instruction : segment.instructions) {
        const bool update = instruction.kernel() != nullptr && has_flag(instruction.kernel()->op, kUpdateOp);
        const bool reduced = instruction.group() != kNone && instruction.phase != Phase::kForward;
        if (!reduced && !update) continue;
        for (const BufferId id : instruction.in) {
          if (id == kNone) continue;
          const BufferId root = root_of(program_, id);
          if (buffer(root).kind != BufferKind::kArena || buffer(root).memory == Memory::kHost || counted[root])
            continue;
          counted[root] = true;
          bound_->gradient_bytes += static_cast<size_t>(buffer(root).versions * version_stride(buffer(root)));
        }
      }
    for (const Buffer& b : program_.buffers)
      if (b.kind == BufferKind::kInput && b.alias == kNone)
        bound_->input_bytes += static_cast<size_t>(b.versions * version_stride(b));
  }

  Machine& machine_;
  const Entry& entry_;
  Links& links_;
  const DeviceRow& row_;
  DeviceMemory& memory_;
  std::unique_ptr<BoundProgram> bound_;
  const Program& program_;
  char *arena_ = nullptr, *host_arena_ = nullptr;
  int32_t version_ = 0;  // of the segment that is being bound
};

}  // namespace

std::unique_ptr<BoundProgram> bind_program(Machine& machine, const Entry& entry, Links& links, const DeviceRow& row) {
  return Binder(machine, entry, links, row).bind();
}

}  // namespace whale
