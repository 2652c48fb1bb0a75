#include "loss_terms.h"

#include <cmath>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

namespace tool {

LossTerms::LossTerms(const std::string& text) {
  constexpr size_t kMost = 256;  // ops; what is beyond is one more of the scalars, as it is
  using Kind = Step::Kind;
  static const std::map<std::string, Kind> kArithmetic = {{"add", Kind::kSum},
                                                          {"sub", Kind::kDifference},
                                                          {"mul", Kind::kProduct},
                                                          {"div", Kind::kQuotient},
                                                          {"neg", Kind::kNegative}};
  const nlohmann::json graph = nlohmann::json::parse(text);
  const nlohmann::json &tensors = graph.at("tensors"), &ops = graph.at("ops");
  std::map<size_t, size_t> done;  // tensor: its step
  size_t ops_left = kMost;
  const std::function<size_t(size_t)> walk = [&](size_t at) -> size_t {
    if (const auto it = done.find(at); it != done.end()) return it->second;
    const nlohmann::json& tensor = tensors.at(at);
    const int64_t producer = tensor.at("producer");
    Step step{Kind::kLeaf};
    if (producer >= 0 && tensor.at("dims").empty()) {
      const nlohmann::json& op = ops.at(static_cast<size_t>(producer));
      const auto known = kArithmetic.find(op.at("op").get<std::string>());
      if (op.at("op") == "fill") {
        step.kind = Kind::kConstant, step.value = op.at("attributes").at("value");
      } else if (known != kArithmetic.end() && ops_left > 0) {
        --ops_left;
        step.kind = known->second;
        step.a = walk(op.at("inputs").at(0));
        step.b = step.kind == Kind::kNegative ? step.a : walk(op.at("inputs").at(1));
      }
    }
    if (step.kind == Kind::kLeaf) step.a = names_.size(), names_.push_back(tensor.at("name"));
    steps_.push_back(step);
    return done[at] = steps_.size() - 1;
  };
  walk(graph.at("training").at("loss"));
  if (steps_.back().kind == Kind::kLeaf) names_.clear(), steps_.clear();
}

double LossTerms::magnitude(const std::vector<double>& values) const {
  using Kind = Step::Kind;
  struct Scalar {
    double value, magnitude;
  };
  std::vector<Scalar> at;
  for (const Step& step : steps_) {
    const bool first = step.kind == Kind::kLeaf || step.kind == Kind::kConstant;
    const Scalar a = first ? Scalar{} : at[step.a], b = first ? Scalar{} : at[step.b];
    const double given = step.kind == Kind::kLeaf ? values[step.a] : step.value;
    switch (step.kind) {
      case Kind::kLeaf:
      case Kind::kConstant: at.push_back({given, std::abs(given)}); break;
      case Kind::kSum: at.push_back({a.value + b.value, a.magnitude + b.magnitude}); break;
      case Kind::kDifference: at.push_back({a.value - b.value, a.magnitude + b.magnitude}); break;
      case Kind::kProduct: at.push_back({a.value * b.value, a.magnitude * b.magnitude}); break;
      case Kind::kQuotient: at.push_back({a.value / b.value, a.magnitude * b.magnitude / (b.value * b.value)}); break;
      case Kind::kNegative: at.push_back({-a.value, a.magnitude}); break;
    }
  }
  const double out = at.empty() ? 0 : at.back().magnitude;
  return std::isfinite(out) ? out : 0;
}

}  // namespace tool
