#include "values_mill.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "base/format.h"

#include "prove/sum.h"

namespace whale::test {
namespace {

using enum OpCode;

std::optional<std::vector<Value>> computed(OpCode code, const Attrs& attrs, std::vector<Value> in, uint64_t key = 0,
                                           const Place& place = {}) {
  try {
    OpCall call{code, complete_attrs(def(code), attrs), std::move(in), key};
    for (const char* name : {"dtype", "out_dtype"})
      if (const auto it = call.attrs.find(name); it != call.attrs.end())
        if (auto* type = std::get_if<std::string>(&it->second); type && *type == "f32") *type = "f64";
    return ref_device().run(call, place);
  } catch (const Error&) {
    return {};  // not of these shapes
  }
}

bool is_of_reals(DType dtype) { return dtype == DType::kF32 || dtype == DType::kF64; }

// Where an op that asks lies, if it lies nowhere else than all of it.
Place whole_of(OpCode code, const Dims& dims) {
  Place place;
  if (has_flag(code, kOffsetAware)) place.box.global = dims, place.box.origin = Dims(dims.size(), 0);
  return place;
}

// Where the elements of a part of a sub-axis lie in the whole, in their order.
std::vector<size_t> places_of(const Dims& whole, const SubAxis& s, Interval part) {
  int64_t outer = s.outer, inner = s.inner;
  const auto dim = static_cast<size_t>(s.dim);
  for (size_t d = 0; d < dim; ++d) outer *= whole[d];
  for (size_t d = dim + 1; d < whole.size(); ++d) inner *= whole[d];
  const int64_t extent = whole[dim] / (s.outer * s.inner);
  std::vector<size_t> out;
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t e = part.begin; e < part.end; ++e)
      for (int64_t i = 0; i < inner; ++i) out.push_back(static_cast<size_t>((o * extent + e) * inner + i));
  return out;
}
Dims dims_of(Dims whole, const SubAxis& s, Interval part) {
  whole[s.dim] = s.outer * part.size() * s.inner;
  return whole;
}
Value part_of(const Value& whole, const SubAxis& s, Interval part) {
  Value out{whole.dtype, dims_of(whole.dims, s, part), {}};
  for (const size_t at : places_of(whole.dims, s, part)) out.data.push_back(whole.data[at]);
  return out;
}

// Where the elements of a region lie in the tensor.
std::vector<size_t> places_of(const proof::Region& region, const Dims& dims) {
  std::vector<size_t> out{0};
  for (size_t d = 0; d < dims.size(); ++d) {
    std::vector<size_t> next;
    for (const size_t at : out)
      for (const Interval& run : region.digits()[d].set.runs())
        for (int64_t i = run.begin; i < run.end; ++i)
          next.push_back(at * static_cast<size_t>(dims[d]) + static_cast<size_t>(i));
    out = std::move(next);
  }
  return out;
}

}  // namespace

Mill::Mill(Dice& dice, const Plan& plan, bool exact)
    : dice_(dice),
      exact_(exact),
      ref_(plan, plan.entries[0], proof::form_of(plan.entries[0])),
      tree_(ref_, plan.entries[0], exact),
      kernels_(ref_, {}, tree_) {
  make_truth();
  for (const auto& [id, numbers] : truth_)
    if (ref_.root(id) == id && (ref_.tensor(id).producer == kNone || (!exact && dice.coin())))
      keep({.tensor = id, .dtype = ref_.tensor(id).dtype, .region = proof::Region::whole(numbers.dims)}, numbers,
           ref_.tensor(id).name);
  for (const double number : {0.0, 1.0})
    run(k_fill, {{"shape", Ints{4, 4}}, {"value", number}, {"dtype", std::string("f32")}}, "number", {});
}

// Of inputs and variables by chance, of all else as the reference kernels have it; without what reads the numbers of a
// step.
void Mill::make_truth() {
  const Graph& g = ref_.graph();
  for (size_t t = 0; t < g.tensors.size(); ++t) {
    const Tensor& each = g.tensors[t];
    if (each.producer != kNone || each.dims.empty()) continue;
    Value v{is_of_reals(each.dtype) ? DType::kF64 : each.dtype, each.dims, {}};
    for (int64_t n = element_count(each.dims); n > 0; --n)
      v.data.push_back(is_of_reals(each.dtype) ? dice_.real() : static_cast<double>(dice_.below(4)));
    truth_[static_cast<TensorId>(t)] = std::move(v);
  }
  for (const Op& op : g.ops) {
    std::vector<Value> in;
    for (const TensorId id : op.inputs) {
      const auto it = truth_.find(id);
      if (id != kNone && it == truth_.end()) break;
      in.push_back(id == kNone ? Value{} : it->second);
    }
    if (in.size() != op.inputs.size()) continue;
    Place place;
    if (!op.outputs.empty()) place = whole_of(op.code, g.tensor(op.outputs[0]).dims);
    if (auto made = computed(op.code, op.attrs, std::move(in), op.key, place))
      for (size_t k = 0; k < made->size(); ++k) truth_[op.outputs[k]] = std::move((*made)[k]);
  }
}

