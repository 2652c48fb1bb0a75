#include "plan/lower.h"

#include <algorithm>

#include "base/error.h"
#include "plan/program_builder.h"
#include "plan/storage.h"

namespace whale {
namespace {

std::vector<PlanInput> inputs_of(const Graph& g) {
  std::vector<PlanInput> out;
  for (const TensorId id : g.inputs) {
    const Tensor& t = g.tensor(id);
    out.push_back({t.name, t.dtype, t.dims, t.batch_dim});
  }
  return out;
}

std::vector<PlanOutput> outputs_of(const LayoutGraph& lg) {
  std::vector<PlanOutput> out;
  for (const NamedTensor& f : lg.fetches) {
    const Tensor& t = lg.graph.tensor(f.tensor);
    PlanOutput o{f.name, t.dtype, t.dims, OutputMerge::kSame, -1};
    for (size_t a = 0; a < lg.axes.size(); ++a)
      if (lg.at(f.tensor, a).placement == Placement::kShard)
        o.merge = OutputMerge::kConcat, o.batch_dim = lg.at(f.tensor, a).digit.dim;
    const bool summed = t.producer != kNone && lg.graph.op(t.producer).code == OpCode::k_accumulate;
    if (o.merge == OutputMerge::kSame && summed) o.merge = OutputMerge::kSum;
    out.push_back(std::move(o));
  }
  return out;
}

bool depends_on_device(const LayoutGraph& lg) {
  return std::any_of(lg.graph.ops.begin(), lg.graph.ops.end(),
                     [](const Op& op) { return op.code == OpCode::k_local_slice; });
}

}  // namespace

Entry lower(const LayoutGraph& lg, const Mesh& mesh, const BatchCut& cut, const LowerOptions& options) {
  Entry entry;
  entry.name = options.entry;
  entry.batch = lg.batch;
  entry.inputs = inputs_of(lg.graph);
  entry.outputs = outputs_of(lg);
  const bool whole = lg.axes[1].size == 1;  // every device has every sample (one device, or a batch that cannot be cut)
  const bool apart = !whole && depends_on_device(lg);
  std::map<std::vector<int64_t>, int32_t> classes;  // by local sizes
  for (int64_t d = 0; d < mesh.size(); ++d) {
    const auto at = static_cast<size_t>(d);
    DeviceRow row;
    row.device = static_cast<int32_t>(d);
    row.coordinates = mesh.coordinates(d);
    row.samples = whole ? Interval{0, lg.batch} : cut.whole[at];
    std::vector<int64_t> sizes;
    for (size_t u = 0; u < cut.runs.size(); ++u) {
      row.micro_batches.push_back(whole ? cut.runs[u] : cut.parts[u][at]);
      sizes.push_back(row.micro_batches.back().size());
    }
    sizes.push_back(row.samples.size());
    if (apart) sizes.push_back(d);
    const auto [known, fresh] = classes.try_emplace(sizes, static_cast<int32_t>(entry.programs.size()));
    if (fresh) {
      Draft draft = ProgramBuilder(lg, cut, options, whole ? 0 : d).build();
      share_storage(draft, lg.graph);
      draft.program.variable_bytes = options.variable_bytes;
      entry.programs.push_back(std::move(draft.program));
    }
    row.program = known->second;
    entry.rows.push_back(std::move(row));
  }
  return entry;
}

}  // namespace whale
