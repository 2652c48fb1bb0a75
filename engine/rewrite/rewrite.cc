#include "rewrite/rewrite.h"

#include <queue>

#include "base/error.h"
#include "ops/op.h"

namespace whale {

std::vector<std::vector<OpId>> readers_of(const Graph& graph) {
  std::vector<std::vector<OpId>> out(graph.tensors.size());
  for (size_t i = 0; i < graph.ops.size(); ++i)
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone) out[static_cast<size_t>(id)].push_back(static_cast<OpId>(i));
  return out;
}

void compact(Graph& graph, const std::vector<char>& removed) {
  const size_t n = graph.ops.size();
  const auto gone = [&](size_t i) { return !removed.empty() && removed[i]; };
  std::vector<OpId> maker(graph.tensors.size(), kNone), number(n, kNone);
  for (size_t i = 0; i < n; ++i)
    for (const TensorId id : graph.ops[i].outputs)
      if (id != kNone && !gone(i)) maker[static_cast<size_t>(id)] = static_cast<OpId>(i);
  std::vector<int> waiting(n);
  std::vector<std::vector<size_t>> after(n);
  std::priority_queue<size_t, std::vector<size_t>, std::greater<>> ready;
  for (size_t i = 0; i < n; ++i) {
    if (gone(i)) continue;
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone && maker[static_cast<size_t>(id)] != kNone)
        ++waiting[i], after[static_cast<size_t>(maker[static_cast<size_t>(id)])].push_back(i);
    if (waiting[i] == 0) ready.push(i);
  }
  std::vector<Op> ops;
  size_t expected = 0;
  for (size_t i = 0; i < n; ++i) expected += gone(i) ? 0 : 1;
  while (!ready.empty()) {
    const size_t i = ready.top();
    ready.pop();
    number[i] = static_cast<OpId>(ops.size());
    ops.push_back(std::move(graph.ops[i]));
    for (const size_t j : after[i])
      if (--waiting[j] == 0) ready.push(j);
  }
  WHALE_CHECK(ops.size() == expected, "a rewrite made a cycle");
  graph.ops = std::move(ops);
  for (Tensor& t : graph.tensors) t.producer = kNone;  // what only a removed op made has none
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    Op& op = graph.ops[i];
    if (op.origin != kNone)
      op.origin = static_cast<size_t>(op.origin) < n ? number[static_cast<size_t>(op.origin)] : kNone;
    for (size_t k = 0; k < op.outputs.size(); ++k) {
      if (op.outputs[k] == kNone) continue;
      Tensor& t = graph.tensor(op.outputs[k]);
      t.producer = static_cast<OpId>(i);
      t.output = static_cast<int>(k);
    }
  }
}

void without_index_check(Op& op) {
  if (const auto limit = op.attrs.find(kIndexLimit); limit != op.attrs.end()) limit->second = int64_t{0};
}

}  // namespace whale
