// One op of the one-device program against what a kernel reads: which positions of its factors, which terms, which part
// of its result.
#include <algorithm>
#include <optional>

#include "prove/match.h"

namespace whale::proof {
namespace {

// Summands that go on together: so many as one where their terms are alike, and so many at all. Uses of uses of one sum
// double them.
constexpr size_t kMany = 16, kVeryMany = 512, kMost = 1024;

// The leading dimensions of a product's first operand and of its result may be one: rows of a matrix.
bool same_rows(const Op& op, const Dims& a, const Dims& b, bool has_rows) {
  if (a == b || !has_rows || !has_flag(op.code, kProduct) || a.empty() || b.empty()) return a == b;
  return a.back() == b.back() && element_count(a) == element_count(b);
}

// The factor of which the operand's dimension 0 has a row for each group of positions; -1: none.
int group_of(const std::vector<Factor>& list, size_t operand, bool input) {
  for (size_t f = 0; f < list.size(); ++f) {
    const std::vector<int>& of = input ? list[f].group.inputs : list[f].group.outputs;
    if (list[f].group.rows && std::find(of.begin(), of.end(), static_cast<int>(operand)) != of.end())
      return static_cast<int>(f);
  }
  return -1;
}

// The factor whose groups of positions (GroupRows) dimension 0 of this tensor stands for; slices of other dimensions
// may lie between it and the op that has it.
std::optional<FactorKey> groups_behind(Reference& ref, TensorId tensor) {
  for (OpId maker = ref.tensor(tensor).producer; maker != kNone; maker = ref.tensor(tensor).producer) {
    const Op& op = ref.graph().op(maker);
    const std::vector<Factor>& list = ref.factors(op).list;
    for (size_t f = 0; f < list.size(); ++f)
      for (const int o : list[f].group.outputs)
        if (list[f].group.rows > 0 && op.outputs[static_cast<size_t>(o)] == tensor)
          return FactorKey{maker, static_cast<int32_t>(f)};
    if (op.code != OpCode::k_slice || ref.tensor(op.inputs[0]).dims.at(0) != ref.tensor(tensor).dims.at(0)) return {};
    tensor = op.inputs[0];
  }
  return {};
}

// Where groups are added up, terms are those of the batch's positions in them, however they were told apart before: the
// groups that are added here go from `mine`, and `terms` (those of what is added; told of none: all of these groups)
// are counted from the batch's begin.
void count_of_batch(Reference& ref, const FactorKey& key, TermBox& mine, TermBox::iterator groups, Terms& terms) {
  const Factor& factor = ref.factors(ref.graph().op(key.op)).list[static_cast<size_t>(key.factor)];
  const int64_t rows = factor.group.rows;
  if (groups->any || groups->set.runs().size() != 1 || groups->extent * rows != factor.extent) return;
  const Interval at = groups->set.runs()[0];
  const bool told = std::ranges::any_of(terms.summands(), [&](const Summand& s) {  // which of them
    return std::ranges::any_of(s.boxes,
                               [&](const TermBox& b) { return std::ranges::count(b, key, &FactorSet::key) > 0; });
  });
  if (!told) {
    *groups = {key, factor.extent, Set(Interval{at.begin * rows, at.end * rows})};
  } else if (terms.all_have(key, at.size() * rows)) {
    terms.count_from(key, at.begin * rows, factor.extent);
    mine.erase(groups);
  }
}

}  // namespace

bool makes_rows(const KernelCall& call, const Graph& graph, const Op& op) {
  if (!has_flag(call.code, kProduct)) return false;
  const bool shared = graph.tensor(op.inputs[1]).dims.size() == 2 && !attr_bool(op.attrs, "transpose_a");
  return call.name.find('#') != call.name.npos ||
         (shared && call.in[0].local.size() != graph.tensor(op.inputs[0]).dims.size());
}

void check_shapes(const KernelCall& call) {
  std::vector<TensorType> types;
  std::vector<bool> present;
  for (const Operand& o : call.in) {
    present.push_back(o.value != nullptr);
    types.push_back(o.value ? TensorType{o.value->dtype, o.local} : TensorType{});
  }
  try {
    const std::vector<TensorType> made = infer(call.code, call.attrs, types, present);
    for (size_t o = 0; o < call.out.size() && o < made.size(); ++o)
      if (made[o].dims != call.out[o].local)
        refuse("operands of these shapes give {}, and the result has {}", to_string(made[o].dims),
               to_string(call.out[o].local));
  } catch (const Error& e) {
    refuse("{}", e.message());
  }
}

std::vector<Value> Kernels::match(const KernelCall& call, OpId id, const FactorSplits& splits) {
  const Op& op = ref_.graph().op(id);
  if (call.out.size() > op.outputs.size())
    refuse("it makes {} results, {} of the one-device program {}", call.out.size(), op.name, op.outputs.size());
  if (has_flag(call.code, kRandom) && call.key != op.key)
    refuse("random numbers of key {}, where {} of the one-device program has {}", call.key, op.name, op.key);
  for (const Operand& o : call.in)
    if (o.value && o.value->signs && ref_.constant(o.value->tensor))
      no_rule("the bits of what {} makes of zeros, each 0 or -0", op.name);
  Match m(*this, call, id, splits);
  if (const FactorSplit two = m.take_operands(); two.factor >= 0) {
    const auto f = static_cast<size_t>(two.factor);
    if (m.list[f].kind == FactorKind::kReduce && (m.inner_of(f) || f + splits.size() >= m.list.size()))
      no_rule("{} is cut to parts of parts along {}", op.name, m.list[f].name);
    FactorSplits more = splits;
    more.push_back(two);
    return match(call, id, more);
  }
  m.take_constants();
  m.take_windows();
  m.take_results();
  m.place_any();
  m.find_cut();
  m.find_groups();
  m.find_terms();
  std::vector<Value> out;
  for (size_t o = 0; o < call.out.size(); ++o) out.push_back(m.result(o));
  m.check_operands();
  std::vector<bool> windows;
  for (const auto& interval : m.read) windows.push_back(interval.has_value());
  check_attrs(call, op, m.shape, m.sets, windows, call.out.empty() ? Dims{} : call.out[0].local);
  check_box(call, op, out);
  return out;
}

void Kernels::Match::take(int f, const Digit& d, size_t operand) {
  std::optional<Digit>& mine = of[static_cast<size_t>(f)];
  if (!mine || (mine->any && mine->set.size() == d.set.size())) {
    mine = d;
  } else if (d.any ? mine->set.size() != d.set.size() : !(mine->set == d.set)) {
    refuse("operand {}, {}, is cut to {} along {}; other operands to {}", operand,
           call.in[operand].value ? describe(ref, *call.in[operand].value) : "absent", to_string(d.set),
           list[static_cast<size_t>(f)].name, to_string(mine->set));
  }
}

FactorSplit Kernels::Match::take_operands() {
  for (size_t i = 0; i < call.in.size(); ++i) {
    const Value* v = call.in[i].value;
    if (!v) continue;
    const Tensor& whole = ref.tensor(op.inputs[i]);
    if (v->dtype != whole.dtype && !kernels.is_asked_sum(*v))
      refuse("operand {}, {}, is {}; {} of the one-device program reads {}", i, describe(ref, *v), name_of(v->dtype),
             op.name, name_of(whole.dtype));
    kernels.exempt_sum(*v);
    if (!v->terms.whole()) partial.push_back(i);
    if (ref.constant(v->tensor) || of_each_element(op)) continue;
    const auto digits = v->region.spread(shape.in[i].dims, local_of(i)).in(shape.in[i].digits);
    constexpr size_t kMostSplits = 8;
    if (!digits && splits.size() < kMostSplits)
      if (const FactorSplit two = split_of(v->region, shape.in[i], list); two.factor >= 0) return two;
    if (!digits) no_rule("{} of operand {}, of {}", to_string(v->region), i, to_string(whole.dims));
    for (size_t k = 0; k < digits->digits().size(); ++k) {
      const Digit& d = digits->digits()[k];
      const int f = shape.in[i].owner[k];
      if (group_of(list, i, true) >= 0 && shape.in[i].dim[k] == 0) continue;  // below, when samples are known
      if (f >= 0 && list[static_cast<size_t>(f)].reads_through(i)) {
        if (d.set.runs().size() != 1)
          no_rule("{} reads {} of operand {} through a window", op.name, to_string(d.set), i);
        if (d.open()) {
          anywhere[static_cast<size_t>(f)] = d.set.size();
          continue;
        }
        std::optional<Interval>& mine = read[static_cast<size_t>(f)];
        if (mine && !(*mine == d.set.runs()[0]))
          refuse("operand {} has {} of {}, another one [{}:{}]", i, to_string(d.set), list[static_cast<size_t>(f)].name,
                 mine->begin, mine->end);
        mine = d.set.runs()[0];
      } else if (f >= 0) {
        take(f, d, i);
      } else if (!d.whole()) {
        refuse("operand {} is {}; {} needs all of dimension {}", i, describe(ref, *v), op.name, shape.in[i].dim[k]);
      }
    }
  }
  return {};
}

// Constants lie wherever the others do, and are read through a window as what is the same all along is.
void Kernels::Match::take_constants() {
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (!call.in[i].value || !ref.constant(call.in[i].value->tensor)) continue;
    const Layout& layout = shape.in[i];
    const Dims local = local_of(i);
    for (size_t k = 0; k < layout.owner.size(); ++k) {
      const auto f = static_cast<size_t>(layout.owner[k]), dim = static_cast<size_t>(layout.dim[k]);
      if (layout.owner[k] < 0 || dim >= local.size()) continue;
      if (list[f].reads_through(i)) {
        if (local[dim] < layout.digits[k])
          anywhere[f] = local[dim];
        else
          read[f] = Interval{0, local[dim]};
        continue;
      }
      if (of[f]) continue;
      if (std::count(layout.dim.begin(), layout.dim.end(), layout.dim[k]) == 1)
        of[f] = Digit{layout.digits[k], Set::first(local[dim]), true};
    }
  }
}

