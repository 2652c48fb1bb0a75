#include "jumps.h"

#include <algorithm>

namespace tool {
namespace {

std::vector<size_t> present(const nlohmann::json& ids) {
  std::vector<size_t> out;
  for (const auto& id : ids)
    if (id.get<int64_t>() >= 0) out.push_back(id.get<size_t>());
  return out;
}

}  // namespace

Jumps::Jumps(const nlohmann::json& graph, const std::set<std::string>& scores)
    : tensors_(graph.at("tensors")), rows_(tensors_.size()) {
  for (size_t t = 0; t < rows_.size(); ++t) {
    const std::string kind = tensors_[t].at("kind");
    rows_[t].fed = kind == "variable" || (kind == "input" && is_float(t));
  }
  for (const auto& op : graph.at("ops")) walk(op, scores);  // in the order that they run in
}

bool Jumps::is_float(size_t tensor) const {
  const std::string dtype = tensors_[tensor].at("dtype");
  return dtype.starts_with("f") || dtype.starts_with("bf");
}

// Data as they are fed are the same everywhere.
bool Jumps::turns(const std::string& op, size_t operand, size_t result) const {
  static const std::set<std::string> kTurn{"equal",   "not_equal",     "less", "less_equal",
                                           "greater", "greater_equal", "sign", "floor"};
  return (kTurn.contains(op) || (op == "cast" && !is_float(result))) && is_float(operand) && rows_[operand].fed &&
         tensors_[operand].at("kind") != "input";
}

bool Jumps::reaches(size_t from, const std::set<size_t>& tensors) const {
  std::vector<size_t> open{from};
  std::set<size_t> known{from};
  while (!open.empty()) {
    const size_t tensor = open.back();
    open.pop_back();
    if (tensors.contains(tensor)) return true;
    for (const size_t next : rows_[tensor].from)
      if (known.insert(next).second) open.push_back(next);
  }
  return false;
}

void Jumps::walk(const nlohmann::json& op, const std::set<std::string>& scores) {
  const std::string name = op.at("op");
  const std::vector<size_t> in = present(op.at("inputs"));
  Row row{false, false, false, in, {}};
  for (const size_t t : in) {
    row.fed = row.fed || rows_[t].fed, row.jumps = row.jumps || rows_[t].jumps;
    row.unseen = row.unseen || rows_[t].unseen;
    row.compared.insert(rows_[t].compared.begin(), rows_[t].compared.end());
  }
  if (name == "argmax" || name == "top_k" || name == "moe_gate")
    row.unseen = row.unseen || !scores.contains(tensors_[in[0]].at("name"));
  row.jumps = row.jumps || (name == "argmax" && row.unseen);  // what the loss depends on shows that others flip
  // A choice between numbers that are made of what is compared, as in a leaky relu, is taken for one without a step.
  if (name == "where" && !rows_[in[1]].jumps && !rows_[in[2]].jumps && !rows_[in[0]].compared.empty() &&
      (reaches(in[1], rows_[in[0]].compared) || reaches(in[2], rows_[in[0]].compared)))
    row.jumps = false;
  const std::vector<size_t> results = present(op.at("outputs"));
  for (const size_t result : results) {
    Row& of = rows_[result] = row;
    for (const size_t t : in)
      if (turns(name, t, result)) of.jumps = true, of.compared.insert(in.begin(), in.end());
    if (is_float(result)) of.compared.clear();
    of.jumps = of.jumps || (name == "max_pool" && !is_float(result));  // the place of a maximum
  }
}

std::set<std::string> parameters_beside_integers(const nlohmann::json& graph) {
  const auto& tensors = graph.at("tensors");
  const auto kind = [&](size_t t) { return tensors[t].at("kind").get<std::string>(); };
  const auto is_float = [&](size_t t) {
    return tensors[t].at("dtype").get<std::string>().find('f') != std::string::npos;
  };
  std::vector<char> moves(tensors.size(), 0), of_integers(tensors.size(), 0);
  for (size_t t = 0; t < tensors.size(); ++t) {
    moves[t] = kind(t) == "variable" || (kind(t) == "input" && is_float(t));
    of_integers[t] = kind(t) == "input" && !is_float(t);
  }
  std::set<std::string> out;
  for (const auto& op : graph.at("ops")) {
    const std::vector<size_t> in = present(op.at("inputs"));
    const auto any = [&](auto is) { return std::any_of(in.begin(), in.end(), is); };
    if (any([&](size_t t) { return is_float(t) && of_integers[t] && !moves[t]; }))
      for (const size_t t : in)
        if (kind(t) == "variable") out.insert(tensors[t].at("name"));
    const bool moved = any([&](size_t t) { return moves[t]; }), fed = any([&](size_t t) { return of_integers[t]; });
    for (const size_t t : present(op.at("outputs"))) moves[t] = moved, of_integers[t] = fed;
  }
  return out;
}

}  // namespace tool
