#include "prove/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>

namespace whale::proof {
namespace {

// What tells numbers of this type apart. All that are none are one.
uint64_t bits_of(DType dtype, double value) {
  if (std::isnan(value)) value = std::numeric_limits<double>::quiet_NaN();
  if (is_float(dtype) && dtype != DType::kF64) value = static_cast<float>(value);
  return std::bit_cast<uint64_t>(value);
}

// As the type has it: an epsilon of 1e-60 is zero in f32.
double in_type(DType dtype, double value) { return std::bit_cast<double>(bits_of(dtype, value)); }

}  // namespace

bool keeps_numbers(OpCode code) { return has_flag(code, kRearranges) || code == OpCode::k_slice; }

bool makes_zeros(OpCode code, const Factors& factors, const std::vector<char>& zero) {
  if (has_flag(code, kKeepsZero) && !zero.empty()) {
    const bool many = def(code).inputs.back().kind == PortKind::kVariadic;
    if (many ? std::ranges::count(zero, 0) == 0 : zero[0] != 0) return true;
  }
  return std::ranges::any_of(factors.linear, [&](const std::vector<int>& set) {
    return !set.empty() &&
           std::ranges::all_of(set, [&](int i) { return static_cast<size_t>(i) < zero.size() && zero[i]; });
  });
}

size_t Reference::Hash::operator()(const Reads& reads) const {
  size_t h = static_cast<size_t>(reads.code);
  for (const TensorId id : reads.roots) h = (h ^ static_cast<size_t>(id + 1)) * 0x9e3779b97f4a7c15 ^ h >> 29;
  return h;
}

Reference::Reference(const Plan& plan, const Entry& entry, const Form& form)
    : Reference(one_device_graph(plan, entry, form), plan.options.exact) {}
Reference::Reference(OneDevice program, bool exact)
    : g_(std::move(program.graph)), rounds_apart_(program.rounds_apart), exact_(exact) {
  index();
}

void Reference::index() {
  root_.resize(g_.tensors.size());
  for (size_t t = 0; t < g_.tensors.size(); ++t) {
    root_[t] = static_cast<TensorId>(t);
    if (g_.tensors[t].kind == TensorKind::kInput) inputs_.emplace(g_.tensors[t].name, static_cast<TensorId>(t));
    if (g_.tensors[t].kind != TensorKind::kStep) continue;
    steps_.emplace(g_.tensors[t].name, static_cast<TensorId>(t));
    values_.emplace(static_cast<TensorId>(t), std::numeric_limits<double>::quiet_NaN());
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
      root_[op.outputs[0]] = reads.roots[0];
      continue;
    }
    const auto is_empty = [&](TensorId id) { return id == kNone || element_count(g_.tensor(id).dims) == 0; };
    if (std::ranges::all_of(op.outputs, is_empty)) {  // all that has no elements is one
      for (const TensorId id : op.outputs)
        if (id != kNone) root_[id] = zero_like(id);
      continue;
    }
    if (op.code == OpCode::k_cast)
      if (const TensorId same = before_cast(reads.roots[0], g_.tensor(op.outputs[0]).dtype); same != kNone) {
        root_[op.outputs[0]] = same;
        continue;
      }
    if (op.code == OpCode::k_fill) {
      const double value = attr_float(op.attrs, "value");
      const DType dtype = g_.tensor(op.outputs[0]).dtype;
      const auto [at, added] = constants_.try_emplace({dtype, bits_of(dtype, value)}, op.outputs[0]);
      root_[op.outputs[0]] = at->second;
      if (added) values_.emplace(at->second, in_type(dtype, value));
      continue;
    }
    bool are_numbers = true;
    for (size_t k = 0; k < op.inputs.size(); ++k) are_numbers &= is_empty(op.inputs[k]) || constant(reads.roots[k]);
    // In exact mode a zero of something else has its sign; one of no terms has none.
    const bool any_zero = !exact_ || are_numbers;
    std::vector<char> zero;
    for (size_t k = 0; k < op.inputs.size(); ++k)
      zero.push_back(op.inputs[k] != kNone && (any_zero ? is_zero(reads.roots[k]) : is_empty(op.inputs[k])));
    if (std::ranges::count(zero, 1) > 0 && def(op.code).factors && !makes_another(op, reads.roots) &&
        makes_zeros(op.code, factors_.of(g_, op), zero)) {
      for (const TensorId id : op.outputs)
        if (id != kNone) root_[id] = zero_like(id);
      continue;
    }
    if (const TensorId other = beside_zero(op, reads.roots); other != kNone) {
      root_[op.outputs[0]] = other;
      reads_[reads].push_back(static_cast<OpId>(i));
      continue;
    }
    if (keeps_numbers(op.code) && constant(reads.roots[0])) {
      root_[op.outputs[0]] = reads.roots[0];
      continue;
    }
    const bool uniform = is_uniform(op, reads.roots);
    std::vector<OpId>& alike = reads_[reads];
    const auto twin = std::ranges::find_if(alike, [&](OpId other) {
      const Op& o = g_.op(other);
      return uniform ? o.key == op.key && same_attrs(o.attrs, op.attrs)
                     : same_op(g_, o, op) || same_product(o, op) || same_elements(o, op);
    });
    if (twin == alike.end()) {
      alike.push_back(static_cast<OpId>(i));
      of_code_[op.code].push_back(static_cast<OpId>(i));
      for (const TensorId id : op.outputs)
        if (uniform && id != kNone) values_.emplace(id, std::numeric_limits<double>::quiet_NaN());
      continue;
    }
    const Op& same = g_.op(*twin);
    for (size_t k = 0; k < op.outputs.size(); ++k) root_[op.outputs[k]] = root(same.outputs[k]);
    // A plan may run it in either shape.
    if (!uniform && g_.tensor(same.outputs[0]).dims != g_.tensor(op.outputs[0]).dims && !same_op(g_, same, op) &&
        !same_product(same, op))
      alike.push_back(static_cast<OpId>(i));
  }
  find_gradients();
  find_shared();
}