// Factors that results alone have.
void Kernels::Match::take_results() {
  for (size_t o = 0; o < call.out.size(); ++o) {
    const Layout& layout = shape.out[o];
    const Dims& dims = ref.tensor(op.outputs[o]).dims;
    if (of_each_element(op)) continue;
    if (!has_flag(op.code, kProduct) && call.out[o].local.size() != dims.size())
      refuse("it makes {}; {} of the one-device program makes {}", to_string(call.out[o].local), op.name,
             to_string(dims));
    for (size_t k = 0; k < layout.owner.size(); ++k) {
      const int f = layout.owner[k];
      if (f < 0 || of[static_cast<size_t>(f)]) continue;
      if (group_of(list, o, false) >= 0 && layout.dim[k] == 0) continue;
      const Factor& factor = list[static_cast<size_t>(f)];
      int64_t n = call.out[o].local[static_cast<size_t>(layout.dim[k])];
      for (size_t j = 0; j < layout.owner.size(); ++j) {
        if (j == k || layout.dim[j] != layout.dim[k]) continue;
        const int other = layout.owner[j];
        if (other >= 0 && !of[static_cast<size_t>(other)]) no_rule("{} makes two factors of one dimension", op.name);
        n /= other < 0 ? layout.digits[j] : of[static_cast<size_t>(other)]->set.size();
      }
      if (n > layout.digits[k]) refuse("it makes {} of {}", to_string(call.out[o].local), to_string(dims));
      Digit d{layout.digits[k], Set::first(n)};
      if (n != layout.digits[k]) {
        const bool through = std::any_of(factor.through.begin(), factor.through.end(), [](bool t) { return t; });
        if (through) no_rule("{} makes a part of what it reads through a window", op.name);
        if (factor.begin_attr) {
          const int64_t begin = attr_int(call.attrs, factor.begin_attr);
          d.set = Set(Interval{begin, begin + n});
        } else if (has_flag(op.code, kRandom) || has_flag(op.code, kOffsetAware)) {
          const auto dim = static_cast<size_t>(layout.dim[k]);
          const bool alone = std::count(layout.dim.begin(), layout.dim.end(), layout.dim[k]) == 1;
          if (o != 0 || !alone || call.box == nullptr || call.box->global != dims)
            no_rule("where a part of {} lies", op.name);
          d.set = positions(*call.box, call.samples, dim, dims[dim], n);
        } else {
          d.any = true;
        }
      }
      of[static_cast<size_t>(f)] = d;
    }
  }
}

