#include "lower/program_pattern.h"

#include <algorithm>

#include "base/watch.h"
#include "shard/digits.h"

namespace whale {

bool is_patched(const LayoutGraph& graph, const Op& op) {
  if (op.code == OpCode::k_part_view || op.code == OpCode::k_transfer || op.code == OpCode::k_adasum) return false;
  const auto factors = factors_of(graph.graph, op);
  return std::none_of(factors.list.begin(), factors.list.end(), [](const Factor& f) { return f.window.present(); });
}

ProgramPattern::ProgramPattern(const Lowering& lowering, const Draft& draft, const Place& place) : low_(lowering) {
  const auto& axes = low_.lg.tasks.meshes[static_cast<size_t>(place.mesh)].axes;
  for (size_t s = 0; s < draft.ops.size(); ++s)
    for (size_t k = 0; k < draft.ops[s].size(); ++k) {
      Watch::look();
      const Op* op = draft.ops[s][k];
      bool depends = false;
      for (size_t a = 1; op && a <= axes.size() && !depends; ++a)
        depends = axes[a - 1].size > 1 && low_.local.depends_on_coordinate(*op, a);
      if (depends) placed_.push_back({s, k, op, draft.micro_batches[s]});
    }
}

std::optional<Program> ProgramPattern::at(const Program& program, const Place& place) const {
  Program out = program;
  for (const Placed& p : placed_) {
    Watch::look();
    Instruction& i = out.segments[p.segment].instructions[p.index];
    const Place here{place.mesh, place.coordinates, p.micro_batch};
    i.attrs = low_.local.attrs(*p.op, here);
    i.box = low_.local.box(*p.op, here);
    const OpCost cost = low_.local.cost(*p.op, i.attrs, here);
    if (cost.flops != i.flops || cost.bytes != i.bytes) return std::nullopt;
  }
  return out;
}

}  // namespace whale
