#include "prove/program.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
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

// Which sums of a product and a bias are one product with a bias: rounded once, and another op than the product alone.
// Where precision has no say, smaller_form undoes it, and it matters for which products are equal to which alone.
class Biases {
 public:
  Biases(const Graph& g, const Form& form) : form_(form), half_(is_half(g.training.precision)) {
    std::vector<int> readers(g.tensors.size());
    for (const Op& op : g.ops)
      for (const TensorId id : op.inputs)
        if (id != kNone) ++readers[static_cast<size_t>(id)];
    for (const NamedTensor& o : g.outputs) readers[static_cast<size_t>(o.tensor)] += 2;
    for (const Op& op : g.ops)
      if (has_flag(op.code, kProduct) && readers[static_cast<size_t>(op.outputs[0])] == 1) read_once_.insert(op.name);
    for (const Op& op : g.ops)
      if (const auto sum = sum_of(g, op); sum && runs(g, *sum)) run_.insert(layer(g, *sum));
  }

  TensorIds form(Graph& g, const Op& op) const {
    const auto sum = sum_of(g, op);
    if (!sum || !wanted(g, *sum)) return {};
    const Op product = *sum->product;
    const OpId made = append_op(g, product.code, {product.inputs[0], product.inputs[1], sum->bias}, product.attrs,
                                product.scope, product.name);
    return g.op(made).outputs;
  }

 private:
  struct Sum {
    const Op* product = nullptr;
    TensorId bias = kNone;
    ScopeId scope = 0;
  };
  using Layer = std::tuple<std::string, TensorId, TensorId>;  // scope, weight, bias

  static std::optional<Sum> sum_of(const Graph& g, const Op& op) {
    if (op.code != OpCode::k_add) return {};
    for (const size_t at : {size_t{0}, size_t{1}}) {
      const TensorId y = op.inputs[at], bias = op.inputs[1 - at];
      const OpId maker = g.tensor(y).producer;
      if (maker == kNone || g.tensor(bias).dims.size() != 1) continue;
      const Op& product = g.op(maker);
      const bool has_bias = product.inputs.size() > 2 && product.inputs[2] != kNone;
      if (!has_flag(product.code, kProduct) || has_bias || g.tensor(bias).dims[0] != g.tensor(y).dims.back()) continue;
      return Sum{&product, bias, op.scope};
    }
    return {};
  }
  static Layer layer(const Graph& g, const Sum& sum) {
    return {g.scope_path(sum.product->scope), sum.product->inputs[1], sum.bias};
  }
  bool is_alone(const Graph& g, const Sum& sum) const {
    return read_once_.contains(sum.product->name) && g.scope_path(sum.product->scope) == g.scope_path(sum.scope);
  }
  bool runs(const Graph& g, const Sum& sum) const {
    return form_.biased.contains(sum.product->name) && (half_ || is_alone(g, sum));
  }
  // What the plan does not run was merged with what it runs of the same layer.
  bool wanted(const Graph& g, const Sum& sum) const {
    return runs(g, sum) ||
           (!half_ && !form_.products.contains(sum.product->name) && is_alone(g, sum) && run_.contains(layer(g, sum)));
  }

  const Form& form_;
  bool half_;
  Form::Names read_once_;  // products
  std::set<Layer> run_;
};

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

bool is_active(const Attrs& attrs) {
  const std::string& activation = attr_string(attrs, "activation");
  return !activation.empty() && activation != "none";
}

// Is there a product whose result is rounded before its bias or its activation, where one device would round behind?
// `folds`: ones that the program has as ops of their own too.
bool rounds_apart(const Graph& g, const Form& form, bool folds) {
  std::vector<int> readers(g.tensors.size());
  for (const Op& op : g.ops)
    for (const TensorId id : op.inputs)
      if (id != kNone) ++readers[static_cast<size_t>(id)];
  for (const NamedTensor& o : g.outputs) ++readers[static_cast<size_t>(o.tensor)];
  const auto made_alone = [&](TensorId id, ScopeId scope) -> const Op* {
    const OpId maker = id == kNone ? kNone : g.tensor(id).producer;
    if (maker == kNone || readers[static_cast<size_t>(id)] != 1 || !has_flag(g.op(maker).code, kProduct))
      return nullptr;
    return g.scope_path(g.op(maker).scope) == g.scope_path(scope) ? &g.op(maker) : nullptr;
  };
  return std::ranges::any_of(g.ops, [&](const Op& op) {
    const DType type = g.tensor(op.outputs[0]).dtype;
    if (type != DType::kBF16 && type != DType::kF16) return false;
    if (has_flag(op.code, kProduct)) {
      const bool biased = op.inputs.size() > 2 && op.inputs[2] != kNone;
      return (biased && !form.biased.contains(op.name)) || (is_active(op.attrs) && !form.active.contains(op.name));
    }
    if (!folds) return false;
    if (op.code == OpCode::k_add)
      for (const size_t at : {size_t{0}, size_t{1}})
        if (const Op* product = made_alone(op.inputs[at], op.scope))
          return g.tensor(op.inputs[1 - at]).dims.size() == 1 && !form.biased.contains(product->name);
    if (const Op* product = def(op.code).as_activation ? made_alone(op.inputs[0], op.scope) : nullptr)
      return !form.active.contains(product->name);
    return false;
  });
}

bool trains_in(const Entry& entry) { return entry.name == "train"; }

}  // namespace

bool same_op(const Graph& g, const Op& a, const Op& b) {
  if (a.key != b.key || !(a.attrs == b.attrs)) return false;
  if (of_each_element(a)) return true;
  for (size_t i = 0; i < a.inputs.size(); ++i)
    if (a.inputs[i] != kNone && g.tensor(a.inputs[i]).dims != g.tensor(b.inputs[i]).dims) return false;
  return true;
}

bool of_each_element(const Op& op) {
  return has_flag(op.code, kElementwise) && !has_flag(op.code, kRandom) && op.inputs.size() == 1;
}

TensorIds smaller_form(Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  return d.decompose ? d.decompose(graph, op) : TensorIds{};
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
          if (has_flag(k->op, kProduct) && is_active(k->attrs)) add_names(form.active, i.name);
        }
  return form;
}

OneDevice one_device_graph(const Plan& plan, const Entry& entry, const Form& form) {
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
    const Biases biases(g, form);
    rewrite(g, [&](Graph& graph, const Op& op) { return biases.form(graph, op); });
  }
  apply_precision(g);
  keep_apart(g, form.products);
  clean(g);
  if (train) differentiate(g);
  split_weights(g);
  if (train) add_updates(g), clean(g);
  const bool apart = is_half(g.training.precision) && rounds_apart(g, form, plan.options.fusion);
  rewrite(g, smaller_form);
  return {std::move(g), apart};
}

}  // namespace whale::proof