// What draws by place, or asks where it lies, makes something that is not the same all along of what is: the box says
// which positions.
void Kernels::Match::place_any() {
  const uint32_t placed = placed_dims(ref.graph(), op);
  if (placed == 0 || op.outputs.empty()) return;
  const bool of_input = box_is_of_input(ref.graph(), op);
  const Layout& layout = of_input ? shape.in.at(0) : shape.out[0];
  for (size_t d = 0; d < layout.owner.size(); ++d) {
    const int f = layout.owner[d];
    const auto dim = static_cast<size_t>(layout.dim[d]);
    if (f < 0 || !of[static_cast<size_t>(f)] || !of[static_cast<size_t>(f)]->any || !(placed >> dim & 1)) continue;
    Digit& mine = *of[static_cast<size_t>(f)];
    mine.any = false;
    if (mine.whole()) continue;
    const bool alone = std::count(layout.dim.begin(), layout.dim.end(), layout.dim[d]) == 1;
    if (!alone || call.box == nullptr || call.box->global != layout.dims) no_rule("where a part of {} lies", op.name);
    mine.set = positions(*call.box, call.samples, dim, layout.dims[dim], mine.set.size());
  }
}

// Of rows that are all the same, those that the kernel takes for its own.
Digit Kernels::Match::looked_up(size_t f, int64_t n) const {
  const char* name = list[f].begin_attr;
  const int64_t begin = name ? attr_int(call.attrs, name) : -1;
  if (begin < 0 || begin + n > list[f].extent) no_rule("{} looks up any of {}", op.name, list[f].name);
  return {list[f].extent, Set(Interval{begin, begin + n})};
}

