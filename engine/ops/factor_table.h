// The factors of a graph's ops, worked out once for all that are alike.
#pragma once

#include <unordered_map>
#include <vector>

#include "ops/op.h"

namespace whale {

Factors factors_of(const Graph& graph, const Op& op);

// The same, worked out once for all ops that are alike: those of a model's layers, say.
class FactorTable {
 public:
  const Factors& of(const Graph& graph, const Op& op);  // stays where it is

 private:
  struct Form {  // all that factors follow from
    OpCode code{};
    Attrs attrs;
    std::vector<bool> present;
    std::vector<TensorType> inputs, outputs;
    Factors factors;
  };
  static bool is_of(const Form& form, const Graph& graph, const Op& op);
  std::unordered_multimap<size_t, Form> forms_;  // by hash
};

// Of a graph that stays as it is: each op is looked up once.
class OpFactors {
 public:
  explicit OpFactors(const Graph& graph) : g_(graph), of_(graph.ops.size()) {}
  const Factors& of(const Op& op) {  // one of the graph's
    const Factors*& mine = of_[&op - g_.ops.data()];
    if (!mine) mine = &table_.of(g_, op);
    return *mine;
  }

 private:
  const Graph& g_;
  FactorTable table_;
  std::vector<const Factors*> of_;
};

}  // namespace whale
