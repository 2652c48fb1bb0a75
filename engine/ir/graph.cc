#include "ir/graph.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace whale {
namespace {

template <class T>
const T* find(const Attrs& attrs, std::string_view name, const char* wanted) {
  const auto it = attrs.find(name);
  if (it == attrs.end()) return nullptr;
  const T* value = std::get_if<T>(&it->second);
  if (value == nullptr) throw invalid("attribute '{}' is {}, expected {}", name, to_string(it->second), wanted);
  return value;
}

std::string text_of(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";  // "en": exponents, inf and nan
  return text;
}

const char* name_of(ScopeKind kind) {
  constexpr const char* kNames[] = {"", "replica", "split", "stage", "pipeline", "cluster", "name"};
  return kNames[static_cast<size_t>(kind)];
}

}  // namespace

int64_t attr_int(const Attrs& attrs, std::string_view name, int64_t otherwise) {
  const int64_t* value = find<int64_t>(attrs, name, "an integer");
  return value ? *value : otherwise;
}

double attr_float(const Attrs& attrs, std::string_view name, double otherwise) {
  const double* value = find<double>(attrs, name, "a floating point number");
  return value ? *value : otherwise;
}

bool attr_bool(const Attrs& attrs, std::string_view name, bool otherwise) {
  const bool* value = find<bool>(attrs, name, "true or false");
  return value ? *value : otherwise;
}

const std::string& attr_string(const Attrs& attrs, std::string_view name) {
  static const std::string kEmpty;
  const std::string* value = find<std::string>(attrs, name, "a string");
  return value ? *value : kEmpty;
}

const std::vector<int64_t>& attr_ints(const Attrs& attrs, std::string_view name) {
  static const std::vector<int64_t> kEmpty;
  const std::vector<int64_t>* value = find<std::vector<int64_t>>(attrs, name, "a list of integers");
  return value ? *value : kEmpty;
}

std::string to_string(const Attr& attr) {
  struct Text {
    std::string operator()(int64_t v) const { return fmt::format("{}", v); }
    std::string operator()(double v) const { return text_of(v); }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
    std::string operator()(const std::string& v) const { return fmt::format("\"{}\"", v); }
    std::string operator()(const std::vector<int64_t>& v) const { return fmt::format("[{}]", fmt::join(v, ", ")); }
    std::string operator()(const std::vector<double>& v) const {
      std::vector<std::string> parts(v.size());
      std::transform(v.begin(), v.end(), parts.begin(), text_of);
      return fmt::format("[{}]", fmt::join(parts, ", "));
    }
  };
  return std::visit(Text{}, attr);
}

std::string Graph::scope_path(ScopeId id) const {
  std::string path;
  for (size_t hops = 0; id > 0 && static_cast<size_t>(id) < scopes.size() && hops < scopes.size(); ++hops) {
    const Scope& scope = scopes[static_cast<size_t>(id)];
    const std::string part = scope.name.empty() ? name_of(scope.kind) : scope.name;
    path = path.empty() ? part : part + "/" + path;
    id = scope.parent;
  }
  return path;
}

std::vector<int> use_counts(const Graph& graph) {
  std::vector<int> counts(graph.tensors.size());
  const auto use = [&](TensorId id) {
    if (id != kNone) ++counts[static_cast<size_t>(id)];
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
    case ScheduleKind::kConstant: return peak;
    case ScheduleKind::kLinear: return peak * (1 - (1 - last) * t);
    case ScheduleKind::kCosine: return peak * (last + (1 - last) * 0.5 * (1 + std::cos(std::numbers::pi * t)));
    case ScheduleKind::kInverseSqrt: {
      const double knee = std::max(warmup, 1.0);
      return peak * std::max(last, std::sqrt(knee / std::max(step, knee)));
    }
  }
  throw internal("learning rate schedule number {} is unknown", static_cast<int>(schedule.kind));
}

}  // namespace whale