void Kernels::Match::find_cut() {
  for (size_t f = 0; f < list.size(); ++f) {
    sets.push_back(of[f] ? *of[f] : Digit{list[f].extent, Set::first(list[f].extent)});
    Digit& d = sets.back();
    if (d.extent != list[f].extent) no_rule("the extent of {} of {}", list[f].name, op.name);
    // What is counted from somewhere, a scan or a window makes something else at each position of what is the same.
    const FactorKind kind = list[f].kind;
    const bool sums = kind == FactorKind::kReduce || kind == FactorKind::kLookup;
    const bool keeps = sums || (kind == FactorKind::kMap && !list[f].begin_attr && list[f].group.rows == 0);
    if (d.whole()) {
      d.any &= keeps;
      continue;
    }
    switch (list[f].kind) {
      case FactorKind::kMap: break;
      case FactorKind::kWindow:
        if (d.any) no_rule("{} makes any {} of {}", op.name, d.set.size(), list[f].name);
        break;
      case FactorKind::kReduce:
      case FactorKind::kLookup:
        if (d.any && list[f].kind == FactorKind::kLookup) d = looked_up(f, d.set.size());
        break;
      case FactorKind::kStream:
        if (d.any || d.set.runs().size() != 1)
          no_rule("{} reads {} of {} at once", op.name, to_string(d.set), list[f].name);
        break;
      default: refuse("{} may not be cut along {}, of which operands hold {}", op.name, list[f].name, to_string(d.set));
    }
    for (const Interval& run : d.set.runs())
      if (run.begin < 0 || run.end > list[f].extent)
        refuse("{} is cut to {} along {}, which has {}", op.name, to_string(d.set), list[f].name, list[f].extent);
      else if (!d.any && list[f].unit > 1 && (run.begin % list[f].unit || run.end % list[f].unit))
        refuse("{} is cut within a unit of {} along {}", op.name, list[f].unit, list[f].name);
    cut.push_back(f);
  }
}

