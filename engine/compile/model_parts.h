// Parts of a model that may be worth a strategy of their own: a few ops with much of all parameters (experts, a
// vocabulary, a classifier of many classes).
#pragma once

#include <string>
#include <vector>

#include "ir/graph.h"

namespace whale {

struct ModelPart {
  std::string name;    // of its scopes, as a clause of a strategy names them
  std::string factor;  // that a split of it asks for; empty: chosen
  double bytes = 0;    // of its parameters
};

// By name, those with a quarter of all parameters and more, of experts or of one place in the model (what is split in
// every layer passes all activations through the network each time); experts first, then the largest.
std::vector<ModelPart> parts_worth_a_clause(const Graph& graph);

}  // namespace whale