void Mill::turn() {
  const int64_t kind = dice_.below(12);
  if (kind < 6) return op_of_program();
  if (kind < 8) {
    const Held* a = any([](const Held&) { return true; });
    return run(dice_.below(4) > 0 ? k_add : k_accumulate, {}, "sum", {a, a ? beside(*a) : nullptr});
  }
  if (kind == 8) return slice();
  if (kind == 9) {
    const Held* a = any([](const Held& h) { return element_count(h.numbers.dims) < 16; });
    return run(k_concat, {{"axis", dice_.below(2)}}, "concat", {a, a ? beside(*a) : nullptr});
  }
  return kind == 10 ? combine() : gather();
}

template <class Fits>
const Mill::Held* Mill::any(Fits fits) {
  Some out;
  for (const Held& h : held_)
    if (fits(h)) out.push_back(&h);
  return out.empty() ? nullptr : out[dice_.below(std::ssize(out))];
}

const Mill::Held* Mill::beside(const Held& a) {
  const bool same = dice_.below(3) > 0;
  return any(
      [&](const Held& h) { return h.numbers.dims == a.numbers.dims && (!same || h.value.tensor == a.value.tensor); });
}

Attrs Mill::odd(Attrs attrs) {
  const auto chance = [&](int64_t n) { return dice_.below(n) == 0; };
  const auto some = [&] { return std::array<int64_t, 5>{0, 1, 2, 3, 4}[dice_.below(5)]; };
  for (auto& [name, value] : attrs) {
    if (auto* number = std::get_if<int64_t>(&value); number && chance(3))
      *number = some();
    else if (auto* list = std::get_if<Ints>(&value); list && !list->empty() && chance(3))
      (*list)[dice_.below(std::ssize(*list))] = some();
    else if (auto* flag = std::get_if<bool>(&value); flag && chance(20))
      *flag = !*flag;
  }
  return attrs;
}

void Mill::op_of_program() {
  const Op& op = ref_.graph().ops[dice_.below(std::ssize(ref_.graph().ops))];
  Some in;
  static const Held absent{};
  for (const TensorId id : op.inputs)
    in.push_back(id == kNone ? &absent : any([&](const Held& h) { return h.value.tensor == ref_.root(id); }));
  if (!in.empty() && in[0] && dice_.below(10) == 0) in[0] = beside(*in[0]);
  Place place;
  if (!op.outputs.empty()) place = whole_of(op.code, ref_.tensor(op.outputs[0]).dims);
  for (int64_t& at : place.box.origin)
    if (dice_.below(3) == 0) at = dice_.below(4);
  if (!place.box.origin.empty() && dice_.below(4) == 0) {  // the samples' dimension is said by their number
    place.box.batch = {0, 1, 1}, place.box.origin[0] = 0;
    place.batch_begin = dice_.below(4);
  }
  run(op.code, dice_.coin() ? op.attrs : odd(op.attrs), dice_.coin() ? op.name : "kernel", in, op.key, place);
}

SubAxis Mill::sub_axis_of(const Dims& dims) {
  SubAxis s{.dim = static_cast<int>(dice_.below(std::ssize(dims))), .outer = 1 + dice_.below(2), .inner = 1};
  if (dice_.below(4) == 0) s.inner = 2;
  return s;
}

void Mill::slice() {
  const Held* x = any([](const Held& h) { return !h.numbers.dims.empty() && !h.numbers.data.empty(); });
  if (!x) return;
  const SubAxis s = sub_axis_of(x->numbers.dims);
  const int64_t n = x->numbers.dims[s.dim] / (s.outer * s.inner);
  const int64_t begin = dice_.below(n + 1), end = begin + dice_.below(n + 1 - begin);
  run(k_local_slice, {{"sub_axis", Ints{s.dim, s.outer, s.inner}}, {"begin", begin}, {"end", end}}, "slice", {x});
}