// Rows of groups: those of the micro-batch, in which the device has some of the samples.
void Kernels::Match::find_groups() {
  int64_t begin = 0;  // of the device's samples in those of its groups
  for (size_t f = 0; f < list.size(); ++f) {
    const GroupRows& g = list[f].group;
    if (g.rows == 0) continue;
    if (sets[f].any || sets[f].set.runs().size() != 1) no_rule("groups of {} of {}", to_string(sets[f].set), op.name);
    const Interval mine = sets[f].set.runs()[0];
    const auto rows_of = [&](Interval rows) {
      if (mine.begin < rows.begin * g.rows || mine.end > rows.end * g.rows || (groups && !(*groups == rows)))
        refuse("it has samples {} and groups [{}:{}] of {} samples each", to_string(sets[f].set), rows.begin, rows.end,
               g.rows);
      groups = rows;
      begin = rows.size() > 1 ? mine.begin - rows.begin * g.rows : 0;
    };
    for (const int i : g.inputs) {
      const auto at = static_cast<size_t>(i);
      if (at >= call.in.size() || !call.in[at].value || ref.constant(call.in[at].value->tensor)) continue;
      const auto digits = call.in[at].value->region.in(ref.tensor(op.inputs[at]).dims);
      if (!digits || digits->digits()[0].set.runs().size() != 1 || digits->digits()[0].any)
        no_rule("groups of operand {} of {}", i, op.name);
      rows_of(digits->digits()[0].set.runs()[0]);
    }
    for (const int o : g.outputs) {
      const int64_t n = call.out.at(static_cast<size_t>(o)).local.at(0);
      const int64_t said = n > 1 && list[f].begin_attr ? attr_int(call.attrs, list[f].begin_attr) : mine.begin % g.rows;
      const int64_t first = (mine.begin - said) / g.rows;
      rows_of({first, first + n});
    }
    if (list[f].begin_attr && attr_int(call.attrs, list[f].begin_attr) != begin)
      refuse("attribute {} is {}, and the device's samples begin {} behind the first of their groups",
             list[f].begin_attr, attr_int(call.attrs, list[f].begin_attr), begin);
  }
}

// The terms of what is linear in operands that have not all of them.
void Kernels::Match::find_terms() {
  if (partial.empty()) return;
  combine = call.in[partial[0]].value->combine;
  const auto holds = [&](const std::vector<int>& set) {
    return std::all_of(partial.begin(), partial.end(),
                       [&](size_t i) { return std::find(set.begin(), set.end(), static_cast<int>(i)) != set.end(); });
  };
  const auto linear = std::find_if(shape.factors->linear.begin(), shape.factors->linear.end(), holds);
  const bool same_combine =
      std::all_of(partial.begin(), partial.end(), [&](size_t i) { return call.in[i].value->combine == combine; });
  const auto alone = [&](size_t i) {
    return std::ranges::count(shape.factors->linear, std::vector<int>{static_cast<int>(i)}) > 0;
  };
  std::optional<Terms> pairs;  // linear in either of two
  if (linear == shape.factors->linear.end() && partial.size() == 2 && alone(partial[0]) && alone(partial[1]))
    pairs = call.in[partial[0]].value->terms.times(call.in[partial[1]].value->terms);
  if (!same_combine || combine != Combine::kSum || (linear == shape.factors->linear.end() && !pairs)) {
    const Terms& some = call.in[partial[0]].value->terms;
    const bool one_box = some.summands().size() == 1 && some.summands()[0].boxes.size() == 1;
    if (some.counted() && !one_box) no_rule("terms of {} of which there are many alike", op.name);
    refuse("operand {} has not all terms: {}; {} is not linear in it", partial[0],
           describe(ref, *call.in[partial[0]].value), op.name);
  }
  if (linear == shape.factors->linear.end() || linear->size() == 1)  // of one sum by either of two operands
    for (const size_t i : partial)
      for (size_t j = 0; j < call.in.size(); ++j)
        if (j != i && call.in[j].value && alone(j)) tell_apart(i, op.inputs[j]);
  if (pairs) terms = std::move(*pairs);
  const std::vector<int> together = pairs ? std::vector<int>{} : *linear;
  // What two operands have in common is told apart by which of them it comes from.
  const bool apart = together.size() > 1 && (op.code != OpCode::k_add || ref.shares_summands(id));
  for (size_t k = 0; k < together.size(); ++k) {
    const auto at = [&](size_t which) -> const Value* {
      const auto i = static_cast<size_t>(together[which]);
      return i < call.in.size() ? call.in[i].value : nullptr;
    };
    const Value* v = at(k);
    if (!v || ref.is_zero(v->tensor)) continue;  // zeros have no terms
    // The same terms of one tensor: what is linear in it is counted once, in both.
    const auto is_twin = [&](size_t n) {
      const auto i = static_cast<size_t>(together[n]), mine = static_cast<size_t>(together[k]);
      return i < op.inputs.size() && mine < op.inputs.size() && op.inputs[i] != kNone && op.inputs[mine] != kNone &&
             ref.root(op.inputs[i]) == ref.root(op.inputs[mine]);
    };
    bool twice = false;
    for (size_t before = 0; before < k; ++before) {
      if (!is_twin(before)) continue;
      if (!at(before) || at(before)->tensor != v->tensor || !(at(before)->terms == v->terms))
        no_rule("{} reads {} twice, with unlike terms", op.name, ref.name(v->tensor));
      twice = true;
    }
    if (twice) continue;
    Terms mine = v->terms;
    name_by_sum(ref, v->tensor, mine);
    if (mine.whole()) mine.add_summand(v->tensor);
    if (mine.summands().size() > kMany) unite(ref, v->tensor, mine);
    if (mine.summands().size() > kVeryMany)
      mine.unite_lots([&](const std::vector<TensorId>& names) { return ref.group_of(v->tensor, names); });
    if (apart) mine.rename_each([&](TensorId summand) { return ref.image_of(summand, v->tensor); });
    if (!terms.beside(mine)) no_rule("{} adds terms of one sum to others of it: {}", op.name, describe(ref, *v));
    if (terms.summands().size() > kMost) no_rule("{} adds more than {} summands of unlike terms", op.name, kMost);
  }
}