// Only what two additions read, or one twice, can be in both operands of one.
void Reference::find_shared() {
  std::unordered_map<TensorId, int> reads;
  for (const OpId id : ops_of(OpCode::k_add))
    for (const TensorId x : g_.op(id).inputs) ++reads[root(x)];
  std::unordered_map<TensorId, TensorIds> has;  // of what is read twice, ascending
  const auto in = [&](TensorId id) {
    const auto at = has.find(id);
    TensorIds out = at == has.end() ? TensorIds{} : at->second;
    if (reads[id] > 1) out.insert(std::ranges::lower_bound(out, id), id);
    return out;
  };
  for (const OpId id : ops_of(OpCode::k_add)) {
    const Op& op = g_.op(id);
    const TensorIds a = in(root(op.inputs[0])), b = in(root(op.inputs[1]));
    TensorIds both, all;
    std::ranges::set_intersection(a, b, std::back_inserter(both));
    std::ranges::set_union(a, b, std::back_inserter(all));
    if (!both.empty()) shares_.insert(id);
    if (!all.empty()) has.emplace(root(op.outputs[0]), std::move(all));
  }
}

TensorId Reference::before_cast(TensorId wide, DType to) const {
  const OpId made = wide == kNone ? kNone : g_.tensor(wide).producer;
  if (made == kNone || g_.op(made).code != OpCode::k_cast) return kNone;
  const TensorId from = g_.op(made).inputs[0];
  const DType there = g_.tensor(wide).dtype;
  const bool back = g_.tensor(from).dtype == to && is_float(to) && is_float(there) && size_of(there) > size_of(to);
  return back ? root(from) : kNone;
}

