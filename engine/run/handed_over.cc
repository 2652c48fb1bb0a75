#include "run/handed_over.h"

#include "base/error.h"
#include "plan/part.h"

namespace whale {
namespace {

const SampleCut& samples_of(const DeviceRow& row, const work::Fetch& fetch) {
  if (fetch.samples < 0 || static_cast<size_t>(fetch.samples) >= row.samples.size())
    throw internal("an output follows sample cut {} of {}", fetch.samples, row.samples.size());
  return row.samples[fetch.samples];
}

const PlanOutput& port_of(const Entry& entry, const work::Fetch& fetch) {
  return entry.outputs.at(static_cast<size_t>(fetch.output));
}

}  // namespace

bool hands_over(const DeviceRow& row, const PlanOutput& output) {
  if (output.mesh != row.mesh && output.mesh != kNone) return false;
  for (size_t a = 0; a < row.coordinates.size(); ++a)
    if (row.coordinates[a] != 0 && !(a < output.cut_by.size() && output.cut_by[a])) return false;
  return true;
}

bool by_micro_batch(const Entry& entry, const DeviceRow& row, const ScheduleRow& at, const work::Fetch& fetch) {
  const PlanOutput& port = port_of(entry, fetch);
  return port.merge == OutputMerge::kConcat && port.batch_dim >= 0 && !fetch.whole_batch && !at.whole &&
         !samples_of(row, fetch).micro_batches.empty();
}

std::vector<HandedRun> handed_over(const Plan& plan, const Entry& entry, const DeviceRow& row, const ScheduleRow& at,
                                   const work::Fetch& fetch) {
  const PlanOutput& port = port_of(entry, fetch);
  std::vector<HandedRun> runs;
  if (!hands_over(row, port)) return runs;
  std::vector<SubAxisCut> cuts;
  if (!port.parts.axes.empty() && port.mesh != kNone)
    cuts = cuts_of(port.dims, port.parts, plan.meshes[port.mesh].axes, row.coordinates);
  if (port.merge == OutputMerge::kConcat && port.batch_dim >= 0) {
    const SampleCut& cut = samples_of(row, fetch);
    const int64_t inner = port.dims[port.batch_dim] / entry.batch;
    const SampleRange& samples =
        by_micro_batch(entry, row, at, fetch) ? cut.micro_batches.at(static_cast<size_t>(at.micro_batch)) : cut.whole;
    cuts.push_back({SubAxis{port.batch_dim, 1, inner}, entry.batch, samples});
  }
  const auto size = static_cast<size_t>(size_of(port.dtype));
  for_each_run(port.dims, part_of(port.dims, cuts), [&](int64_t logical, int64_t here, int64_t elements) {
    runs.push_back(
        {static_cast<size_t>(logical) * size, static_cast<size_t>(here) * size, static_cast<size_t>(elements) * size});
  });
  return runs;
}

std::vector<std::vector<ByteRuns>> handed_over_by_rank(const Plan& plan, const Entry& entry,
                                                       const std::vector<int32_t>& ranks, size_t size) {
  std::vector<std::vector<ByteRuns>> all(size, std::vector<ByteRuns>(entry.outputs.size()));
  for (const DeviceRow& row : entry.rows) {
    const Program& program = entry.programs.at(static_cast<size_t>(row.program));
    for (const ScheduleRow& at : program.schedule)
      for (const Instruction& instruction : program.segments.at(static_cast<size_t>(at.segment)).instructions) {
        const auto* fetch = instruction.as<work::Fetch>();
        if (fetch == nullptr) continue;
        ByteRuns& to = all[ranks[row.device]][fetch->output];
        for (const HandedRun& run : handed_over(plan, entry, row, at, *fetch)) to.push_back({run.host, run.bytes});
      }
  }
  for (auto& outputs : all)
    for (ByteRuns& bytes : outputs) join(bytes);
  return all;
}

}  // namespace whale
