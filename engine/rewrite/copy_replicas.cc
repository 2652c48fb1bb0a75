#include "rewrite/copy_replicas.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.h"
#include "cluster/shares.h"
#include "grad/rewrite.h"
#include "shard/samples_of_copies.h"
#include "task/unlike.h"

namespace whale {
namespace {

// The replicas that get samples of some micro-batch, or of the whole batch, which denominators are made of.
std::vector<size_t> active(const Graph& graph, const TaskGraphs& tasks) {
  int64_t batch = 0;
  for (const TensorId id : graph.inputs)
    if (const Tensor& t = graph.tensor(id); t.batch_dim >= 0) batch = t.dims[t.batch_dim];
  // A single sample is cut by nobody.
  const int64_t micro_batches = batch > 1 ? std::max<int64_t>(1, graph.training.accumulation) : 1;
  std::vector<char> has(tasks.replicas.size());
  for (const int64_t size : {batch / micro_batches, (batch + micro_batches - 1) / micro_batches, batch}) {
    const Ints parts = round_shares(size, tasks.meshes[0].axes[0].shares);
    for (size_t r = 0; r < has.size(); ++r) has[r] |= parts[r] > 0;
  }
  std::vector<size_t> out;
  for (size_t r = 0; r < has.size(); ++r)
    if (has[r]) out.push_back(r);
  if (out.empty()) out.push_back(0);  // nothing has samples
  if (batch == 1) out = {out.back()};
  return out;
}

class Copier {
 public:
  Copier(Graph& graph, const TaskGraphs& tasks, std::vector<size_t> replicas)
      : g_(graph), tasks_(tasks), replicas_(std::move(replicas)), factors_(graph) {}

  void run() {
    if (replicas_.size() == 1) {
      for (Op& op : g_.ops) op.scope = scope(op, 0);
      return;
    }
    const std::vector<OpCut> samples = follow_samples(g_, factors_);
    value_.resize(g_.tensors.size());
    for (const TensorId id : g_.inputs) at(id).samples = at(id).fed = g_.tensor(id).batch_dim >= 0;
    for (const Variable& v : g_.variables) at(v.tensor).learned = v.trainable;
    std::vector<const Factor*> factor;
    for (size_t i = 0; i < g_.ops.size(); ++i)
      factor.push_back(samples[i].present() ? &factors_.of(g_.ops[i]).list[samples[i].factor] : nullptr);
    // The table of factors asks for the ops where they are: they go at the end.
    const size_t ops = g_.ops.size();
    for (size_t i = 0; i < ops; ++i) {
      first_.push_back(std::ssize(made_));
      place(g_.ops[i], factor[i]);
    }
    for (Op& op : made_)  // the same copy of it, or the one for all
      if (op.origin != kNone) {
        const auto from = static_cast<size_t>(op.origin);
        const auto copies = (from + 1 < ops ? first_[from + 1] : std::ssize(made_)) - first_[from];
        op.origin = static_cast<OpId>(first_[from] + (copies >= std::ssize(replicas_) ? home() : 0));
      }
    g_.ops = std::move(made_);
    for (size_t i = 0; i < g_.ops.size(); ++i)
      for (size_t k = 0; k < g_.ops[i].outputs.size(); ++k)
        if (const TensorId id = g_.ops[i].outputs[k]; id != kNone)
          g_.tensor(id).producer = static_cast<OpId>(i), g_.tensor(id).output = static_cast<int>(k);
    if (g_.training.loss != kNone) g_.training.loss = whole(g_.training.loss);
    for (Variable& v : g_.variables)
      if (v.next != kNone) v.next = whole(v.next);
    std::vector<NamedTensor> outputs;
    for (const NamedTensor& o : g_.outputs) {
      if (at(o.tensor).each.empty() || !at(o.tensor).samples) {
        outputs.push_back({o.name, whole(o.tensor)});
        continue;
      }
      for (size_t k = 0; k < replicas_.size(); ++k)
        outputs.push_back({k ? fmt::format("{}{}{}", o.name, kCopyMark, k) : o.name, at(o.tensor).each[k]});
    }
    g_.outputs = std::move(outputs);
  }