TensorId Reference::cast_by_way(TensorId narrow, DType to) const {
  const auto casts_of = [&](TensorId id) {
    static const std::vector<OpId> kNoOps;
    const std::vector<OpId>* found = find(OpCode::k_cast, {id});
    return found ? *found : kNoOps;
  };
  const DType from = g_.tensor(narrow).dtype;
  if (!is_float(from) || !is_float(to)) return kNone;
  for (const OpId first : casts_of(narrow)) {
    const TensorId wide = root(g_.op(first).outputs[0]);
    const DType there = g_.tensor(wide).dtype;
    if (!is_float(there) || size_of(there) <= size_of(from) || size_of(there) <= size_of(to)) continue;
    for (const OpId second : casts_of(wide))
      if (g_.tensor(g_.op(second).outputs[0]).dtype == to) return root(g_.op(second).outputs[0]);
  }
  return kNone;
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
  for (const TensorId id : left)
    if (before_loss.contains(id)) in_loss_.insert(id);
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
  std::map<std::pair<TensorId, int>, int64_t> carry;  // tensors and dimensions; outside of samples, within a dimension
  for (size_t t = 0; t < g_.tensors.size(); ++t)
    if (g_.tensors[t].kind == TensorKind::kInput && g_.tensors[t].batch_dim >= 0)
      carry[{static_cast<TensorId>(t), g_.tensors[t].batch_dim}] = 1;
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const Op& op = g_.ops[i];
    const std::vector<Factor>& list = factors(op).list;
    for (size_t f = 0; f < list.size(); ++f) {
      bool has = false;
      for (size_t k = 0; k < op.inputs.size() && k < list[f].inputs.size(); ++k) {
        const SubAxis& at = list[f].inputs[k];
        const auto it = op.inputs[k] != kNone && at.present() ? carry.find({op.inputs[k], at.dim}) : carry.end();
        has |= it != carry.end() && it->second == at.outer;
      }
      if (!has) continue;
      of_batch_.insert({static_cast<OpId>(i), static_cast<int32_t>(f)});
      for (size_t k = 0; k < op.outputs.size() && k < list[f].outputs.size(); ++k)
        if (list[f].outputs[k].present()) carry[{op.outputs[k], list[f].outputs[k].dim}] = list[f].outputs[k].outer;
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
  const auto [at, added] =
      constants_.try_emplace({dtype, bits_of(dtype, value)}, static_cast<TensorId>(g_.tensors.size()));
  if (added) {
    g_.tensors.push_back({.name = fmt::format("{}", value), .dtype = dtype, .dims = {}});
    root_.push_back(at->second);
    values_.emplace(at->second, in_type(dtype, value));
  }
  return at->second;
}

TensorId Reference::image_of(TensorId summand, TensorId sum) {
  if (summand == sum) return sum;
  const auto [at, added] = images_.try_emplace({summand, sum}, static_cast<TensorId>(g_.tensors.size()));
  if (added) {
    Tensor image;
    image.name = fmt::format("{} in {}", name(summand), g_.tensor(sum).name);
    image.dtype = g_.tensor(sum).dtype, image.dims = g_.tensor(sum).dims;
    image_from_.emplace(at->second, summand), image_in_.emplace(at->second, sum);
    g_.tensors.push_back(std::move(image));
    root_.push_back(at->second);
  }
  return at->second;
}

TensorId Reference::known_image_of(TensorId summand, TensorId sum) const {
  if (summand == sum) return sum;
  const auto at = images_.find({summand, sum});
  return at == images_.end() ? kNone : at->second;
}

bool Reference::is_image_in(TensorId id, TensorId sum) const {
  const auto at = image_in_.find(id);
  return at != image_in_.end() && at->second == sum;
}

bool Reference::is_finer(TensorId fine, TensorId coarse) const {
  for (auto at = image_in_.find(coarse); at != image_in_.end(); at = image_in_.find(coarse)) {
    if (!is_image_in(fine, at->second)) return false;
    coarse = image_from_.at(coarse), fine = image_from_.at(fine);
  }
  const auto group = members_.find(coarse);
  return is_image_in(fine, coarse) || (group != members_.end() && std::ranges::count(group->second, fine) > 0);
}

TensorId Reference::group_of(TensorId sum, const std::vector<TensorId>& names) {
  const auto [at, added] = groups_.try_emplace({sum, names}, static_cast<TensorId>(g_.tensors.size()));
  if (added) {
    Tensor group;
    group.name = fmt::format("{} and {} more of {}", name(names[0]), names.size() - 1, g_.tensor(sum).name);
    group.dtype = g_.tensor(sum).dtype, group.dims = g_.tensor(sum).dims;
    members_.emplace(at->second, names), image_from_.emplace(at->second, names[0]);
    g_.tensors.push_back(std::move(group));
    root_.push_back(at->second);
  }
  return at->second;
}

bool Reference::is_made_of(TensorId tensor, TensorId other) const {
  for (auto from = image_from_.find(other); from != image_from_.end(); from = image_from_.find(other))
    other = from->second;
  tensor = root(tensor), other = root(other);
  if (tensor == other) return true;
  const OpId maker = tensor == kNone ? kNone : g_.tensor(tensor).producer, first = g_.tensor(other).producer;
  if (maker == kNone || maker < first) return false;  // ops stand in an order in which they can run
  const auto at = made_of_.find({tensor, other});
  if (at != made_of_.end()) return at->second;
  bool found = false;
  for (size_t i = 0; i < g_.op(maker).inputs.size() && !found; ++i) found = is_made_of(g_.op(maker).inputs[i], other);
  return made_of_[{tensor, other}] = found;
}

bool Reference::is_by_one_way(TensorId tensor, OpId op) const {
  tensor = root(tensor);
  const auto known = one_way_.find({tensor, op});
  if (known != one_way_.end()) return known->second;
  TensorId at = tensor;
  const auto is_made = [&](TensorId id) {
    return id != kNone &&
           std::ranges::any_of(g_.op(op).outputs, [&](TensorId made) { return made != kNone && is_made_of(id, made); });
  };
  while (at != kNone && g_.tensor(at).producer != op) {
    TensorId only = kNone;
    for (const TensorId id : g_.tensor(at).producer == kNone ? TensorIds{} : g_.op(g_.tensor(at).producer).inputs) {
      if (!is_made(id)) continue;
      if (only != kNone) return one_way_[{tensor, op}] = false;
      only = root(id);
    }
    at = only;
  }
  return one_way_[{tensor, op}] = at != kNone;
}

TensorId Reference::beside_zero(const Op& op, const TensorIds& roots) const {
  if (op.code != OpCode::k_add) return kNone;
  for (const size_t i : {size_t{0}, size_t{1}})
    if (is_zero(roots[i]) && g_.tensor(op.inputs[1 - i]).dims == g_.tensor(op.outputs[0]).dims) return roots[1 - i];
  return kNone;
}

bool Reference::makes_another(const Op& op, const TensorIds& roots) const {
  const auto make = def(op.code).of_numbers;
  if (make == nullptr || roots.size() != 2) return false;
  const double *a = constant(roots[0]), *b = constant(roots[1]);
  if (a == nullptr || b == nullptr) return false;
  const auto is_none = [&](TensorId root) {  // written so; of others that are NaN here the number is not known
    const DType dtype = g_.tensor(root).dtype;
    const auto at = constants_.find({dtype, bits_of(dtype, std::nan(""))});
    return at != constants_.end() && at->second == root;
  };
  if (is_none(roots[0]) || is_none(roots[1])) return true;
  return !std::isnan(*a) && !std::isnan(*b) && make(*a, *b) != 0;
}

TensorId Reference::zero_like(TensorId id) {
  const auto [at, added] = constants_.try_emplace({g_.tensor(id).dtype, bits_of(g_.tensor(id).dtype, 0)}, id);
  if (added) values_.emplace(id, 0.0);
  return at->second;
}

// Of an op of each element: the sizes of what its result's dimensions are, and which operands have them (a bit each),
// as long as the same ones do. Numbers are of any shape.
std::vector<std::pair<int64_t, uint64_t>> Reference::broadcasts(const Op& op) const {
  std::vector<std::pair<int64_t, uint64_t>> out;
  const Dims& dims = g_.tensor(op.outputs[0]).dims;
  for (size_t d = 0; d < dims.size(); ++d) {
    uint64_t has = 0;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (op.inputs[i] == kNone || constant(root(op.inputs[i]))) continue;
      const Dims& in = g_.tensor(op.inputs[i]).dims;
      const size_t lacks = dims.size() - in.size();
      if (d >= lacks && in[d - lacks] != 1) has |= uint64_t{1} << i;
    }
    if (dims[d] == 1) continue;
    if (out.empty() || out.back().second != has) out.emplace_back(1, has);
    out.back().first *= dims[d];
  }
  return out;
}

