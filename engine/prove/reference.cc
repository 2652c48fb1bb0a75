#include "prove/reference.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>

#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale::proof {
namespace {

using Rewrite = std::function<TensorIds(Graph&, const Op&)>;

// Replaces what `form` has a form for, until nothing is left of it.
void rewrite(Graph& graph, const Rewrite& form) {
  for (bool again = true; again;) {
    again = false;
    Rewriter r(graph);
    for (size_t i = 0; i < r.old.size(); ++i) {
      Op op = r.old[i];
      for (TensorId& id : op.inputs) id = r.now(id);
      const TensorIds results = form(graph, op);
      if (results.empty()) {
        r.keep(i);
        continue;
      }
      again = true;
      for (size_t k = 0; k < results.size() && k < op.outputs.size(); ++k)
        if (op.outputs[k] != kNone) {
          if (results[k] != kNone) graph.tensor(results[k]).name = graph.tensor(op.outputs[k]).name;
          r.replace(op.outputs[k], results[k]);
        }
    }
    r.finish();
  }
}

// Instructions are named after ops, with a suffix where there are several ('@1': of an unlike replica).
void add_names(Form::Names& names, const std::string& instruction) {
  names.insert(instruction);
  for (size_t k = 1; k < instruction.size(); ++k)
    if (instruction[k] == '.' || instruction[k] == '#' || instruction[k] == '@') names.insert(instruction.substr(0, k));
}

// Products that one op alone reads.
Form::Names read_once(const Graph& g) {
  std::vector<int> readers(g.tensors.size());
  for (const Op& op : g.ops)
    for (const TensorId id : op.inputs)
      if (id != kNone) ++readers[static_cast<size_t>(id)];
  for (const NamedTensor& o : g.outputs) readers[static_cast<size_t>(o.tensor)] += 2;
  Form::Names out;
  for (const Op& op : g.ops)
    if (has_flag(op.code, kProduct) && readers[static_cast<size_t>(op.outputs[0])] == 1) out.insert(op.name);
  return out;
}

// The sum of a product and a bias as a product with a bias: rounded once, and another op than the product alone. Where
// precision has no say, smaller_form undoes it; then what the plan does not run is as what it was merged with.
TensorIds with_bias(Graph& graph, const Op& sum, const Form& form, const Form::Names& once) {
  if (sum.code != OpCode::k_add) return {};
  for (const size_t at : {size_t{0}, size_t{1}}) {
    const TensorId y = sum.inputs[at], bias = sum.inputs[1 - at];
    const OpId maker = graph.tensor(y).producer;
    if (maker == kNone || graph.tensor(bias).dims.size() != 1) continue;
    const Op product = graph.op(maker);
    const bool has_bias = product.inputs.size() > 2 && product.inputs[2] != kNone;
    bool wanted = form.biased.contains(product.name);
    if (!is_half(graph.training.precision))
      wanted = (wanted || !form.products.contains(product.name)) && once.contains(product.name) &&
               graph.scope_path(product.scope) == graph.scope_path(sum.scope);
    if (!has_flag(product.code, kProduct) || has_bias || !wanted) continue;
    if (graph.tensor(bias).dims[0] != graph.tensor(y).dims.back()) continue;
    const OpId made = append_op(graph, product.code, {product.inputs[0], product.inputs[1], bias}, product.attrs,
                                product.scope, product.name);
    return graph.op(made).outputs;
  }
  return {};
}

// Reading the same roots, they compute the same. A view changes what most ops do, but not what one does of each
// element.
bool same_op(const Graph& g, const Op& a, const Op& b) {
  if (a.key != b.key || !(a.attrs == b.attrs)) return false;
  if (of_each_element(a)) return true;
  for (size_t i = 0; i < a.inputs.size(); ++i)
    if (a.inputs[i] != kNone && g.tensor(a.inputs[i]).dims != g.tensor(b.inputs[i]).dims) return false;
  return true;
}

// Products of a scope that are equal by form and that the plan runs each: something told them apart when its passes
// merged such ops (a bias within one of them), so they go on as two, with gradients of their own.
void keep_apart(Graph& g, const Form::Names& run) {
  std::vector<TensorId> now(g.tensors.size());
  std::iota(now.begin(), now.end(), TensorId{0});
  std::map<std::tuple<OpCode, ScopeId, TensorIds>, std::vector<OpId>> seen;
  std::map<OpId, std::string> taken;  // of equal ones, one that the plan runs
  std::vector<char> read(g.tensors.size());
  for (const Op& op : g.ops)
    for (const TensorId id : op.inputs)
      if (id != kNone) read[static_cast<size_t>(id)] = 1;
  for (const NamedTensor& o : g.outputs) read[static_cast<size_t>(o.tensor)] = 1;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    Op& op = g.ops[i];
    if (has_flag(op.code, kProduct) && !read[static_cast<size_t>(op.outputs[0])]) continue;  // it has a bias elsewhere
    TensorIds reads = op.inputs;
    for (TensorId& id : reads) id = id == kNone ? kNone : now[static_cast<size_t>(id)];
    std::vector<OpId>& alike = seen[{op.code, op.scope, reads}];
    const auto twin = std::ranges::find_if(alike, [&](OpId other) { return same_op(g, g.op(other), op); });
    const OpId first = twin == alike.end() ? static_cast<OpId>(i) : *twin;
    if (twin == alike.end()) alike.push_back(first);
    const bool apart = has_flag(op.code, kProduct) && run.contains(op.name) &&
                       taken.try_emplace(first, op.name).first->second != op.name;
    if (apart) {
      g.scopes.push_back(g.scopes[static_cast<size_t>(op.scope)]);
      op.scope = static_cast<ScopeId>(g.scopes.size() - 1);
      continue;
    }
    const TensorIds& merged = g.op(first).outputs;
    for (size_t k = 0; k < op.outputs.size(); ++k)
      if (op.outputs[k] != kNone && merged[k] != kNone) now[static_cast<size_t>(op.outputs[k])] = merged[k];
  }
}

