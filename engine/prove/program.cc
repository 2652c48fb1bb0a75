#include "prove/program.h"

#include <algorithm>
#include <cmath>
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
      const auto before = std::ssize(graph.tensors);
      const TensorIds results = form(graph, op);
      if (results.empty()) {
        r.keep(i);
        continue;
      }
      again = true;
      for (size_t k = 0; k < results.size() && k < op.outputs.size(); ++k)
        if (op.outputs[k] != kNone) {
          if (results[k] >= before) graph.tensor(results[k]).name = graph.tensor(op.outputs[k]).name;
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

bool is_late(const Graph& g, const Form& form, const Op& op) {
  if (form.late != Form::Late::kInSplits) return form.late == Form::Late::kAll;
  for (ScopeId s = op.scope; s != kNone; s = g.scopes[s].parent)
    if (g.scopes[s].kind == ScopeKind::kSplit) return true;
  return false;
}

// Of values that the same ops of a scope make of the same, the first.
TensorIds equal_values(const Graph& g) {
  TensorIds now(g.tensors.size());
  std::iota(now.begin(), now.end(), TensorId{0});
  std::map<std::tuple<OpCode, std::string, TensorIds>, std::vector<const Op*>> seen;
  for (const Op& op : g.ops) {
    TensorIds reads = op.inputs;
    for (TensorId& id : reads) id = id == kNone ? kNone : now[id];
    std::vector<const Op*>& alike = seen[{op.code, g.scope_path(op.scope), reads}];
    const auto twin = std::ranges::find_if(alike, [&](const Op* other) { return same_op(g, *other, op); });
    if (twin == alike.end()) {
      alike.push_back(&op);
      continue;
    }
    for (size_t k = 0; k < op.outputs.size(); ++k)
      if (op.outputs[k] != kNone && (*twin)->outputs[k] != kNone) now[op.outputs[k]] = (*twin)->outputs[k];
  }
  return now;
}

// Products of a scope that read the same; what equal ops make is the same.
class Operands {
 public:
  using Key = std::tuple<std::string, TensorId, TensorId>;
  explicit Operands(const Graph& g) : g_(g), now_(equal_values(g)) {}
  Key of(const Op& product) const {
    return {g_.scope_path(product.scope), now_[product.inputs[0]], now_[product.inputs[1]]};
  }

 private:
  const Graph& g_;
  TensorIds now_;
};

// Which sums of a product and a bias are one product with a bias: rounded once, and another op than the product alone.
// Where precision has no say, smaller_form undoes it, and it matters for which products are equal to which alone. Some
// become one when gradients are there already, each of its own op's: in 16 bits those of two scopes, and products that
// the plan has merged with an equal one that has no bias.
class Biases {
 public:
  Biases(const Graph& g, const Form& form) : form_(form), half_(is_half(g.training.precision)) {
    std::vector<int> readers(g.tensors.size());
    for (const Op& op : g.ops)
      for (const TensorId id : op.inputs)
        if (id != kNone) ++readers[id];
    for (const NamedTensor& o : g.outputs) readers[o.tensor] += 2;
    for (const Op& op : g.ops)
      if (has_flag(op.code, kProduct) && readers[op.outputs[0]] == 1) read_once_.insert(op.name);
    for (const Op& op : g.ops)
      if (const auto sum = sum_of(g, op); sum && runs(g, *sum)) run_.insert(layer(g, *sum));
    Form::Names in_sums;
    for (const Op& op : g.ops)
      if (const auto sum = sum_of(g, op); sum && wanted(g, *sum)) in_sums.insert(sum->product->name);
    const Operands operands(g);
    std::set<Operands::Key> merged, run;  // products without a bias: none of an equal one is run, some is
    for (const Op& op : g.ops)
      if (has_flag(op.code, kProduct) && !in_sums.contains(op.name))
        (form.products.contains(op.name) ? run : merged).insert(operands.of(op));
    for (const Operands::Key& one : run) merged.erase(one);
    for (const Op& op : g.ops)
      if (const auto sum = sum_of(g, op); sum && wanted(g, *sum))
        if (merged.contains(operands.of(*sum->product)) ||
            (half_ && (is_late(g, form, *sum->product) || !are_of_one_scope(g, *sum))))
          late_.insert(op.name);
  }

  TensorIds form(Graph& g, const Op& op) const {
    const auto sum = sum_of(g, op);
    if (!sum || !wanted(g, *sum) || late_.contains(op.name)) return {};
    return one_of(g, *sum);
  }
  // With gradients there; the bias is read as it is.
  TensorIds late_form(Graph& g, const Op& op) const {
    auto sum = late_.contains(op.name) ? sum_of(g, op) : std::nullopt;
    const OpId cast = sum ? g.tensor(sum->bias).producer : kNone;
    if (cast == kNone || g.op(cast).code != OpCode::k_cast) return {};
    sum->bias = g.op(cast).inputs[0];
    return g.tensor(sum->bias).dtype == DType::kF32 ? one_of(g, *sum) : TensorIds{};
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
  static TensorIds one_of(Graph& g, const Sum& sum) {
    const Op product = *sum.product;
    const OpId made = append_op(g, product.code, {product.inputs[0], product.inputs[1], sum.bias}, product.attrs,
                                product.scope, product.name);
    return g.op(made).outputs;
  }
  static bool are_of_one_scope(const Graph& g, const Sum& sum) {
    return g.scope_path(sum.product->scope) == g.scope_path(sum.scope);
  }
  bool is_alone(const Graph& g, const Sum& sum) const {
    return read_once_.contains(sum.product->name) && are_of_one_scope(g, sum);
  }
  bool runs(const Graph& g, const Sum& sum) const {
    return form_.biased.contains(sum.product->name) && (half_ || is_alone(g, sum));
  }
  // What the plan does not run was merged with what it runs of the same layer.
  bool wanted(const Graph& g, const Sum& sum) const {
    return runs(g, sum) ||
           (!form_.products.contains(sum.product->name) && (half_ || is_alone(g, sum)) && run_.contains(layer(g, sum)));
  }

  const Form& form_;
  bool half_;
  Form::Names read_once_;  // products
  std::set<Layer> run_;
  Form::Names late_;  // sums
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
      if (id != kNone) read[id] = 1;
  for (const NamedTensor& o : g.outputs) read[o.tensor] = 1;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    Op& op = g.ops[i];
    if (has_flag(op.code, kProduct) && !read[op.outputs[0]]) continue;  // it has a bias elsewhere
    TensorIds reads = op.inputs;
    for (TensorId& id : reads) id = id == kNone ? kNone : now[id];
    std::vector<OpId>& alike = seen[{op.code, op.scope, reads}];
    const auto twin = std::ranges::find_if(alike, [&](OpId other) { return same_op(g, g.op(other), op); });
    const OpId first = twin == alike.end() ? static_cast<OpId>(i) : *twin;
    if (twin == alike.end()) alike.push_back(first);
    const bool apart = has_flag(op.code, kProduct) && run.contains(op.name) &&
                       taken.try_emplace(first, op.name).first->second != op.name;
    if (apart) {
      g.scopes.push_back(g.scopes[op.scope]);
      op.scope = static_cast<ScopeId>(g.scopes.size() - 1);
      continue;
    }
    const TensorIds& merged = g.op(first).outputs;
    for (size_t k = 0; k < op.outputs.size(); ++k)
      if (op.outputs[k] != kNone && merged[k] != kNone) now[op.outputs[k]] = merged[k];
  }
}

TensorIds without_empty_parts(Graph& graph, const Op& op) {
  if (op.code != OpCode::k_concat) return {};
  TensorIds some;
  for (const TensorId id : op.inputs)
    if (element_count(graph.tensor(id).dims) > 0) some.push_back(id);
  if (some.empty() || some.size() == op.inputs.size()) return {};
  if (some.size() == 1) return some;
  const Op given = op;  // appending moves the graph's ops
  return graph.op(append_op(graph, given.code, some, given.attrs, given.scope, given.name)).outputs;
}

bool is_low(DType type) { return type == DType::kBF16 || type == DType::kF16; }

bool is_active(const Attrs& attrs) {
  const std::string& activation = attr_string(attrs, "activation");
  return !activation.empty() && activation != "none";
}

bool is_biased(const Op& op) { return op.inputs.size() > 2 && op.inputs[2] != kNone; }

// Does the plan run all of the op in one kernel, wherever it runs it? In 16 bits that is rounded once.
bool runs_whole(const Graph& g, const Op& op, const Form& form) {
  if (!form.whole || !has_flag(op.code, kProduct) || !is_low(g.tensor(op.outputs[0]).dtype)) return false;
  const bool biased = is_biased(op), active = is_active(op.attrs);
  return (biased || active) && !(biased && (form.unbiased.contains(op.name) || !form.biased.contains(op.name))) &&
         !(active && (form.inactive.contains(op.name) || !form.active.contains(op.name)));
}

// The product that makes this, which nothing else reads; null: none does.
const Op* product_of(const Graph& g, const std::vector<int>& uses, TensorId id) {
  const OpId maker = id == kNone ? kNone : g.tensor(id).producer;
  const bool alone = maker != kNone && uses[id] == 1 && has_flag(g.op(maker).code, kProduct);
  return alone ? &g.op(maker) : nullptr;
}

// Activations within products, where the plan runs them so.
void fold_activations(Graph& g, const Form& form) {
  const std::vector<int> uses = use_counts(g);
  rewrite(g, [&](Graph& graph, const Op& op) {
    const char* name = def(op.code).as_activation;
    if (!name || op.inputs[0] >= std::ssize(uses)) return TensorIds{};
    const Op* made = product_of(graph, uses, op.inputs[0]);
    if (!made || is_active(made->attrs)) return TensorIds{};
    Op product = *made;
    product.attrs["activation"] = std::string(name);
    product.outputs = op.outputs;
    if (!runs_whole(graph, product, form)) return TensorIds{};
    return graph.op(append_op(graph, product.code, product.inputs, product.attrs, product.scope, product.name)).outputs;
  });
}

// Is there a product whose result is rounded before its bias or its activation, where one device would round behind?
// `folds`: ones that the program has as ops of their own too.
bool rounds_apart(const Graph& g, const Form& form, bool folds) {
  if (!form.whole) return true;
  const std::vector<int> uses = use_counts(g);
  return std::ranges::any_of(g.ops, [&](const Op& op) {
    if (!is_low(g.tensor(op.outputs[0]).dtype)) return false;
    if (has_flag(op.code, kProduct)) return (is_biased(op) || is_active(op.attrs)) && !runs_whole(g, op, form);
    if (!folds) return false;
    if (op.code == OpCode::k_add)
      for (const size_t at : {size_t{0}, size_t{1}})
        if (const Op* product = product_of(g, uses, op.inputs[at]);
            product && g.tensor(op.inputs[1 - at]).dims.size() == 1 &&
            g.scope_path(product->scope) == g.scope_path(op.scope))
          return true;
    return def(op.code).as_activation && product_of(g, uses, op.inputs[0]);
  });
}

// What the plan takes apart before it gives types to what is in between, and merges what is equal then: products that
// it runs without their bias, or without their activation; those without a kernel of the operands of such a one; and
// unlike ones of the same operands of which none has a kernel of its name. True: there are some.
bool take_apart(Graph& g, const Form& form) {
  const Operands operands(g);
  Form::Names apart;
  std::set<Operands::Key> run, taken;                              // some is run; some is run and taken apart
  std::map<Operands::Key, std::set<std::pair<bool, bool>>> forms;  // with a bias, with an activation
  std::vector<const Op*> products;
  for (const Op& op : g.ops)
    if (has_flag(op.code, kProduct)) products.push_back(&op);
  for (const Op* op : products) {
    const bool bare = form.unbiased.contains(op->name) && !form.biased.contains(op->name);
    const bool inactive = is_active(op->attrs) && form.inactive.contains(op->name) && !form.active.contains(op->name);
    if (bare || inactive) taken.insert(operands.of(*op));
    if (form.products.contains(op->name)) run.insert(operands.of(*op));
    forms[operands.of(*op)].insert({is_biased(*op), is_active(op->attrs)});
    if (inactive || (is_biased(*op) && (bare || is_late(g, form, *op)))) apart.insert(op->name);
  }
  for (const Op* op : products) {
    const Operands::Key key = operands.of(*op);
    const bool merged = taken.contains(key) || (!run.contains(key) && forms[key].size() > 1);
    if (!form.products.contains(op->name) && merged) apart.insert(op->name);
  }
  rewrite(g, [&](Graph& graph, const Op& op) {
    const bool whole = has_flag(op.code, kProduct) && (is_biased(op) || is_active(op.attrs));
    return whole && apart.contains(op.name) ? smaller_form(graph, op) : TensorIds{};
  });
  return !apart.empty();
}

bool trains_in(const Entry& entry) { return entry.name == "train"; }

}  // namespace