// The same op of each element in the same order, in whatever shape.
bool Reference::same_elements(const Op& a, const Op& b) const {
  return has_flag(a.code, kElementwise) && !has_flag(a.code, kRandom) && !has_flag(a.code, kOffsetAware) &&
         a.key == b.key && a.inputs.size() < 64 && same_attrs(a.attrs, b.attrs) && broadcasts(a) == broadcasts(b);
}

// Products of the same rows, in whatever shape.
bool Reference::same_product(const Op& a, const Op& b) const {
  if (!has_flag(a.code, kProduct) || attr_bool(a.attrs, "transpose_a") || !same_attrs(a.attrs, b.attrs)) return false;
  const auto dims = [&](TensorId id) { return id == kNone ? Dims{} : g_.tensor(id).dims; };
  for (size_t i = 1; i < a.inputs.size(); ++i)
    if (dims(a.inputs[i]) != dims(b.inputs[i])) return false;
  return dims(a.inputs[1]).size() == 2 && in_rows(dims(a.inputs[0])) == in_rows(dims(b.inputs[0]));
}

bool Reference::is_uniform(const Op& op, const TensorIds& roots) const {
  return has_flag(op.code, kElementwise) && !has_flag(op.code, kRandom) && !has_flag(op.code, kOffsetAware) &&
         std::ranges::all_of(roots, [&](TensorId id) { return id != kNone && constant(id) != nullptr; });
}

bool Reference::is_zero(TensorId root) const {
  if (root == kNone) return false;
  const double* c = constant(root);
  return c != nullptr ? *c == 0 : element_count(g_.tensor(root).dims) == 0;
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
  const auto at = steps_.find(kNames[static_cast<size_t>(scalar)]);
  return at == steps_.end() ? kNone : at->second;
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
  if (const double* number = constant(root(id))) return fmt::format("the number {}", *number);
  const Tensor& t = g_.tensor(id);
  for (const NamedTensor& g : g_.gradients)
    if (root(g.tensor) == root(id) && t.name != g.name + ".grad")
      return fmt::format("{} (the gradient of {})", t.name, g.name);
  return t.name;
}

}  // namespace whale::proof
