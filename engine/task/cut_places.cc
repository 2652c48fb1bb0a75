#include "task/cut_places.h"

#include <algorithm>
#include <utility>

#include "ops/op.h"

namespace whale {

std::vector<char> moving_tensors(const Graph& graph) {
  std::vector<char> moves(graph.tensors.size());
  for (const TensorId id : graph.inputs) moves[id] = graph.tensor(id).batch_dim >= 0 ? 2 : 0;
  for (const Op& op : graph.ops) {
    const bool depends =
        std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return id != kNone && moves[id] != 0; });
    for (const TensorId id : op.outputs)
      if (id != kNone) moves[id] = depends;
  }
  return moves;
}

std::vector<CutPlace> cut_places(const Graph& graph, const std::vector<OpId>& ops, bool keep_groups) {
  constexpr size_t kPlaces = 512;  // at most, where less crosses than elsewhere
  const size_t n = ops.size();
  const std::vector<char> moves = moving_tensors(graph);
  std::vector<size_t> last_use(graph.tensors.size()), made(graph.tensors.size(), n);
  for (size_t k = 0; k < n; ++k) {
    for (const TensorId id : graph.op(ops[k]).inputs)
      if (id != kNone) last_use[id] = k;
    for (const TensorId id : graph.op(ops[k]).outputs)
      if (id != kNone) made[id] = k;
  }
  std::vector<double> change(n + 1);
  for (size_t t = 0; t < graph.tensors.size(); ++t) {
    if (moves[t] != 1 || made[t] >= n || last_use[t] <= made[t]) continue;
    const double bytes = whole_bytes(graph.tensors[t]);
    change[made[t] + 1] += bytes;
    if (last_use[t] + 1 <= n) change[last_use[t] + 1] -= bytes;
  }
  std::vector<int> inside(n + 1);  // a group
  if (keep_groups) {
    const std::vector<int> uses = use_counts(graph);
    for (size_t k = 0; k < n; ++k)
      for (const TensorId id : graph.op(ops[k]).inputs)
        if (id != kNone && has_flag(graph.op(ops[k]).code, kElementwise) && uses[id] == 1)
          for (size_t at = made[id] + 1; at <= k; ++at) ++inside[at];
  }
  std::vector<CutPlace> places;
  double alive = 0;
  for (size_t k = 1; k < n; ++k) {
    alive += change[k];
    if (inside[k]) continue;
    if (moves[graph.op(ops[k - 1]).outputs.empty() ? 0 : graph.op(ops[k - 1]).outputs[0]] == 1)
      places.push_back({k, std::max(0.0, alive)});
  }
  if (places.size() > kPlaces) {
    std::vector<double> bytes;
    for (const CutPlace& p : places) bytes.push_back(p.crossing);
    std::nth_element(bytes.begin(), bytes.begin() + kPlaces, bytes.end());
    const double most = bytes[kPlaces];
    std::erase_if(places, [&](const CutPlace& p) { return p.crossing > most; });
    while (places.size() > 4 * kPlaces) {
      std::vector<CutPlace> fewer;
      for (size_t k = 0; k < places.size(); k += 2) fewer.push_back(places[k]);
      places = std::move(fewer);
    }
  }
  return places;
}

}  // namespace whale