bool same_number(double a, double b) {
  return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
}

bool same_attr(std::string_view name, const Attr& a, const Attr& b) {
  const auto *x = std::get_if<double>(&a), *y = std::get_if<double>(&b);
  if (x && y) return same_number(*x, *y);
  const auto *one = std::get_if<std::string>(&a), *other = std::get_if<std::string>(&b);
  const bool types = name.ends_with("dtype") && one && other && !one->empty() && !other->empty();
  return types ? parse_dtype(*one) == parse_dtype(*other) : a == b;
}

bool same_attrs(const Attrs& a, const Attrs& b) {
  return std::ranges::equal(
      a, b, [](const auto& x, const auto& y) { return x.first == y.first && same_attr(x.first, x.second, y.second); });
}

bool same_op(const Graph& g, const Op& a, const Op& b) {
  if (a.key != b.key || !same_attrs(a.attrs, b.attrs)) return false;
  if (of_each_element(a)) return true;
  for (size_t i = 0; i < a.inputs.size(); ++i)
    if (a.inputs[i] != kNone && g.tensor(a.inputs[i]).dims != g.tensor(b.inputs[i]).dims) return false;
  return true;
}

bool of_each_element(const Op& op) {
  return has_flag(op.code, kElementwise) && !has_flag(op.code, kRandom) && op.inputs.size() == 1;
}