// What the operand has terms of, where the other one is made of that too.
void Kernels::Match::tell_apart(size_t operand, TensorId other) {
  for (const Summand& s : call.in[operand].value->terms.summands()) {
    if (ref.is_made_of(other, s.tensor)) ways.emplace(ref.root(s.tensor), operand);
    for (const TermBox& box : s.boxes)
      for (const FactorSet& f : box)
        for (const TensorId made : ref.graph().op(f.key.op).outputs)
          if (made != kNone && ref.is_made_of(other, made)) ways.emplace(ref.root(made), operand);
  }
}

Value Kernels::Match::result(size_t o) const {
  const bool streams = std::ranges::any_of(cut, [&](size_t f) { return list[f].kind == FactorKind::kStream; });
  const Tensor& whole = ref.tensor(op.outputs[o]);
  // Parts of a sum may be wider than the sum, which is rounded when all are there.
  const bool wide = call.out[o].dtype == accumulate_dtype(whole.dtype) &&
                    (streams || ((!cut.empty() || !partial.empty()) &&
                                 attr_string(call.attrs, "out_dtype") == name_of(call.out[o].dtype)));
  if (call.out[o].dtype != whole.dtype && !wide)
    refuse("it makes {} in {}; {} of the one-device program in {}", whole.name, name_of(call.out[o].dtype), op.name,
           name_of(whole.dtype));
  if (call.out[o].dtype != whole.dtype && !streams)
    kernels.exemptions_.insert("parts of products are added up in f32 and rounded once");
  Value v{.tensor = ref.root(op.outputs[o]), .dtype = call.out[o].dtype};
  v.region = of_each_element(op) ? call.in[0].value->region : region_of(o);
  v.terms = terms, v.combine = combine;
  const auto image = [&](TensorId summand) { return ref.image_of(summand, v.tensor); };
  const TensorId from = partial.empty() ? kNone : call.in[partial[0]].value->tensor;
  const TensorId all = partial.size() == 1 && op.code != OpCode::k_add ? from : v.tensor;
  if (v.terms.summands().size() > kMany) unite(ref, all, v.terms);
  const bool own = v.terms.summands().size() == 1 && v.terms.summands()[0].tensor == from;
  if (!ways.empty()) {
    // By the operand; of both, by what is in which.
    const size_t one = ways.begin()->second;
    const bool both = std::ranges::any_of(ways, [&](const auto& way) { return way.second != one; });
    v.terms.rename_each([&](TensorId summand) {
      TensorId name = image(summand);
      const auto by = [&](size_t operand) {
        for (size_t n = 0; n <= operand; ++n) name = image(name);
      };
      if (!both) by(one);
      for (const auto& [of, operand] : ways)
        if (both) name = ref.image_of(name, of), by(operand);
      return name;
    });
  } else if (own) {
    v.terms.rename(v.tensor);
  } else if (op.code != OpCode::k_add && from != v.tensor) {  // not as they are
    v.terms.rename_each(image);
  }
  name_terms(o, v);
  v.order = order_of(v);
  return v;
}

