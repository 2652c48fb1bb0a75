// One op of the one-device program against what a kernel reads: which positions of its factors, which terms, which part
// of its result.
#include <algorithm>
#include <optional>

#include "prove/match.h"

namespace whale::proof {
namespace {

// The leading dimensions of a product's first operand and of its result may be one: rows of a matrix.
bool same_rows(const Op& op, const Dims& a, const Dims& b, bool has_rows) {
  if (a == b || !has_rows || !has_flag(op.code, kProduct) || a.empty() || b.empty()) return a == b;
  return a.back() == b.back() && element_count(a) == element_count(b);
}

}  // namespace

int group_of(const std::vector<Factor>& list, size_t operand, bool input) {
  for (size_t f = 0; f < list.size(); ++f) {
    const std::vector<int>& of = input ? list[f].group.inputs : list[f].group.outputs;
    if (list[f].group.rows && std::find(of.begin(), of.end(), static_cast<int>(operand)) != of.end())
      return static_cast<int>(f);
  }
  return -1;
}

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
  std::optional<Digit>& mine = of[f];
  if (!mine || (mine->any && mine->set.size() == d.set.size())) {
    mine = d;
  } else if (d.any ? mine->set.size() != d.set.size() : !(mine->set == d.set)) {
    refuse("operand {}, {}, is cut to {} along {}; other operands to {}", operand,
           call.in[operand].value ? describe(ref, *call.in[operand].value) : "absent", to_string(d.set), list[f].name,
           to_string(mine->set));
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
      if (f >= 0 && list[f].reads_through(i)) {
        if (d.set.runs().size() != 1)
          no_rule("{} reads {} of operand {} through a window", op.name, to_string(d.set), i);
        if (d.open()) {
          anywhere[f] = d.set.size();
          continue;
        }
        std::optional<Interval>& mine = read[f];
        if (mine && !(*mine == d.set.runs()[0]))
          refuse("operand {} has {} of {}, another one [{}:{}]", i, to_string(d.set), list[f].name, mine->begin,
                 mine->end);
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
      if (f < 0 || of[f]) continue;
      if (group_of(list, o, false) >= 0 && layout.dim[k] == 0) continue;
      const Factor& factor = list[f];
      int64_t n = call.out[o].local[layout.dim[k]];
      for (size_t j = 0; j < layout.owner.size(); ++j) {
        if (j == k || layout.dim[j] != layout.dim[k]) continue;
        const int other = layout.owner[j];
        if (other >= 0 && !of[other]) no_rule("{} makes two factors of one dimension", op.name);
        n /= other < 0 ? layout.digits[j] : of[other]->set.size();
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
      of[f] = d;
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
    if (f < 0 || !of[f] || !of[f]->any || !(placed >> dim & 1)) continue;
    Digit& mine = *of[f];
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
    digits.push_back(f < 0 ? Digit{layout.digits[k], Set::first(layout.digits[k])} : sets[f]);
    if (digits.back().extent != layout.digits[k]) no_rule("the extent of {}", whole.name);
    local[layout.dim[k]] *= digits.back().set.size();
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
                    (maps && has_flag(op.code, kUpdateOp)) ||  // of rows too: each adds what is looked up of it
                    (maps && std::ranges::all_of(shape.in, owns_all) && std::ranges::all_of(shape.out, owns_all));
  for (const Operand& o : call.in) {
    if (o.value && o.value->tensor == result.tensor) return o.value->order;
    if (!each) dims.push_back(o.local);
  }
  for (const Digit& d : result.region.digits())  // not where, but in how many pieces of it
    for (size_t k = 0; k < d.set.runs().size() && !each; ++k) dims.push_back({d.set.runs()[k].size()});
  return kernels.tree_.made(result, call.whole, call.orders(), dims);
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
      if (f >= 0 && !list[f].reads_through(i))
        n = sets[f].set.size();
      else if (f >= 0 && read[f])
        n = read[f]->size();
      local[shape.in[i].dim[k]] *= n;
    }
    if (!same_rows(op, local, call.in[i].local, i == 0))
      refuse("operand {} has the shape {}; {} is {}", i, to_string(call.in[i].local), describe(ref, *call.in[i].value),
             to_string(local));
  }
}

}  // namespace whale::proof
