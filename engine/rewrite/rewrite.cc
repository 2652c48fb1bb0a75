#include "rewrite/rewrite.h"

#include <algorithm>
#include <queue>

#include "base/error.h"
#include "ops/op.h"

namespace whale {

Lists::Lists(size_t keys, const std::vector<Entry>& entries) : numbers_(entries.size()), begin_(keys + 1) {
  for (const auto& [key, number] : entries) ++begin_[static_cast<size_t>(key) + 1];
  for (size_t k = 1; k <= keys; ++k) begin_[k] += begin_[k - 1];
  std::vector<size_t> end(begin_.begin(), begin_.end() - 1);  // of what is there
  for (const auto& [key, number] : entries) numbers_[end[key]++] = number;
}

Lists readers_of(const Graph& graph) {
  std::vector<Lists::Entry> entries;
  entries.reserve(3 * graph.ops.size());
  for (size_t i = 0; i < graph.ops.size(); ++i)
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone) entries.emplace_back(id, static_cast<OpId>(i));
  return {graph.tensors.size(), entries};
}

Lists followers_of(const Graph& graph) {
  std::vector<Lists::Entry> entries;
  entries.reserve(3 * graph.ops.size());
  for (size_t i = 0; i < graph.ops.size(); ++i)
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone && graph.tensor(id).producer != kNone)
        entries.emplace_back(graph.tensor(id).producer, static_cast<OpId>(i));
  return {graph.ops.size(), entries};
}

namespace {

// Per tensor, who makes it among the ops that stay.
std::vector<OpId> makers_of(const Graph& graph, const std::vector<char>& removed) {
  std::vector<OpId> maker(graph.tensors.size(), kNone);
  for (size_t i = 0; i < graph.ops.size(); ++i)
    for (const TensorId id : graph.ops[i].outputs)
      if (id != kNone && (removed.empty() || !removed[i])) maker[id] = static_cast<OpId>(i);
  return maker;
}

// The numbers of the ops that stay, in the order closest to theirs in which they can run: always the first that can.
std::vector<OpId> runnable_order(const Graph& graph, const std::vector<char>& removed) {
  const size_t n = graph.ops.size();
  const std::vector<OpId> maker = makers_of(graph, removed);
  const auto made_by = [&](TensorId id) { return id == kNone ? kNone : maker[id]; };
  std::vector<OpId> staying, order;
  for (size_t i = 0; i < n; ++i)
    if (removed.empty() || !removed[i]) staying.push_back(static_cast<OpId>(i));
  const bool runnable = std::all_of(staying.begin(), staying.end(), [&](OpId i) {
    const auto& inputs = graph.op(i).inputs;
    return std::all_of(inputs.begin(), inputs.end(), [&](TensorId id) { return made_by(id) < i; });
  });
  if (runnable) return staying;
  std::vector<int> waiting(n);
  std::vector<Lists::Entry> entries;
  std::priority_queue<OpId, std::vector<OpId>, std::greater<>> ready;
  for (const OpId i : staying) {
    for (const TensorId id : graph.op(i).inputs)
      if (const OpId made = made_by(id); made != kNone) ++waiting[i], entries.emplace_back(made, i);
    if (waiting[i] == 0) ready.push(i);
  }
  const Lists after(n, entries);
  while (!ready.empty()) {
    const OpId i = ready.top();
    ready.pop();
    order.push_back(i);
    for (const OpId j : after[i])
      if (--waiting[j] == 0) ready.push(j);
  }
  WHALE_CHECK(order.size() == staying.size(), "a rewrite made a cycle");
  return order;
}

}  // namespace

void take_in_order(Graph& graph, const std::vector<OpId>& order) {
  if (std::is_sorted(order.begin(), order.end())) {  // only some are dropped
    for (size_t i = 0; i < order.size(); ++i)
      if (order[i] != static_cast<OpId>(i)) graph.ops[i] = std::move(graph.op(order[i]));
    graph.ops.resize(order.size());
    return;
  }
  std::vector<Op> ops;
  ops.reserve(order.size());
  for (const OpId i : order) ops.push_back(std::move(graph.op(i)));
  graph.ops = std::move(ops);
}

void compact(Graph& graph, const std::vector<char>& removed) {
  const size_t n = graph.ops.size();
  const std::vector<OpId> order = runnable_order(graph, removed);
  std::vector<OpId> number(n, kNone);
  for (size_t i = 0; i < order.size(); ++i) number[order[i]] = static_cast<OpId>(i);
  take_in_order(graph, order);
  for (Tensor& t : graph.tensors) t.producer = kNone;  // what only a removed op made has none
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    Op& op = graph.ops[i];
    if (op.origin != kNone) op.origin = static_cast<size_t>(op.origin) < n ? number[op.origin] : kNone;
    for (size_t k = 0; k < op.outputs.size(); ++k) {
      if (op.outputs[k] == kNone) continue;
      Tensor& t = graph.tensor(op.outputs[k]);
      t.producer = static_cast<OpId>(i);
      t.output = static_cast<int>(k);
    }
  }
}

TensorId variable_behind(const Graph& g, TensorId id) {
  while (g.tensor(id).producer != kNone) {
    const Op& op = g.op(g.tensor(id).producer);
    if (op.code != OpCode::k_cast) return kNone;
    id = op.inputs[0];
  }
  return g.tensor(id).kind == TensorKind::kVariable ? id : kNone;
}

void without_index_check(Op& op) {
  if (const auto limit = op.attrs.find(kIndexLimit); limit != op.attrs.end()) limit->second = int64_t{0};
}

}  // namespace whale