// What the factors' positions make of a result.
Region Kernels::Match::region_of(size_t o) const {
  const Tensor& whole = ref.tensor(op.outputs[o]);
  const Layout& layout = shape.out[o];
  std::vector<Digit> digits;
  Dims local(layout.dims.size(), 1);
  for (size_t k = 0; k < layout.owner.size(); ++k) {
    const int f = layout.owner[k];
    if (group_of(list, o, false) >= 0 && layout.dim[k] == 0) {
      digits.push_back({layout.digits[k], Set(*groups)});
      local[0] *= groups->size();
      continue;
    }
    digits.push_back(f < 0 ? Digit{layout.digits[k], Set::first(layout.digits[k])} : sets[static_cast<size_t>(f)]);
    if (digits.back().extent != layout.digits[k]) no_rule("the extent of {}", whole.name);
    local[static_cast<size_t>(layout.dim[k])] *= digits.back().set.size();
  }
  if (!same_rows(op, local, call.out[o].local, true))
    refuse("the operands give {} of {}, and the result has {}", to_string(local), whole.name,
           to_string(call.out[o].local));
  return Region(std::move(digits));
}

// What says the result's bits; what is another view of an operand has those of it.
uint64_t Kernels::Match::order_of(const Value& result) const {
  if (!kernels.tree_.asked()) return 0;
  std::vector<Dims> dims;
  // Elements for themselves, or fixed groups of them; otherwise bits depend on how much a kernel makes at once.
  const auto owns_all = [](const Layout& l) { return std::ranges::count(l.owner, -1) == 0; };
  const bool of_groups = std::ranges::any_of(list, [](const Factor& f) { return f.group.rows > 0; });
  const bool maps = std::ranges::all_of(list, [](const Factor& f) { return f.kind == FactorKind::kMap; });
  const bool each = has_flag(op.code, kElementwise) || has_flag(op.code, kRearranges) || op.code == OpCode::k_slice ||
                    op.code == OpCode::k_concat || of_groups ||
                    (maps && std::ranges::all_of(shape.in, owns_all) && std::ranges::all_of(shape.out, owns_all));
  for (const Operand& o : call.in) {
    if (o.value && o.value->tensor == result.tensor) return o.value->order;
    if (!each) dims.push_back(o.local);
  }
  for (const Digit& d : result.region.digits())  // not where, but in how many pieces of it
    for (size_t k = 0; k < d.set.runs().size() && !each; ++k) dims.push_back({d.set.runs()[k].size()});
  return kernels.tree_.made(result, call.whole, call.orders(), dims);
}

std::optional<size_t> Kernels::Match::inner_of(size_t f) const {
  for (size_t k = 0; k < splits.size(); ++k)
    if (splits[k].factor == static_cast<int>(f)) return list.size() - splits.size() + k;
  return {};
}

// The positions of a factor that is cut. One that was divided is one again where its positions are known; none: they
// are told with those of the other half.
std::optional<FactorSet> Kernels::Match::cut_of(size_t f) const {
  const auto of_factor = [&](size_t k) {
    return FactorSet{{id, static_cast<int32_t>(k)}, list[k].extent, sets[k].set, sets[k].any};
  };
  const auto known = [&](size_t k) { return !sets[k].any || sets[k].whole(); };
  const size_t first = list.size() - splits.size();
  const size_t outer = f < first ? f : static_cast<size_t>(splits[f - first].factor);
  const std::optional<size_t> inner = inner_of(outer);
  if (list[f].kind != FactorKind::kReduce || !inner || !known(outer) || !known(*inner)) return of_factor(f);
  if (f != outer && !sets[outer].whole()) return {};
  FactorSet both = of_factor(outer);
  both.extent *= sets[*inner].extent, both.any = false;
  const auto set = both.set.times(sets[*inner].set, sets[*inner].extent);
  if (!set) no_rule("{} of {} and {} of {}", to_string(both.set), list[f].name, to_string(sets[*inner].set), op.name);
  both.set = *set;
  return both;
}