bool trains_in(const Entry& entry) { return entry.name == "train"; }

// The passes of engine/grad, in the order that its README gives.
Graph one_device_graph(const Plan& plan, const Entry& entry, const Form& form) {
  Graph g = plan.source;
  int64_t batch = 0;
  for (const TensorId id : g.inputs)
    if (const Tensor& t = g.tensor(id); t.batch_dim >= 0) batch = t.dims[static_cast<size_t>(t.batch_dim)];
  const bool train = trains_in(entry);
  if (!train) g = for_inference(std::move(g));
  if (entry.batch > 0 && batch > 0 && entry.batch != batch) g = rebatch(g, entry.batch);
  canonicalise(g);
  if (!form.unpacked.empty())
    rewrite(g, [&](Graph& graph, const Op& op) {
      const OpDef& d = def(op.code);
      const bool wanted = d.unpack && form.unpacked.contains(op.name);
      return wanted ? d.unpack(graph, op) : TensorIds{};
    });
  if (!form.products.empty()) {
    const Form::Names once = read_once(g);
    rewrite(g, [&](Graph& graph, const Op& op) { return with_bias(graph, op, form, once); });
  }
  apply_precision(g);
  keep_apart(g, form.products);
  clean(g);
  if (train) differentiate(g);
  split_weights(g);
  if (train) add_updates(g), clean(g);
  rewrite(g, smaller_form);
  return g;
}

}  // namespace

bool of_each_element(const Op& op) {
  return has_flag(op.code, kElementwise) && !has_flag(op.code, kRandom) && op.inputs.size() == 1;
}

TensorIds smaller_form(Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  return d.decompose ? d.decompose(graph, op) : TensorIds{};
}

size_t Reference::Hash::operator()(const Reads& reads) const {
  size_t h = static_cast<size_t>(reads.code);
  for (const TensorId id : reads.roots) h = (h ^ static_cast<size_t>(id + 1)) * 0x9e3779b97f4a7c15 ^ h >> 29;
  return h;
}

