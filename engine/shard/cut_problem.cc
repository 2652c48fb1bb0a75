#include "shard/cut_problem.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "base/error.h"
#include "shard/samples_of_copies.h"

namespace whale {
namespace {

int64_t samples_of(const Graph& graph) {
  int64_t batch = 0;
  for (const TensorId id : graph.inputs) {
    const Tensor& t = graph.tensor(id);
    if (t.batch_dim < 0) continue;
    const int64_t samples = t.dims[t.batch_dim];
    if (batch && samples != batch)
      throw invalid(
          "input '{}' has {} samples in dimension {}, another input has {}; all batch dimensions must be equal", t.name,
          samples, t.batch_dim, batch);
    batch = samples;
  }
  return batch;
}

// Which forward tensor a result of the backward pass is the gradient of, or a part of it: the operand of the forward op
// that has its shape, one that the backward op does not read before others. Per tensor; kNone: of none.
std::vector<TensorId> forward_tensors(const Graph& g) {
  std::vector<TensorId> out(g.tensors.size(), kNone);
  for (const Op& op : g.ops) {
    if (op.phase != Phase::kBackward || op.origin == kNone || static_cast<size_t>(op.origin) >= g.ops.size()) continue;
    for (const TensorId id : op.outputs) {
      if (id == kNone) continue;
      TensorId best = kNone;
      for (const TensorId x : g.op(op.origin).inputs) {
        if (x == kNone || g.tensor(x).dims != g.tensor(id).dims || !is_float(g.tensor(x).dtype)) continue;
        const bool read = std::find(op.inputs.begin(), op.inputs.end(), x) != op.inputs.end();
        if (best == kNone || !read) best = x;
        if (!read) break;
      }
      out[id] = best;
    }
  }
  return out;
}

std::vector<std::vector<OpId>> gradient_ops(const Graph& g) {
  std::vector<std::vector<OpId>> out(g.ops.size());
  for (size_t i = 0; i < g.ops.size(); ++i)
    if (const Op& op = g.ops[i];
        op.phase == Phase::kBackward && op.origin != kNone && static_cast<size_t>(op.origin) < g.ops.size())
      out[op.origin].push_back(static_cast<OpId>(i));
  return out;
}

std::vector<OpId> first_readers(const Graph& g) {
  std::vector<OpId> out(g.tensors.size(), kNone);
  for (size_t i = g.ops.size(); i-- > 0;)
    for (const TensorId id : g.ops[i].inputs)
      if (id != kNone) out[id] = static_cast<OpId>(i);
  return out;
}

std::vector<char> sums_of_unlike_samples(const CutProblem& p) {
  std::vector<char> out(p.graph.tensors.size(), 0);
  if (p.axes.tasks.replicas.empty()) return out;
  for (size_t t = 0; t < out.size(); ++t) {
    const OpId made = p.graph.tensors[t].producer;
    if (made == kNone || !p.has_samples(made)) continue;
    const int factor = p.samples[made].factor;
    const Factor& f = p.factors.of(p.graph.op(made)).list[factor];
    const auto o = static_cast<size_t>(p.graph.tensors[t].output);
    out[t] = o >= f.outputs.size() || !f.outputs[o].present();
  }
  return out;
}

std::vector<char> constants(const CutProblem& p) {
  const Graph& g = p.graph;
  std::vector<char> out(g.tensors.size(), 0);
  for (size_t t = 0; t < out.size(); ++t) out[t] = g.tensors[t].kind == TensorKind::kStep;
  for (const Op& op : g.ops) {
    const bool constant = std::ranges::all_of(op.inputs, [&](TensorId id) { return id == kNone || out[id] != 0; });
    for (const TensorId id : op.outputs)
      if (id != kNone) out[id] = constant && !p.sums_of_unlike[id];
  }
  return out;
}

}  // namespace

std::map<TensorId, TensorId> parameters_of_gradients(const Graph& g) {
  if (g.gradients.empty()) return {};
  std::unordered_map<std::string_view, TensorId> named;
  for (const Variable& v : g.variables)
    if (v.role == Role::kParameter) named.emplace(g.tensor(v.tensor).name, v.tensor);
  std::map<TensorId, TensorId> out;
  for (const NamedTensor& t : g.gradients) {
    const auto parameter = named.find(t.name);
    out[t.tensor] = parameter == named.end() ? kNone : parameter->second;
    const OpId made = g.tensor(t.tensor).producer;  // with the loss scale still in it
    if (made != kNone && has_flag(g.op(made).code, kPreparesUpdate)) out[g.op(made).inputs[0]] = out[t.tensor];
  }
  // One that is made in pieces of columns (cut_gradients) is a gradient in each of them.
  for (const auto& [id, parameter] : std::map<TensorId, TensorId>(out)) {
    const OpId made = g.tensor(id).producer;
    if (made == kNone || g.op(made).code != OpCode::k_concat || g.op(made).phase != Phase::kBackward) continue;
    const int64_t rank = std::ssize(g.tensor(id).dims);
    if (rank > 1 && attr_int(g.op(made).attrs, "axis") == rank - 1)
      for (const TensorId piece : g.op(made).inputs) {
        out[piece] = parameter;
        const OpId sum = g.tensor(piece).producer;  // of two terms, each of which is reduced as it arrives
        if (sum != kNone && g.op(sum).code == OpCode::k_add)
          for (const TensorId term : g.op(sum).inputs) out[term] = parameter;
      }
  }
  return out;
}

std::map<TensorId, TensorId> settled_gradients(const Graph& g, const std::map<TensorId, TensorId>& parameter_of,
                                               const ShardOptions& options) {
  std::map<TensorId, TensorId> out;
  for (const auto& [gradient, parameter] : parameter_of) {
    if (parameter == kNone) continue;
    out[gradient] = parameter;
    if (options.exact || options.gradient_dtype) continue;
    std::vector<TensorId> todo{gradient}, terms;
    std::set<int32_t> stages;
    while (!todo.empty()) {
      const TensorId id = todo.back();
      todo.pop_back();
      const OpId made = g.tensor(id).producer;
      if (made == kNone || g.op(made).phase != Phase::kBackward) continue;
      const Op& op = g.op(made);
      if (op.code == OpCode::k_add && g.tensor(op.inputs[0]).dims == g.tensor(op.inputs[1]).dims)
        todo.insert(todo.end(), op.inputs.begin(), op.inputs.end());
      else
        terms.push_back(id), stages.insert(op.stage);
    }
    if (stages.size() > 1)
      for (const TensorId id : terms) out[id] = parameter;
  }
  return out;
}

CutProblem::CutProblem(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options)
    : graph(graph),
      options(options),
      axes{tasks},
      factors(graph),
      batch(samples_of(graph)),
      micro_batches(batch > 1 ? options.micro_batches : 1),
      samples(tasks.replicas.empty() ? follow_samples(graph, factors) : follow_samples_of_copies(graph, factors)),
      gradients_of(gradient_ops(graph)),
      parameter_of(parameters_of_gradients(graph)),
      first_reader(first_readers(graph)),
      variable_of(graph.tensors.size(), kNone),
      forward_of(forward_tensors(graph)),
      sums_of_unlike(sums_of_unlike_samples(*this)) {
  axes.micro_batches = micro_batches;
  constant = constants(*this);
  if ((options.zero >= 2 || micro_batches > 1) && !options.adasum)
    settles = settled_gradients(graph, parameter_of, options);
  for (const Variable& v : graph.variables) {
    if (v.next != kNone && v.next != v.tensor) variable_of[v.next] = v.tensor;
    if (v.owner != kNone) states_of[v.owner].push_back(v.tensor);
  }
}

TensorId CutProblem::gradient_in(TensorId id) const {
  while (id != kNone && !parameter_of.contains(id)) {
    const OpId made = graph.tensor(id).producer;
    id = made != kNone && graph.op(made).code == OpCode::k_cast ? graph.op(made).inputs[0] : kNone;
  }
  return id;
}

}  // namespace whale