 private:
  // What a tensor of the program is now. Neither each nor whole: itself, in all copies.
  struct Value {
    TensorIds each;  // per copy
    TensorId whole = kNone;
    bool samples = false;  // each copy has its own of them
    bool learned = false;  // it depends on parameters that are trained,
    bool fed = false;      // on samples
  };
  Value& at(TensorId id) { return value_[id]; }
  size_t home() const { return replicas_.size() - 1; }  // what is one for all is in the last stages: nobody waits there
  TensorId whole(TensorId id) {
    const Value& v = at(id);
    return v.whole != kNone ? v.whole : v.each.empty() ? id : v.each[home()];
  }
  TensorId in_copy(TensorId id, size_t copy) {
    if (id == kNone) return kNone;
    const Value& v = at(id);
    return v.whole != kNone ? v.whole : v.each.empty() ? id : v.each[copy];
  }
  ScopeId scope(const Op& op, size_t copy) const {
    const std::vector<ScopeId>& of = tasks_.replicas[replicas_[copy]].scope;
    const auto s = static_cast<size_t>(op.scope);
    WHALE_CHECK(s < of.size() && of[s] != kNone, "an op that is copied is in a scope of every replica");
    return of[s];
  }

  template <class... A>
  [[noreturn]] void refuse(const Op& op, fmt::format_string<A...> what, A&&... args) const {
    throw unimplemented(
        "{}op '{}' ({}) {}: unlike replicas each compute their own samples; give replicas that are "
        "alike",
        op.location.empty() ? "" : op.location + ": ", op.name, def(op.code).name,
        fmt::format(what, std::forward<A>(args)...))
        .at_op(op.name)
        .at_scope(g_.scope_path(op.scope));
  }

  void place(const Op& op, const Factor* f) {
    bool reads_samples = false, reads_whole = false, learned = false, fed = false;
    for (const TensorId id : op.inputs) {
      if (id == kNone) continue;
      const Value& v = at(id);
      reads_whole |= v.whole != kNone, reads_samples |= v.samples, learned |= v.learned, fed |= v.fed;
    }
    for (size_t k = 0; k < op.inputs.size(); ++k) {
      const TensorId id = op.inputs[k];
      if (id == kNone) continue;
      const bool has_rows = f && k < f->inputs.size() && f->inputs[k].present();
      if (at(id).samples && !has_rows) refuse(op, "mixes the samples of '{}' with each other", g_.tensor(id).name);
      if (at(id).learned && !at(id).samples && has_rows && trains_)
        refuse(op, "pairs samples with rows of '{}', a parameter or made of some, whose gradients are parts then",
               g_.tensor(id).name);
    }
    if (f && f->group.rows && reads_samples && g_.training.accumulation > 1)
      refuse(op, "has groups of samples, which {} micro-batches take one by one", g_.training.accumulation);
    for (const TensorId id : op.outputs)
      if (id != kNone) at(id).learned = learned, at(id).fed = fed;
    // What is made of parameters is sent as they are: one gradient goes back through it. But what has their values as
    // they are is each copy's own, so that gradients are added as the parameters' own.
    const bool as_it_is = op.code == OpCode::k_cast || has_flag(op.code, kView);
    if (!f && learned && !fed && (reads_whole || !as_it_is)) return once(op, 0);
    if (!f && reads_whole) return once(op, home());
    const TensorIds first = op.outputs;
    for (size_t c = 0; c < replicas_.size(); ++c) copy(op, c);
    for (size_t o = 0; f && o < first.size(); ++o) {
      if (first[o] == kNone) continue;
      at(first[o]).samples = o < f->outputs.size() && f->outputs[o].present();
      if (!at(first[o]).samples) add(op, *f, o);
    }
  }

  void once(Op op, size_t where) {
    for (TensorId& id : op.inputs) id = in_copy(id, where);
    op.scope = scope(op, where);
    for (const TensorId id : op.outputs)
      if (id != kNone) at(id).whole = id;
    made_.push_back(std::move(op));
  }

  void copy(const Op& from, size_t c) {
    Op op = from;
    for (TensorId& id : op.inputs) id = in_copy(id, c);
    op.scope = scope(from, c);
    if (c > 0) op.name += fmt::format("@{}", c);
    for (TensorId& id : op.outputs) {
      if (id == kNone) continue;
      const TensorId own = c == 0 ? id : like(id, fmt::format("@{}", c));
      at(id).each.push_back(own);
      id = own;
    }
    made_.push_back(std::move(op));
  }

