#include "compile/proof_check.h"

#include <algorithm>

#include "base/text.h"
#include "prove/prove.h"
#include "task/unlike.h"

namespace whale {

bool has_unlike_replicas(const Graph& graph, const CompileOptions& options) {
  return find_unlike(graph, options.strategy.empty() ? graph.default_strategy : options.strategy).has_value();
}

bool has_unlike_replicas(const Plan& plan) {
  return std::ranges::any_of(plan.meshes, [](const PlanMesh& mesh) {
    return std::ranges::any_of(mesh.axes, [](const MeshAxis& axis) { return axis.only >= 0; });
  });
}

Error cannot_be_unlike(std::string_view why) {
  return unimplemented(
      "unlike replicas of this model are not planned yet: {}; plan it with replicas that are alike, "
      "'replica(N) > ...'",
      brief(why, 300));
}

void check_proof(const Plan& plan, const Entry& entry) {
#ifdef NDEBUG
  constexpr bool kAll = false;
#else
  constexpr bool kAll = true;
#endif
  const bool unlike = has_unlike_replicas(plan);
  if (!unlike && !kAll) return;
  const EntryProof proof = prove(plan, entry);
  if (proof.verdict != ProofVerdict::kRefuted) return;
  const std::string why = fmt::format("the plan is not proven equal to one device ({})", brief(proof.what, 200));
  if (unlike) throw cannot_be_unlike(why);
  throw error(Code::kInternal, "entry '{}': {}", entry.name, why);
}

}  // namespace whale
