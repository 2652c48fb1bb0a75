// Which values of a graph with reshards in it are gradients of parameters, also on their way from who made them.
#pragma once

#include <map>
#include <set>

#include "shard/origins.h"

namespace whale {

struct Gradients {
  Gradients(const Graph& graph, bool with_terms);

  std::map<TensorId, TensorId> parameter_of;
  // They and, where one is a sum, its terms: each may be summed over micro-batches by itself. Empty where not asked
  // for.
  std::set<TensorId> terms;

  TensorId in(const ReshardBuilder& b, TensorId id) const {  // that this is; kNone: it is none
    return on_its_way(b, id, [this](TensorId x) { return parameter_of.contains(x); });
  }
  bool term_in(const ReshardBuilder& b, TensorId id) const {
    return on_its_way(b, id, [this](TensorId x) { return terms.contains(x); }) != kNone;
  }
};

}  // namespace whale