void Mill::run(OpCode code, const Attrs& attrs, const std::string& name, const Some& in, uint64_t key,
               const Place& place) {
  if (std::ranges::count(in, nullptr) > 0) return;
  std::vector<Value> numbers;
  for (const Held* h : in) numbers.push_back(h->numbers);
  const auto made = computed(code, attrs, std::move(numbers), key, place);
  if (!made) return;
  try {
    proof::KernelCall call{.code = code, .attrs = complete_attrs(def(code), attrs), .name = name};
    call.forward = dice_.coin();
    call.key = key, call.box = &place.box;
    call.samples = {place.batch_begin, place.batch_begin};
    if (!made->empty() && !(*made)[0].dims.empty()) call.samples.end += (*made)[0].dims[0];
    for (const Held* h : in)
      if (h->numbers.present())
        call.in.push_back({&h->value, h->numbers.dims, {}});
      else
        call.in.emplace_back();
    for (const Value& v : *made) call.out.push_back({v.dims, is_of_reals(v.dtype) ? DType::kF32 : v.dtype});
    std::string how = std::string(def(code).name) + "(";
    for (const Held* h : in) how += h->how + ", ";
    how = how.substr(0, 300);
    for (const auto& [key, value] : attrs) how += key + "=" + to_string(value) + " ";
    const std::vector<proof::Value> out = kernels_.run(call);
    for (size_t k = 0; k < made->size(); ++k) keep(out.at(k), (*made)[k], how + ")");
  } catch (const proof::Stop&) {  // as it should be for most
  }
}

void Mill::combine() {
  Some in{any([](const Held& h) { return !h.value.terms.whole() && !h.numbers.dims.empty(); })};
  if (!in[0]) return;
  for (int64_t n = dice_.between(1, 2); n > 0; --n) in.push_back(beside(*in[0]));
  if (std::ranges::count(in, nullptr) > 0) return;
  Value sum = in[0]->numbers;
  for (size_t m = 1; m < in.size(); ++m) {
    auto both = computed(k_add, {}, {sum, in[m]->numbers});
    if (!both) return;
    sum = std::move(both->at(0));
  }
  const Dims& dims = sum.dims;
  work::Collective w;
  w.op = dice_.coin() ? k_all_reduce : k_reduce_scatter, w.combine = Combine::kSum;
  std::vector<Dims> out(in.size(), dims);
  if (w.op == k_reduce_scatter) {
    w.cuts = {{sub_axis_of(dims), {}}};
    const SubAxis& s = w.cuts[0].sub_axis;
    const int64_t extent = dims[s.dim] / (s.outer * s.inner);
    if (dims[s.dim] % (s.outer * s.inner) != 0) return;
    int64_t at = 0;
    for (size_t m = 0; m < in.size(); ++m) {
      const int64_t end = m + 1 == in.size() ? extent : at + dice_.below(extent - at + 1);
      w.cuts[0].cuts.push_back({at, end});
      out[m] = dims_of(dims, s, {at, end});
      at = end;
    }
  }
  exchange(w, in, sum, out);
}

void Mill::gather() {
  Some in{any([](const Held& h) { return !h.numbers.dims.empty(); })};
  if (!in[0]) return;
  work::Collective w;
  w.op = dice_.below(3) > 0 ? k_all_gather : k_all_to_all;
  const Dims& first = in[0]->numbers.dims;
  const SubAxis s = sub_axis_of(first);
  const auto dim = static_cast<size_t>(s.dim);
  const auto fits = [&](const Held& h) {
    return h.value.tensor == in[0]->value.tensor && h.numbers.dims.size() == first.size() &&
           h.numbers.dims[dim] % (s.outer * s.inner) == 0 &&
           dims_of(h.numbers.dims, s, {0, 1}) == dims_of(first, s, {0, 1});
  };
  if (!fits(*in[0])) return;
  for (int64_t n = dice_.between(1, 2); n > 0; --n) in.push_back(any(fits));
  w.cuts = {{s, {}}};
  int64_t at = 0;
  for (const Held* h : in) {
    const int64_t end = at + h->numbers.dims[dim] / (s.outer * s.inner);
    w.cuts[0].cuts.push_back({at, end});
    at = end;
  }
  Value whole{in[0]->numbers.dtype, dims_of(first, s, {0, at}), {}};
  if (element_count(whole.dims) > 64) return;
  whole.data.resize(static_cast<size_t>(element_count(whole.dims)));
  for (size_t m = 0; m < in.size(); ++m) {
    const std::vector<size_t> places = places_of(whole.dims, s, w.cuts[0].cuts[m]);
    for (size_t k = 0; k < places.size(); ++k) whole.data[places[k]] = in[m]->numbers.data[k];
  }
  std::vector<Dims> out(in.size(), whole.dims);
  if (w.op == k_all_to_all) {
    w.to.sub_axis = sub_axis_of(whole.dims);
    const SubAxis& to = w.to.sub_axis;
    const int64_t n = whole.dims[to.dim];
    if (n % (to.outer * to.inner) != 0) return;
    const int64_t extent = n / (to.outer * to.inner);
    for (size_t m = 0; m < in.size(); ++m) {
      const auto members = static_cast<int64_t>(in.size()), i = static_cast<int64_t>(m);
      w.to.cuts.push_back({extent * i / members, extent * (i + 1) / members});
      out[m] = dims_of(whole.dims, to, w.to.cuts[m]);
    }
  }
  exchange(w, in, whole, out);
}