Form form_of(const Entry& entry) {
  Form form;
  for (const Program& p : entry.programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        if (const auto* k = i.kernel(); k != nullptr) {
          if (def(k->op).unpack && i.in.size() > 1 && i.in[1] != kNone) add_names(form.unpacked, i.name);
          if (has_flag(k->op, kProduct)) add_names(form.products, i.name);
          if (has_flag(k->op, kProduct) && i.in.size() > 2 && i.in[2] != kNone) add_names(form.biased, i.name);
        }
  return form;
}

Reference::Reference(const Plan& plan, const Entry& entry, const Form& form) : g_(one_device_graph(plan, entry, form)) {
  index();
}

void Reference::index() {
  root_.resize(g_.tensors.size());
  for (size_t t = 0; t < g_.tensors.size(); ++t) {
    root_[t] = static_cast<TensorId>(t);
    if (g_.tensors[t].kind == TensorKind::kInput) inputs_.emplace(g_.tensors[t].name, static_cast<TensorId>(t));
  }
  for (const Variable& v : g_.variables) {
    variables_.emplace(g_.tensor(v.tensor).name, v.tensor);
    if (v.next != kNone) next_.emplace(v.tensor, v.next);
  }
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const Op& op = g_.ops[i];
    Reads reads{op.code, op.inputs};
    for (TensorId& id : reads.roots) id = root(id);
    if (has_flag(op.code, kView)) {
      root_[static_cast<size_t>(op.outputs[0])] = reads.roots[0];
      continue;
    }
    if (op.code == OpCode::k_fill) {
      const Tensor& t = g_.tensor(op.outputs[0]);
      const auto [at, added] = constants_.try_emplace({t.dtype, attr_float(op.attrs, "value")}, op.outputs[0]);
      root_[static_cast<size_t>(op.outputs[0])] = at->second;
      if (added) values_.emplace(at->second, at->first.second);
      continue;
    }
    std::vector<OpId>& alike = reads_[reads];
    const auto twin =
        std::find_if(alike.begin(), alike.end(), [&](OpId other) { return same_op(g_, g_.op(other), op); });
    if (twin == alike.end()) {
      alike.push_back(static_cast<OpId>(i));
      of_code_[op.code].push_back(static_cast<OpId>(i));
      continue;
    }
    for (size_t k = 0; k < op.outputs.size(); ++k)
      root_[static_cast<size_t>(op.outputs[k])] = root(g_.op(*twin).outputs[k]);
  }
  find_gradients();
}

// What updates read besides variables, and what that is a sum or a scaled form of.
void Reference::find_gradients() {
  std::vector<TensorId> left;
  for (const NamedTensor& g : g_.gradients) left.push_back(root(g.tensor));
  const auto made_by = [&](TensorId id) { return id == kNone ? kNone : g_.tensor(id).producer; };
  for (const Op& op : g_.ops)
    if (has_flag(op.code, kUpdateOp))
      for (const TensorId id : op.inputs)
        if (made_by(id) != kNone && !g_.tensor(id).dims.empty()) left.push_back(root(id));
  // What the loss is made of is no gradient, whatever it is scaled by.
  std::unordered_set<TensorId> before_loss;
  std::vector<TensorId> open{root(g_.training.loss)};
  while (!open.empty()) {
    const TensorId id = open.back();
    open.pop_back();
    if (id == kNone || !before_loss.insert(id).second || made_by(id) == kNone) continue;
    for (const TensorId from : g_.op(made_by(id)).inputs) open.push_back(root(from));
  }
  while (!left.empty()) {
    const TensorId id = left.back();
    left.pop_back();
    if (made_by(id) == kNone || before_loss.contains(id) || !of_gradients_.insert(id).second) continue;
    const Op& op = g_.op(made_by(id));
    const bool by_numbers = std::all_of(op.inputs.begin() + 1, op.inputs.end(), [&](TensorId other) {
      return other == kNone || g_.tensor(other).dims.empty();
    });
    const bool scales = op.code == OpCode::k_cast || (op.inputs.size() > 1 && by_numbers);
    if (op.code != OpCode::k_add && !scales) continue;
    for (const TensorId from : op.inputs)
      if (from != kNone && g_.tensor(from).dims == g_.tensor(id).dims) left.push_back(root(from));
  }
}

