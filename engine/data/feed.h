// Host tensors across the plan's boundary: checked against its ports, and cut along the batch into the pieces that each
// device and micro-batch reads or writes, straight from and into the caller's memory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/host_tensor.h"
#include "data/input_slices.h"
#include "plan/plan.h"

namespace whale {

// The bytes of some samples inside a dense host tensor: `rows` runs of `run` bytes, `stride` apart, from `begin` on.
struct SampleRuns {
  size_t begin = 0, run = 0, stride = 0, rows = 0;
  size_t bytes() const { return run * rows; }
};
// Samples [range) of a tensor whose dimension `batch_dim` holds `batch` samples (a multiple of it: several elements
// each). batch_dim -1: all of it.
SampleRuns sample_runs(DType dtype, const Dims& dims, int batch_dim, int64_t batch, SampleRange range);

// Samples of one step: the extent along batch_dim, the same for all inputs; `otherwise` when no input has one. Throws
// on inputs that disagree, naming both.
int64_t batch_of(const std::vector<PlanInput>& ports, const std::vector<NamedHost>& inputs, int64_t otherwise);

// Where each port of the entry finds its data: pointers in the order of the ports, null for inputs that were not given.
// Throws on unknown, repeated and wrongly typed or shaped tensors; on missing ones unless `allow_missing`.
void bind_inputs(const std::vector<PlanInput>& ports, const std::vector<NamedHost>& inputs, bool allow_missing,
                 std::vector<const void*>& to);
// The same for tensors that hold the slices of `rank`, in the order of the ports. One that is empty may be left out.
void bind_slices(const std::vector<PlanInput>& ports, const std::vector<InputSlices>& slices, int rank,
                 const std::vector<NamedHost>& inputs, bool allow_missing, std::vector<const void*>& to);
// Throws when an element of an input that ops take for an index is out of their range. `read`: of each port, whether
// the run reads it; empty: all are. `slices`: what the inputs hold of the batch, in the order of the ports; empty: all.
void check_indices(const std::vector<PlanInput>& ports, const std::vector<const void*>& inputs,
                   const std::vector<bool>& read, const std::vector<InputSlices>& slices = {});
void bind_outputs(const std::vector<PlanOutput>& ports, const std::vector<NamedHost>& outputs, std::vector<void*>& to);

}  // namespace whale