// The terms of the factors that are cut, beside those of the operands.
void Kernels::Match::name_terms(size_t o, Value& v) const {
  TermBox mine;
  for (const size_t f : cut) {
    const bool streamed =
        list[f].kind == FactorKind::kStream && (o >= list[f].outputs.size() || !list[f].outputs[o].present());
    if (!streamed && (o >= list[f].partial.size() || !list[f].partial[o])) continue;
    std::optional<FactorSet> positions = cut_of(f);
    if (!positions) continue;
    FactorSet& terms_of = *positions;
    if (list[f].group.rows && group_of(list, o, false) == static_cast<int>(f)) {
      // Those of its own rows are all that there are.
      const Interval run = sets[f].set.runs()[0];
      terms_of.extent = groups->size() * list[f].group.rows;
      terms_of.set =
          Set(Interval{run.begin - groups->begin * list[f].group.rows, run.end - groups->begin * list[f].group.rows});
      if (terms_of.set.is_first(terms_of.extent)) continue;
    }
    mine.push_back(terms_of);
    const bool merges = streamed && list[f].merge != OpCode{};
    const Joining how = merges ? Joining(list[f].merge) : Joining(list[f].combine_of(o));
    if ((mine.size() > 1 || !terms.whole()) && how != v.combine) no_rule("{} combines in two ways", op.name);
    v.combine = how;
  }
  std::ranges::sort(mine, {}, &FactorSet::key);
  if (const auto key = !mine.empty() && call.in.size() == 1 ? groups_behind(ref, op.inputs[0]) : std::nullopt) {
    const auto groups = std::ranges::find_if(mine, [&](const FactorSet& f) {
      return list[static_cast<size_t>(f.key.factor)].inputs[0] == SubAxis{0, 1, 1};
    });
    if (groups != mine.end()) count_of_batch(ref, *key, mine, groups, v.terms);
  }
  if (!mine.empty()) {
    if (v.terms.whole())
      v.terms.add_summand(v.tensor, mine);
    else
      v.terms.restrict(mine);
  }
}

// Operands must have the dims that their parts have.
void Kernels::Match::check_operands() const {
  check_shapes(call);
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (!call.in[i].value) continue;
    if (of_each_element(op) && call.in[i].value->region.size() != element_count(call.in[i].local))
      refuse("operand {} has the shape {}; {} has {} elements", i, to_string(call.in[i].local),
             describe(ref, *call.in[i].value), call.in[i].value->region.size());
    if (of_each_element(op)) continue;                                                        // in whatever shape
    if (has_flag(op.code, kElementwise) && ref.constant(call.in[i].value->tensor)) continue;  // of any shape
    Dims local(shape.in[i].dims.size(), 1);
    for (size_t k = 0; k < shape.in[i].owner.size(); ++k) {
      const int f = shape.in[i].owner[k];
      if (group_of(list, i, true) >= 0 && shape.in[i].dim[k] == 0) {
        local[0] *= groups ? groups->size() : 0;
        continue;
      }
      int64_t n = shape.in[i].digits[k];
      if (f >= 0 && !list[static_cast<size_t>(f)].reads_through(i))
        n = sets[static_cast<size_t>(f)].set.size();
      else if (f >= 0 && read[static_cast<size_t>(f)])
        n = read[static_cast<size_t>(f)]->size();
      local[static_cast<size_t>(shape.in[i].dim[k])] *= n;
    }
    if (!same_rows(op, local, call.in[i].local, i == 0))
      refuse("operand {} has the shape {}; {} is {}", i, to_string(call.in[i].local), describe(ref, *call.in[i].value),
             to_string(local));
  }
}

}  // namespace whale::proof
