#include "ir/graph.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace whale {
namespace {

const char* name_of(ScopeKind kind) {
  constexpr const char* kNames[] = {"", "replica", "split", "stage", "pipeline", "cluster", "name"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace

std::string Graph::scope_path(ScopeId id) const {
  std::string path;
  for (size_t hops = 0; id > 0 && static_cast<size_t>(id) < scopes.size() && hops < scopes.size(); ++hops) {
    const Scope& scope = scopes[id];
    const std::string part = scope.name.empty() ? name_of(scope.kind) : scope.name;
    path = path.empty() ? part : part + "/" + path;
    id = scope.parent;
  }
  return path;
}

std::vector<int> use_counts(const Graph& graph) {
  std::vector<int> counts(graph.tensors.size());
  const auto use = [&](TensorId id) {
    if (id != kNone) ++counts[id];
  };
  for (const Op& op : graph.ops)
    for (const TensorId id : op.inputs) use(id);
  for (const NamedTensor& output : graph.outputs) use(output.tensor);
  for (const Variable& variable : graph.variables) use(variable.next);
  use(graph.training.loss);
  return counts;
}

double learning_rate_at(double peak, const LearningRateSchedule& schedule, int64_t updates) {
  const double step = static_cast<double>(updates), warmup = static_cast<double>(schedule.warmup_steps);
  if (step < warmup) return peak * step / warmup;
  const double span = static_cast<double>(schedule.total_steps) - warmup;
  const double t = span > 0 ? std::min(1.0, (step - warmup) / span) : 0;  // no total: no decay
  const double last = schedule.final_fraction;
  switch (schedule.kind) {
    case LrScheduleKind::kConstant: return peak;
    case LrScheduleKind::kLinear: return peak * (1 - (1 - last) * t);
    case LrScheduleKind::kCosine: return peak * (last + (1 - last) * 0.5 * (1 + std::cos(std::numbers::pi * t)));
    case LrScheduleKind::kInverseSqrt: {
      const double knee = std::max(warmup, 1.0);
      return peak * std::max(last, std::sqrt(knee / std::max(step, knee)));
    }
  }
  throw internal("learning rate schedule number {} is unknown", static_cast<int>(schedule.kind));
}

}  // namespace whale
