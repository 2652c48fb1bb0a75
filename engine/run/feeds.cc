#include "run/feeds.h"

#include <algorithm>

#include "base/error.h"

namespace whale {
namespace {

std::vector<Interval> whole(const Dims& dims) {
  std::vector<Interval> box;
  for (const int64_t n : dims) box.push_back({0, n});
  return box;
}

// What of a buffer its readers read: where all of them are local slices, the hull of these, else all of it.
class Readers {
 public:
  explicit Readers(const Program& program) : program_(program), readers_(program.buffers.size()) {
    for (const Segment& segment : program.segments)
      for (const Instruction& instruction : segment.instructions)
        for (const BufferId id : instruction.in)
          if (id != kNone) readers_[root_of(program, id)].push_back(&instruction);
  }

  // But for `samples`, the dimension that counts them: of that always all.
  std::vector<Interval> read(BufferId id, int samples) const {
    const Dims& dims = program_.buffers[id].dims;
    std::vector<Interval> hull;
    for (const Instruction* reader : readers_[id]) {
      const work::Kernel* kernel = reader->kernel();
      if (kernel == nullptr || kernel->op != OpCode::k_local_slice || reader->in[0] != id) return whole(dims);
      const Ints& sub_axis = attr_ints(kernel->attrs, "sub_axis");  // dimension, outer, inner
      const auto at = static_cast<size_t>(sub_axis.at(0));
      if (sub_axis.at(1) != 1 || sub_axis.at(0) == samples) return whole(dims);
      const BufferId out = reader->out.at(0);
      std::vector<Interval> box =
          root_of(program_, out) == out && made_once(out) ? read(out, samples) : whole(buffer_dims(out));
      const int64_t begin = attr_int(kernel->attrs, "begin") * sub_axis.at(2);
      box[at] = {box[at].begin + begin, box[at].end + begin};
      for (size_t d = 0; d < box.size() && !hull.empty(); ++d)
        box[d] = {std::min(box[d].begin, hull[d].begin), std::max(box[d].end, hull[d].end)};
      hull = std::move(box);
    }
    return hull.empty() ? whole(dims) : hull;
  }

 private:
  const Dims& buffer_dims(BufferId id) const { return program_.buffers[id].dims; }
  // What several instructions write may hold something else than the slice.
  bool made_once(BufferId id) const {
    int writers = 0;
    for (const Segment& segment : program_.segments)
      for (const Instruction& instruction : segment.instructions)
        writers += std::ranges::count(instruction.out, id) > 0;
    return writers == 1;
  }

  const Program& program_;
  std::vector<std::vector<const Instruction*>> readers_;  // of each storage, by whichever of its buffers
};

// body(program, feed of a row of its schedule, that row)
template <class Programs, class Body>
void each_feed(const Programs& programs, Body body) {
  for (const auto& program : programs) {
    if (!program) continue;
    for (size_t r = 0; r < program->rows.size(); ++r)
      for (auto& queue : program->segments[program->rows[r]].queues)
        for (BoundInstruction& bound : queue)
          if (bound.source->kind() == InstructionKind::kFeed) body(*program, bound, program->program->schedule[r]);
  }
}

}  // namespace

FedSamples fed_samples(const Entry& entry, const DeviceRow& row, const ScheduleRow& at, const Instruction& feed) {
  const auto& work = *feed.as<work::Feed>();
  if (work.samples < 0 || static_cast<size_t>(work.samples) >= row.samples.size())
    throw internal("'{}' follows sample cut {} of {}", feed.name, work.samples, row.samples.size());
  const SampleCut& cut = row.samples[work.samples];
  const bool all = entry.inputs.at(static_cast<size_t>(work.input)).batch_dim < 0 || work.whole_batch || at.whole ||
                   cut.micro_batches.empty();
  if (all) return {0, 1, cut.whole};
  const auto u = static_cast<size_t>(at.micro_batch);
  return {u, cut.micro_batches.size(), cut.micro_batches.at(u)};
}

std::vector<InputSlices> bind_slices(const Entry& entry, const std::vector<std::unique_ptr<BoundProgram>>& programs) {
  std::vector<InputSlices> slices(entry.inputs.begin(), entry.inputs.end());
  const auto input_of = [](const BoundInstruction& bound) {
    return static_cast<size_t>(bound.source->as<work::Feed>()->input);
  };
  const BoundProgram* last = nullptr;
  std::optional<Readers> readers;
  each_feed(programs, [&](const BoundProgram& program, const BoundInstruction& bound, const ScheduleRow& at) {
    if (last != &program) readers.emplace(*program.program), last = &program;
    const size_t input = input_of(bound);
    slices[input].add(fed_samples(entry, *program.row, at, *bound.source).range,
                      readers->read(bound.source->out.at(0), entry.inputs[input].batch_dim));
  });
  for (InputSlices& s : slices) s.finish();
  each_feed(programs, [&](const BoundProgram& program, BoundInstruction& bound, const ScheduleRow& at) {
    const FedSamples samples = fed_samples(entry, *program.row, at, *bound.source);
    const size_t input = input_of(bound);
    Dims local = entry.inputs[input].dims;
    if (const int d = entry.inputs[input].batch_dim; d >= 0) local[d] = samples.range.size();
    bound.slices.resize(samples.count);
    bound.slices[samples.number] = slices[input].runs(samples.range, local, size_of(entry.inputs[input].dtype));
  });
  return slices;
}

}  // namespace whale
