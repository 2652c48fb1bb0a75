#include "compile/model_parts.h"

#include <algorithm>
#include <map>
#include <set>

#include "ops/factor_table.h"
#include "rewrite/order.h"
#include "task/factor_names.h"

namespace whale {
namespace {

constexpr const char* kExperts = "experts";

struct Part {
  double bytes = 0, of_experts = 0;  // of parameters
  size_t ops = 0;
  std::set<TensorId> seen = {};
  std::set<ScopeId> scopes = {};
};

bool has_experts(const Factors& factors) {
  return std::ranges::any_of(factors.list, [](const Factor& f) { return f.name == kExperts; });
}

// Whether the operand is cut where the op's experts are.
bool is_of_experts(const Factors& factors, size_t operand) {
  return std::ranges::any_of(factors.list, [&](const Factor& f) {
    return is_named(f.name, kExperts) && operand < f.inputs.size() && f.inputs[operand].present();
  });
}

}  // namespace

std::vector<ModelPart> parts_worth_a_clause(const Graph& graph) {
  constexpr double kLeastShare = 0.25, kNearlyAll = 0.99;  // biases are none of it
  constexpr size_t kMost = 4, kFew = 4;                    // parts; parameters of one that is no mixture
  FactorTable table;
  std::map<std::string, Part> parts;
  bool experts = false;
  for (const Op& op : graph.ops) {
    const Factors& factors = table.of(graph, op);
    experts = experts || has_experts(factors);
    std::map<std::string, ScopeId> names{{"", kNone}};
    for (ScopeId s = op.scope; s != kNone; s = graph.scopes[s].parent)
      if (const Scope& scope = graph.scopes[s]; scope.kind == ScopeKind::kName) names[scope.name] = s;
    for (const auto& [name, scope] : names) {
      Part& part = parts[name];
      part.scopes.insert(scope);
      ++part.ops;
      for (size_t k = 0; k < op.inputs.size(); ++k) {
        const TensorId id = op.inputs[k];
        if (id == kNone || graph.tensor(id).kind != TensorKind::kVariable || !part.seen.insert(id).second) continue;
        const auto bytes = static_cast<double>(bytes_of(graph.tensor(id)));
        part.bytes += bytes;
        if (is_of_experts(factors, k)) part.of_experts += bytes;
      }
    }
  }
  const Part& all = parts[""];
  std::vector<ModelPart> out;
  for (const auto& [name, part] : parts) {
    if (name.empty() || part.bytes < kLeastShare * all.bytes) continue;
    const bool of_experts = experts && part.of_experts >= kNearlyAll * part.bytes;
    const bool once = part.scopes.size() == 1 && part.seen.size() <= kFew && part.ops < all.ops;
    if (of_experts || once) out.push_back({name, of_experts ? kExperts : "", part.bytes});
  }
  std::ranges::stable_sort(out, [](const ModelPart& a, const ModelPart& b) {
    return std::pair(!a.factor.empty(), a.bytes) > std::pair(!b.factor.empty(), b.bytes);
  });
  // Of several names of the same experts, the one with least around them.
  std::erase_if(out, [&, found = out](const ModelPart& p) {
    return !p.factor.empty() && std::ranges::any_of(found, [&](const ModelPart& other) {
      return !other.factor.empty() && other.bytes >= kNearlyAll * p.bytes && parts[other.name].ops < parts[p.name].ops;
    });
  });
  if (out.size() > kMost) out.resize(kMost);
  return out;
}

}  // namespace whale