Dims in_rows(const Dims& dims) {
  if (dims.size() <= 2) return dims;
  return {element_count(dims) / dims.back(), dims.back()};
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
          if (!has_flag(k->op, kProduct) || i.phase != Phase::kForward) continue;  // gradients' have names of their own
          add_names(form.products, i.name);
          add_names(i.in.size() > 2 && i.in[2] != kNone ? form.biased : form.unbiased, i.name);
          add_names(is_active(k->attrs) ? form.active : form.inactive, i.name);
        }
  return form;
}

OneDevice one_device_graph(const Plan& plan, const Entry& entry, const Form& form) {
  Graph g = plan.source;
  int64_t batch = 0;
  for (const TensorId id : g.inputs)
    if (const Tensor& t = g.tensor(id); t.batch_dim >= 0) batch = t.dims[t.batch_dim];
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
  const bool rounds = take_apart(g, form) && is_half(g.training.precision);
  const Biases biases(g, form);
  rewrite(g, [&](Graph& graph, const Op& op) { return biases.form(graph, op); });
  apply_precision(g);
  keep_apart(g, form.products);
  clean(g);
  if (train) differentiate(g);
  split_weights(g);
  if (train) add_updates(g), clean(g);
  const bool half = is_half(g.training.precision);
  if (half) rewrite(g, [&](Graph& graph, const Op& op) { return biases.late_form(graph, op); });
  if (half) fold_activations(g, form);
  const bool apart = rounds || (half && rounds_apart(g, form, plan.options.fusion));
  rewrite(g, [&](Graph& graph, const Op& op) {
    return half && runs_whole(graph, op, form) ? TensorIds{} : smaller_form(graph, op);
  });
  rewrite(g, without_empty_parts);
  name_apart(g);
  return {std::move(g), apart};
}

}  // namespace whale::proof
