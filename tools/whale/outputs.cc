#include "outputs.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "jumps.h"

namespace tool {
namespace {

bool is_gradient(const std::string& name) { return name.starts_with("grad:"); }

}  // namespace

Outputs outputs_of(const std::vector<std::string>& handed_out, const std::string& graph_json,
                   const std::vector<Decision>& seen) {
  const auto graph = nlohmann::json::parse(graph_json);
  std::set<std::string> scores;
  for (const Decision& d : seen) scores.insert(d.scores);
  const Jumps jumps(graph, scores);
  std::map<std::string, size_t> declared;
  for (const auto& output : graph.at("outputs")) declared[output.at("name")] = output.at("tensor");
  std::map<std::string, size_t> known;
  for (size_t i = 0; i < graph.at("tensors").size(); ++i) known.emplace(graph.at("tensors")[i].at("name"), i);
  const std::vector<std::string> deciding = names_of(seen);
  Outputs out;
  for (const std::string& name : handed_out) {
    if (name == "loss") continue;
    if (is_gradient(name)) {
      out.names.push_back(name);
      continue;
    }
    const bool by_graph = declared.contains(name);
    if (!by_graph && std::find(deciding.begin(), deciding.end(), name) != deciding.end()) continue;
    if (!by_graph && !known.contains(name)) continue;
    const size_t tensor = by_graph ? declared[name] : known[name];
    (jumps.may_turn(tensor) ? out.left_out : out.names).push_back(name);
  }
  return out;
}

std::vector<std::string> without_gradients(std::vector<std::string> names) {
  std::erase_if(names, is_gradient);
  return names;
}

OutputComparison::OutputComparison(std::vector<std::string> names, const Setting& setting)
    : names_(std::move(names)), setting_(setting), envelope_(names_.size(), 0) {}

OutputComparison::Apart OutputComparison::apart(const std::vector<Tensor>& run, const std::vector<Tensor>& one) const {
  Apart out;
  for (size_t k = 0; k < names_.size(); ++k) out.push_back(distance(run[k].get(), one[k].get()));
  return out;
}

void OutputComparison::widen(const Apart& moved) {
  for (size_t k = 0; k < names_.size(); ++k) envelope_[k] = std::max(envelope_[k], moved[k].difference);
}

void OutputComparison::judge(const Apart& plan, const std::vector<Tensor>& one, int64_t number, int64_t steps,
                             int64_t runs, Compared& into) const {
  std::vector<double> size;
  double largest = 0;  // of the gradients, per element
  for (size_t k = 0; k < names_.size(); ++k) {
    size.push_back(root_of_elements(one[k].get()));
    if (is_gradient(names_[k])) largest = std::max(largest, plan[k].norm / size[k]);
  }
  for (size_t k = 0; k < names_.size(); ++k) {
    Figure f{names_[k], number, 0, {}, plan[k].difference, 0, 0, 0, plan[k].norm};
    if (!integers(one[k].get())) {
      f.envelope = envelope_[k];
      f.floor = rounding_of(setting_, steps) * f.norm +
                summed_floor(setting_, is_gradient(names_[k]) ? largest : f.norm / size[k], size[k]);
      f.bound = factor_of(setting_, elements(one[k].get()), runs) * f.envelope + f.floor;
    }
    if (std::isfinite(f.bound)) into.judge(f);
  }
}

std::vector<std::string> OutputComparison::unknown() const {
  std::vector<std::string> out;
  for (size_t k = 0; k < names_.size(); ++k)
    if (!std::isfinite(envelope_[k])) out.push_back(names_[k]);
  return out;
}

}  // namespace tool