  // What the copies made of their samples, together.
  void add(const Op& op, const Factor& f, size_t o) {
    const TensorId id = op.outputs[o];
    if (o >= f.partial.size() || !f.partial[o] || f.combine_of(o) != Combine::kSum)
      refuse(op, "takes the {} of the samples of all", name_of(f.combine_of(o)));
    const TensorIds parts = at(id).each;
    TensorId sum = parts[0];
    for (size_t c = 1; c < parts.size(); ++c) {
      Op plus;
      plus.code = OpCode::k_add;
      plus.name = fmt::format("{}.with{}", op.name, c);
      plus.inputs = {sum, parts[c]};
      plus.outputs = {sum = like(id, fmt::format(".with{}", c))};
      plus.scope = scope(op, home());
      plus.phase = op.phase, plus.region = op.region, plus.location = op.location;
      made_.push_back(std::move(plus));
    }
    at(id).whole = sum;
  }

  TensorId like(TensorId id, const std::string& suffix) {
    Tensor t = g_.tensor(id);
    t.name += suffix;
    t.producer = kNone;
    g_.tensors.push_back(std::move(t));
    value_.emplace_back();
    return static_cast<TensorId>(g_.tensors.size()) - 1;
  }

  Graph& g_;
  const TaskGraphs& tasks_;
  const std::vector<size_t> replicas_;
  const bool trains_ = g_.training.loss != kNone && g_.training.optimizer.kind != OptimizerKind::kNone;
  OpFactors factors_;
  std::vector<Value> value_;
  std::vector<Op> made_;
  std::vector<int64_t> first_;  // per op: where its copies begin in `made_`
};

}  // namespace

void copy_replicas(Graph& graph, const TaskGraphs& tasks) {
  if (!tasks.replicas.empty()) Copier(graph, tasks, active(graph, tasks)).run();
}

void check_copies(const Graph& graph, const TaskGraphs& tasks) {
  if (tasks.replicas.empty()) return;
  const auto replica = [&](const Op& op) { return replica_of(tasks, tasks.stage_of_scope[op.scope]); };
  OpFactors factors(graph);
  const std::vector<OpCut> samples = follow_samples_of_copies(graph, factors);
  constexpr size_t kNobody = SIZE_MAX;
  std::vector<size_t> own(graph.tensors.size(), kNobody);  // which replica's samples it is a sum over
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    if (op.phase != Phase::kBackward) continue;
    size_t from = kNobody;
    for (const TensorId id : op.inputs) {
      const size_t of = id == kNone ? kNobody : own[id];
      if (of == kNobody) continue;
      if (from != kNobody && from != of) {  // they are added
        from = kNobody;
        break;
      }
      from = of;
    }
    if (op.code == OpCode::k_add && from != kNobody)
      for (const TensorId id : op.inputs)
        if (own[id] != from) from = kNobody;
    if (samples[i].present() && from != kNobody) {
      const Op& forward = op.origin == kNone ? op : graph.op(op.origin);
      throw unimplemented(
          "{}op '{}' ({}): its gradient needs sums over the samples of all: unlike replicas each compute their own; "
          "give replicas that are alike",
          forward.location.empty() ? "" : forward.location + ": ", forward.name, def(forward.code).name)
          .at_op(forward.name)
          .at_scope(graph.scope_path(forward.scope));
    }
    const Factor* f = samples[i].present() ? &factors.of(op).list[samples[i].factor] : nullptr;
    for (size_t o = 0; o < op.outputs.size(); ++o) {
      if (op.outputs[o] == kNone) continue;
      const bool sums = f && !(o < f->outputs.size() && f->outputs[o].present());
      own[op.outputs[o]] = f ? (sums ? replica(op) : kNobody) : from;
    }
  }
}

