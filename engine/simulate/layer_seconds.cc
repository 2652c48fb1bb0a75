#include "simulate/layer_seconds.h"

#include <algorithm>
#include <map>

namespace whale {
namespace {

double samples_of(const DeviceRow& row) {
  int64_t most = 0;
  for (const SampleCut& cut : row.samples)
    for (const SampleRange& range : cut.micro_batches) most = std::max(most, range.end - range.begin);
  return static_cast<double>(std::max<int64_t>(1, most));
}

int64_t ways_of(const PlanMesh& mesh) {
  int64_t ways = 1;
  for (const MeshAxis& axis : mesh.axes)
    if (axis.name == "split") ways *= axis.size;
  return ways;
}

}  // namespace

std::unordered_map<const Instruction*, double> layer_seconds(
    const Plan& plan, const Entry& entry, int32_t device, const MeasuredDevice& measured,
    const std::function<double(const Instruction&)>& roofline) {
  const DeviceRow& row = entry.rows[device];
  const std::vector<MeasuredLayer> layers = layers_at(measured, ways_of(plan.meshes[row.mesh]), samples_of(row));
  const Blocks blocks = blocks_of(plan.scopes);
  std::unordered_map<const Instruction*, double> out;
  if (static_cast<int64_t>(layers.size()) != blocks.count + 2) return out;
  const auto last = static_cast<int32_t>(layers.size()) - 1;
  for (const Segment& segment : entry.programs[row.program].segments) {
    // By layer and pass. What is of no block is the embedding's before the first block of a forward pass and behind the
    // last of a backward pass, else the head's.
    std::map<std::pair<int32_t, bool>, double> sums;
    std::vector<std::pair<const Instruction*, std::pair<int32_t, bool>>> of;
    std::map<bool, bool> began;
    for (const Instruction& i : segment.instructions) {
      if (i.kernel() == nullptr || i.phase == Phase::kUpdate) continue;
      const bool backward = i.phase != Phase::kForward;
      const int32_t block = static_cast<size_t>(i.scope) < blocks.of_scope.size() ? blocks.of_scope[i.scope] : kNone;
      if (block != kNone) began[backward] = true;
      const std::pair<int32_t, bool> at{block != kNone ? block + 1 : began[backward] != backward ? last : 0, backward};
      of.emplace_back(&i, at), sums[at] += roofline(i);
    }
    for (const auto& [i, at] : of) {
      const MeasuredLayer& layer = layers[at.first];
      const double measured_seconds = at.second ? layer.backward : layer.forward;
      if (sums[at] > 0 && measured_seconds > 0) out[i] = roofline(*i) * measured_seconds / sums[at];
    }
  }
  return out;
}

}  // namespace whale