void Mill::exchange(const work::Collective& work, const Some& in, const Value& whole, const std::vector<Dims>& out) {
  proof::Exchange e{.work = &work, .operand = 0, .in = {}, .in_dims = {}, .out_dims = out};
  std::string how = std::string(def(work.op).name) + "(";
  for (const Held* h : in) {
    e.in.push_back(std::make_shared<const proof::Value>(h->value));
    e.in_dims.push_back(h->numbers.dims);
    how += h->how.substr(0, 150) + ", ";
  }
  try {
    const std::vector<proof::Held> made = proof::exchanged(ref_, tree_, e);
    for (size_t m = 0; m < in.size(); ++m) {
      const SubAxisCuts* cuts = work.op == k_reduce_scatter ? &work.cuts[0]
                                : work.op == k_all_to_all   ? &work.to
                                                            : nullptr;
      keep(*made[m], cuts ? part_of(whole, cuts->sub_axis, cuts->cuts[m]) : whole, how + ")");
      if (!cuts) break;  // all members have that
    }
  } catch (const proof::Stop&) {
  }
}

void Mill::keep(const proof::Value& value, const Value& numbers, const std::string& how) {
  if (value.region.size() != std::ssize(numbers.data)) return;  // which a walk refuses when it is written
  compare(value, numbers, how);
  constexpr size_t kMost = 200;
  if (held_.size() < kMost)
    held_.push_back({value, numbers, how});
  else
    held_[dice_.below(kMost)] = {value, numbers, how};
}

void Mill::compare(const proof::Value& value, const Value& numbers, const std::string& how) {
  const auto truth = truth_.find(value.tensor);
  if (!value.terms.whole() || value.region.open() || truth == truth_.end() || ref_.constant(value.tensor)) return;
  const Dims& dims = truth->second.dims;
  const auto region = value.region.in(dims);
  if (!region || region->size() == 0) return;
  ++compared;
  const std::vector<size_t> places = places_of(*region, dims);
  bool same = places.size() == numbers.data.size();
  for (size_t k = 0; same && k < places.size(); ++k) {
    const double is = numbers.data[k], is_called = truth->second.data[places[k]];
    same = std::abs(is - is_called) <= 1e-6 * (1 + std::abs(is_called)) || !std::isfinite(is_called);
  }
  std::string unlike;
  if (exact_)
    for (size_t k = 0; same && unlike.empty() && k < places.size(); ++k) {
      const auto [it, is_new] = bits_.try_emplace({value.tensor, value.order, places[k]}, numbers.data[k]);
      of_one_order += !is_new;
      if (std::bit_cast<uint64_t>(it->second) != std::bit_cast<uint64_t>(numbers.data[k]) && !std::isnan(it->second))
        unlike = fmt::format("; element {} of that order was {:.17}", places[k], it->second);
    }
  if ((same && unlike.empty()) || !wrong.empty()) return;
  std::string said, is;
  for (const size_t at : places) said += fmt::format(" {:.17}", truth->second.data[at]);
  for (const double x : numbers.data) is += fmt::format(" {:.17}", x);
  wrong = fmt::format("{} is{}, and {} has{}{}\n{}", how, is, proof::describe(ref_, value), said, unlike,
                      print(ref_.graph()));
}

}  // namespace whale::test