void add_before_casts(Graph& graph, const TaskGraphs& tasks) {
  if (tasks.replicas.empty()) return;
  const std::vector<int> uses = use_counts(graph);
  Rewriter r(graph);
  std::vector<std::string> makers;  // of each op the forward op that it is of: "norm", "norm@1"
  for (const Op& op : r.old) makers.push_back(op.origin == kNone ? op.name : r.old[op.origin].name);
  struct Wide {
    TensorId tensor;
    std::string_view of;       // the last of the copies that it is made of
    std::optional<Op> behind;  // what is made of the rounded one before it is added: linear
  };
  std::map<TensorId, Wide> wide;  // of what is rounded, where nothing else reads that
  const auto copies = [](std::string_view a, std::string_view b) {
    return a != b && a.substr(0, a.find('@')) == b.substr(0, b.find('@'));
  };
  const auto alike = [](const std::optional<Op>& a, const std::optional<Op>& b) {
    return a.has_value() == b.has_value() && (!a || (a->code == b->code && a->attrs == b->attrs));
  };
  const auto is_linear = [&](const Op& op) {
    if (op.inputs.size() != 1 || !def(op.code).factors) return false;
    return std::ranges::count(def(op.code).factors(view_of(graph, op)).linear, std::vector<int>{0}) > 0;
  };
  for (size_t i = 0; i < r.old.size(); ++i) {
    const Op op = r.old[i];
    const TensorId out = op.outputs.empty() ? kNone : op.outputs[0];
    const bool alone = out != kNone && uses[out] == 1 && op.phase == Phase::kBackward;
    const auto of = wide.find(op.inputs.empty() ? kNone : op.inputs[0]);
    if (op.code == OpCode::k_cast && alone) {
      const DType from = graph.tensor(op.inputs[0]).dtype, to = graph.tensor(out).dtype;
      if (is_float(from) && is_float(to) && size_of(from) > size_of(to))
        wide[out] = {r.now(op.inputs[0]), makers[i], {}};
    } else if (alone && of != wide.end() && !of->second.behind && is_linear(op)) {
      wide[out] = {of->second.tensor, of->second.of, op};
    }
    const auto b = op.code == OpCode::k_add ? wide.find(op.inputs[1]) : wide.end();
    if (of == wide.end() || b == wide.end() || !copies(of->second.of, b->second.of) ||
        !alike(of->second.behind, b->second.behind) ||
        graph.tensor(of->second.tensor).dtype != graph.tensor(b->second.tensor).dtype) {
      r.keep(i);
      continue;
    }
    const std::string dtype(name_of(graph.tensor(out).dtype));
    const TensorId sum = r.emit(i, OpCode::k_add, {of->second.tensor, b->second.tensor});
    const Wide all{sum, b->second.of, b->second.behind};
    TensorId once = r.emit(i, OpCode::k_cast, {sum}, {{"dtype", dtype}});
    if (all.behind) once = r.emit(i, all.behind->code, {once}, all.behind->attrs);
    graph.tensor(once).name = graph.tensor(out).name;
    r.replace(out, once);
    r.moved(i, graph.tensor(once).producer);
    if (alone) wide[out] = all;
  }
  r.finish();
}

void part_casts(Graph& graph, const TaskGraphs& tasks) {
  if (tasks.replicas.empty()) return;
  const auto replica = [&](const Op& op) { return replica_of(tasks, tasks.stage_of_scope[op.scope]); };
  std::map<TensorId, std::map<size_t, ScopeId>> readers;  // of casts: of each other replica a scope
  for (const Op& op : graph.ops)
    for (const TensorId id : op.inputs) {
      const OpId made = id == kNone ? kNone : graph.tensor(id).producer;
      if (made == kNone || graph.op(made).code != OpCode::k_cast || replica(graph.op(made)) == replica(op)) continue;
      const TensorKind kind = graph.tensor(graph.op(made).inputs[0]).kind;
      if (kind == TensorKind::kVariable || kind == TensorKind::kInput) readers[id].try_emplace(replica(op), op.scope);
    }
  if (readers.empty()) return;
  std::map<std::pair<TensorId, size_t>, TensorId> own;
  Rewriter r(graph);
  for (size_t i = 0; i < r.old.size(); ++i) {
    Op& op = r.old[i];
    for (TensorId& id : op.inputs)
      if (const auto at = own.find({id, replica(op)}); at != own.end()) id = at->second;
    const Op cast = op;
    r.keep(i);
    const auto of = cast.outputs.empty() ? readers.end() : readers.find(cast.outputs[0]);
    if (of == readers.end()) continue;
    for (const auto& [where, scope] : of->second) {
      const OpId made =
          append_op(graph, cast.code, cast.inputs, cast.attrs, scope, fmt::format("{}@{}", cast.name, where));
      own[{cast.outputs[0], where}] = graph.op(made).outputs[0];
    }
  }
  r.finish();
}

}  // namespace whale