bool Reference::is_of_batch(OpId op, int32_t factor) {
  if (!batch_found_) find_batch(), batch_found_ = true;
  return of_batch_.contains({op, factor});
}

// From the inputs on: a factor that a dimension of samples has, and the dimensions that it goes to.
void Reference::find_batch() {
  std::set<std::pair<TensorId, int>> carry;  // tensors and dimensions
  for (size_t t = 0; t < g_.tensors.size(); ++t)
    if (g_.tensors[t].kind == TensorKind::kInput && g_.tensors[t].batch_dim >= 0)
      carry.insert({static_cast<TensorId>(t), g_.tensors[t].batch_dim});
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const Op& op = g_.ops[i];
    const std::vector<Factor>& list = factors(op).list;
    for (size_t f = 0; f < list.size(); ++f) {
      bool has = false;
      for (size_t k = 0; k < op.inputs.size() && k < list[f].inputs.size(); ++k)
        has = has || (op.inputs[k] != kNone && list[f].inputs[k].present() &&
                      carry.contains({op.inputs[k], list[f].inputs[k].dim}));
      if (!has) continue;
      of_batch_.insert({static_cast<OpId>(i), static_cast<int32_t>(f)});
      for (size_t k = 0; k < op.outputs.size() && k < list[f].outputs.size(); ++k)
        if (list[f].outputs[k].present()) carry.insert({op.outputs[k], list[f].outputs[k].dim});
    }
  }
}

const std::vector<OpId>* Reference::find(OpCode code, const TensorIds& roots) const {
  const auto at = reads_.find(Reads{code, roots});
  return at == reads_.end() ? nullptr : &at->second;
}

const std::vector<OpId>& Reference::ops_of(OpCode code) const {
  static const std::vector<OpId> kNothing;
  const auto at = of_code_.find(code);
  return at == of_code_.end() ? kNothing : at->second;
}

TensorId Reference::constant(DType dtype, double value) {
  const auto [at, added] = constants_.try_emplace({dtype, value}, static_cast<TensorId>(g_.tensors.size()));
  if (added) {
    g_.tensors.push_back({.name = std::to_string(value), .dtype = dtype, .dims = {}});
    root_.push_back(at->second);
    values_.emplace(at->second, value);
  }
  return at->second;
}

const double* Reference::constant(TensorId root) const {
  const auto at = values_.find(root);
  return at == values_.end() ? nullptr : &at->second;
}

TensorId Reference::input(const std::string& name) const {
  const auto at = inputs_.find(name);
  return at == inputs_.end() ? kNone : at->second;
}
TensorId Reference::variable(const std::string& name) const {
  const auto at = variables_.find(name);
  return at == variables_.end() ? kNone : at->second;
}

TensorId Reference::step(StepScalar scalar) const {
  constexpr const char* kNames[] = {"learning_rate", "updates", "loss_scale"};
  const char* name = kNames[static_cast<size_t>(scalar)];
  for (size_t t = 0; t < g_.tensors.size(); ++t)
    if (g_.tensors[t].kind == TensorKind::kStep && g_.tensors[t].name == name) return static_cast<TensorId>(t);
  return kNone;
}

TensorId Reference::after_step(TensorId variable) const {
  const auto at = next_.find(variable);
  return root(at == next_.end() ? variable : at->second);
}

TensorId Reference::output(const std::string& name) const {
  if (name == "loss" && g_.training.loss != kNone) return g_.training.loss;
  const bool gradient = name.starts_with("grad:");
  for (const NamedTensor& t : gradient ? g_.gradients : g_.outputs)
    if (t.name == (gradient ? name.substr(5) : name)) return t.tensor;
  return kNone;
}

std::string Reference::name(TensorId id) const {
  if (id == kNone) return "nothing";
  const Tensor& t = g_.tensor(id);
  for (const NamedTensor& g : g_.gradients)
    if (root(g.tensor) == root(id)) return fmt::format("{} (the gradient of {})", t.name, g.name);
  return t.name;
}

}  // namespace whale::proof
