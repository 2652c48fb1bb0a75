// What values of a graph with reshards in it were made from.
#pragma once

#include <set>

#include "shard/reshards.h"

namespace whale {

inline constexpr int kDeepest = 64;  // of chains that are produced again

bool passes_on(const Op& op);                               // one value, to elsewhere
bool is_parameter(const ReshardBuilder& b, TensorId id);    // or its copy of another type
bool sums_of_unlike(const ReshardBuilder& b, TensorId id);  // over an unlike replica's samples: another one has others
bool is_constant(const ReshardBuilder& b, TensorId id);     // made of constants and the step's scalars alone
bool depends_on(const ReshardBuilder& b, TensorId id, TensorKind kind);
inline bool mixes(const ReshardBuilder& b, TensorId id) {  // parameters and samples
  return depends_on(b, id, TensorKind::kVariable) && depends_on(b, id, TensorKind::kInput);
}
bool has_mixed_rows(const ReshardBuilder& b, TensorId id);  // rows of samples that depend on parameters, and went in

// The first for which `found` of the value and what it was moved, summed and cast from; kNone: there is none.
template <class Found>
TensorId on_its_way(const ReshardBuilder& b, TensorId id, Found found) {
  while (id != kNone && !found(id)) {
    const OpId made = b.producer(id);
    if (made == kNone) return kNone;
    const Op& op = b.out.graph.op(made);
    if (op.code == OpCode::k_accumulate)
      id = op.inputs[1];
    else if (passes_on(op))
      id = op.inputs[0];
    else
      return kNone;
  }
  return id;
}

// The value and all that it is made of, nearest first; of what makes one only where deeper(it).
template <class Deeper>
void each_maker(const ReshardBuilder& b, TensorId id, Deeper deeper) {
  TensorIds found{id};
  std::set<TensorId> seen{id};
  for (size_t k = 0; k < found.size(); ++k) {
    if (!deeper(found[k]) || b.producer(found[k]) == kNone) continue;
    for (const TensorId input : b.out.graph.op(b.producer(found[k])).inputs)
      if (input != kNone && seen.insert(input).second) found.push_back(input);
  }
}

}  // namespace whale
