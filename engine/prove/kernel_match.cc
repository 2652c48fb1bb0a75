// One op of the one-device program against what a kernel reads: which positions of its factors, which attributes, which
// part of its result.
#include <algorithm>
#include <cmath>
#include <optional>

#include "prove/kernel.h"

namespace whale::proof {
namespace {

bool equal_floats(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool equal(const Attr& a, const Attr& b) {
  const auto *x = std::get_if<double>(&a), *y = std::get_if<double>(&b);
  return x && y ? equal_floats(*x, *y) : a == b;
}

// A product's leading dimensions may be one: rows of a matrix.
bool same_rows(const Op& op, const Dims& a, const Dims& b) {
  if (of_each_element(op)) return element_count(a) == element_count(b);
  if (a == b || !has_flag(op.code, kProduct) || a.empty() || b.empty()) return a == b;
  return a.back() == b.back() && element_count(a) == element_count(b);
}

// All but the last dimension as one.
Dims in_rows(const Dims& dims) {
  if (dims.size() <= 2) return dims;
  return {element_count(dims) / dims.back(), dims.back()};
}
// Does it make some rows of a product, which may be no box of its leading dimensions (lower/chunk_products)?
bool makes_rows(const KernelCall& call) {
  return has_flag(call.code, kProduct) && call.name.find('#') != call.name.npos;
}

// A factor as an outer one, in its place, and an inner one, the last.
void divide(Factors& factors, size_t f, int64_t inner) {
  factors.list.push_back(factors.list[f]);
  Factor &rows = factors.list[f], &columns = factors.list.back();
  rows.extent /= inner, columns.extent = inner;
  const auto each = [&](std::vector<SubAxis>& outer_of, std::vector<SubAxis>& inner_of) {
    for (size_t k = 0; k < outer_of.size(); ++k) {
      if (!outer_of[k].present()) continue;
      outer_of[k].inner *= inner;
      inner_of[k].outer *= rows.extent;
    }
  };
  each(rows.inputs, columns.inputs), each(rows.outputs, columns.outputs);
}

constexpr const char* kWindowAttrs[] = {"padding", "spatial", "output_padding"};

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
// groups that are added here go from `mine`, and `terms` (those of what is added; whole: all of these groups) are
// counted from the batch's begin.
void count_of_batch(Reference& ref, const FactorKey& key, TermBox& mine, TermBox::iterator groups, Terms& terms) {
  const Factor& factor = ref.factors(ref.graph().op(key.op)).list[static_cast<size_t>(key.factor)];
  const int64_t rows = factor.group.rows;
  if (groups->any || groups->set.runs().size() != 1 || groups->extent * rows != factor.extent) return;
  const Interval at = groups->set.runs()[0];
  if (terms.whole()) {
    *groups = {key, factor.extent, Set(Interval{at.begin * rows, at.end * rows})};
  } else if (terms.all_have(key, at.size() * rows)) {
    terms.count_from(key, at.begin * rows, factor.extent);
    mine.erase(groups);
  }
}

// The positions of a dimension that a box says.
Set positions(const Box& box, Interval samples, size_t dim, int64_t extent, int64_t local) {
  std::optional<Set> out;
  const auto cut = [&](const SubAxis& s, Interval part) {
    const auto rows = places_of(s.outer, extent / (s.outer * s.inner), s.inner, Set(part));
    if (!rows) no_rule("a box of many parts");
    Set both;
    const Set before = out ? *out : Set::first(extent);
    for (const Interval& a : before.runs())
      for (const Interval& b : rows->runs()) both.append({std::max(a.begin, b.begin), std::min(a.end, b.end)});
    out = std::move(both);
  };
  if (box.batch.present() && box.batch.dim == static_cast<int>(dim)) cut(box.batch, samples);
  for (const BoxCut& c : box.cuts)
    if (c.sub_axis.dim == static_cast<int>(dim)) cut(c.sub_axis, {c.begin, c.begin + c.size});
  if (out && box.origin[dim])
    refuse("the box has an origin of {} in dimension {} beside its cuts", box.origin[dim], dim);
  if (!out) out = Set(Interval{box.origin[dim], box.origin[dim] + local});
  return *out;
}

// Types have two names, "f32" and numpy's.
bool is_same_dtype(std::string_view name, const Attr& a, const Attr& b) {
  const auto *one = std::get_if<std::string>(&a), *other = std::get_if<std::string>(&b);
  return name.ends_with("dtype") && one != nullptr && other != nullptr && !one->empty() && !other->empty() &&
         parse_dtype(*one) == parse_dtype(*other);
}

}  // namespace

// The factor whose digit the region divides; none: it divides none that may be divided.
FactorSplit Kernels::split_of(const Region& region, const Layout& layout, const std::vector<Factor>& list) {
  size_t k = 0;
  int64_t left = 1;  // of the region's digit at hand, where it has several of the layout's
  for (const Digit& d : region.digits()) {
    if (d.extent == 1) continue;
    for (left *= d.extent; left > 1; ++k) {
      while (k < layout.digits.size() && layout.digits[k] == 1) ++k;
      if (k == layout.digits.size()) return {};
      const int64_t n = layout.digits[k];
      if (left % n == 0) {
        left /= n;
        continue;
      }
      if (n % left || layout.owner[k] < 0) return {};
      const Factor& f = list[static_cast<size_t>(layout.owner[k])];
      const bool plain =
          f.kind == FactorKind::kMap && f.unit == 1 && f.size_attrs.empty() && !f.begin_attr && !f.group.rows;
      return plain ? FactorSplit{layout.owner[k], n / left} : FactorSplit{};
    }
  }
  return {};
}

const Kernels::Shape& Kernels::shape_of(OpId id, bool rows, const FactorSplit& split) {
  const auto [at, added] = shapes_.try_emplace({id, rows, split});
  Shape& shape = at->second;
  if (!added) return shape;
  const Op& op = ref_.graph().op(id);
  if (rows) {
    OpView view = view_of(ref_.graph(), op);
    for (std::vector<TensorType>* types : {&view.inputs, &view.outputs})
      for (TensorType& t : *types) t.dims = in_rows(t.dims);
    shape.own = def(op.code).factors(view);
    shape.factors = &shape.own;
  } else {
    shape.factors = &ref_.factors(op);
  }
  if (split.factor >= 0) {
    shape.own = *shape.factors;
    shape.factors = &shape.own;
    divide(shape.own, static_cast<size_t>(split.factor), split.inner);
  }
  const auto lay_out = [&](TensorId tensor, size_t operand, bool input) {
    Layout out;
    if (tensor == kNone) return out;
    out.dims = rows ? in_rows(ref_.tensor(tensor).dims) : ref_.tensor(tensor).dims;
    const Dims& dims = out.dims;
    for (size_t d = 0; d < dims.size(); ++d) {
      std::vector<int64_t> bounds{1, dims[d]};
      struct Own {
        int64_t outer, end;
        int factor;
      };
      std::vector<Own> own;
      for (size_t f = 0; f < shape.factors->list.size(); ++f) {
        const Factor& factor = shape.factors->list[f];
        const auto& list = input ? factor.inputs : factor.outputs;
        if (operand >= list.size() || !list[operand].present() || list[operand].dim != static_cast<int>(d)) continue;
        const SubAxis& s = list[operand];
        const int64_t end = dims[d] / s.inner;
        own.push_back({s.outer, end, static_cast<int>(f)});
        bounds.push_back(s.outer), bounds.push_back(end);
      }
      std::sort(bounds.begin(), bounds.end());
      bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
      for (size_t b = 0; b + 1 < bounds.size(); ++b) {
        if (bounds[b + 1] % bounds[b]) no_rule("the factors of {} overlap", op.name);
        int owner = -1;
        for (const Own& o : own)
          if (o.outer <= bounds[b] && bounds[b + 1] <= o.end) {
            if (owner >= 0 || o.outer != bounds[b] || o.end != bounds[b + 1])
              no_rule("the factors of {} overlap", op.name);
            owner = o.factor;
          }
        out.digits.push_back(bounds[b + 1] / bounds[b]), out.owner.push_back(owner);
        out.dim.push_back(static_cast<int>(d));
      }
    }
    return out;
  };
  for (size_t i = 0; i < op.inputs.size(); ++i) shape.in.push_back(lay_out(op.inputs[i], i, true));
  for (size_t o = 0; o < op.outputs.size(); ++o) shape.out.push_back(lay_out(op.outputs[o], o, false));
  return shape;
}

// The part of what is read through a window that `held` of the source makes, as the kernel's attributes say: `said`,
// where another operand has one. What it takes for padding must be beyond the source's ends.
Interval Kernels::made_through(const KernelCall& call, const Op& op, const Factor& factor, Interval held,
                               const std::optional<Digit>& said) const {
  const WindowRead& w = factor.window;
  const auto entry = [&](const char* name, size_t at) {
    const auto found = call.attrs.find(name);
    const auto* list = found == call.attrs.end() ? nullptr : std::get_if<Ints>(&found->second);
    return list != nullptr && at < list->size() ? (*list)[at] : 0;
  };
  const int64_t low = entry("padding", 2 * factor.window_dim), high = entry("padding", 2 * factor.window_dim + 1);
  int64_t size = said ? said->set.size() : w.result == 1 ? 1 : 0;
  for (size_t o = 0; o < call.out.size() && size == 0; ++o)
    if (factor.outputs.at(o).present()) size = call.out[o].local.at(static_cast<size_t>(factor.outputs[o].dim));
  // Element k of the result reads from k * stride - low of the operand on; transposed, the other way round.
  const int64_t first = w.transposed ? low - w.low + held.begin * w.stride : held.begin + w.low - low;
  if (!w.transposed && first % w.stride) refuse("padding {} of {} lies between two of its results", low, factor.name);
  const int64_t begin = w.transposed ? first : first / w.stride;
  const Interval made{begin, begin + size};
  if (size <= 0 || begin < 0 || made.end > w.result)
    refuse("with padding {}, [{}:{}] of {} would give [{}:{}] of {}", low, held.begin, held.end, factor.name,
           made.begin, made.end, w.result);
  if (said && !(said->set == Set(made)))
    refuse("with padding {}, [{}:{}] of {} gives [{}:{}], and another operand has {}", low, held.begin, held.end,
           factor.name, made.begin, made.end, to_string(said->set));
  const auto rounded_up = [](int64_t a, int64_t b) { return a > 0 ? (a + b - 1) / b : -(-a / b); };
  Interval needed{made.begin * w.stride - w.low, (made.end - 1) * w.stride - w.low + w.reach};
  if (w.transposed)
    needed = {rounded_up(made.begin + w.low - w.reach + 1, w.stride), (made.end - 1 + w.low) / w.stride + 1};
  needed = {std::max<int64_t>(needed.begin, 0), std::min(needed.end, w.source)};
  if (needed.size() > 0 && (needed.begin < held.begin || needed.end > held.end))
    refuse("[{}:{}] of {} needs [{}:{}] of what it reads, and [{}:{}] is there", made.begin, made.end, factor.name,
           needed.begin, needed.end, held.begin, held.end);
  // As many as the kernel makes of these.
  const bool gradient = call.attrs.contains("spatial");
  const int64_t more = entry("output_padding", factor.window_dim);
  const bool fits = !w.transposed ? (held.size() + low + high - w.reach) / w.stride + 1 == size
                    : gradient    ? entry("spatial", factor.window_dim) == size &&
                                     (size + low + high - w.reach) / w.stride + 1 == held.size()
                               : (held.size() - 1) * w.stride + w.reach + more - low - high == size;
  if (!fits)
    refuse("padding {} and {} do not make {} of {} out of {} ({})", low, high, size, factor.name, held.size(), op.name);
  return made;
}

std::vector<Value> Kernels::match(const KernelCall& call, OpId id, const FactorSplit& split) {
  const Op& op = ref_.graph().op(id);
  const Shape& shape = shape_of(id, makes_rows(call), split);
  const std::vector<Factor>& list = shape.factors->list;
  if (call.out.size() > op.outputs.size())
    refuse("it makes {} results, {} of the one-device program {}", call.out.size(), op.name, op.outputs.size());
  if (has_flag(call.code, kRandom) && call.key != op.key)
    refuse("random numbers of key {}, where {} of the one-device program has {}", call.key, op.name, op.key);

  // Which positions of each factor.
  std::vector<std::optional<Digit>> of(list.size());
  const auto take = [&](int f, const Digit& d, size_t operand) {
    std::optional<Digit>& mine = of[static_cast<size_t>(f)];
    if (!mine || (mine->any && mine->set.size() == d.set.size())) {
      mine = d;
    } else if (d.any ? mine->set.size() != d.set.size() : !(mine->set == d.set)) {
      refuse("operand {}, {}, is cut to {} along {}; other operands to {}", operand,
             call.in[operand].value ? describe(ref_, *call.in[operand].value) : "absent", to_string(d.set),
             list[static_cast<size_t>(f)].name, to_string(mine->set));
    }
  };
  std::vector<size_t> partial;
  std::vector<std::optional<Interval>> read(list.size());  // through a window
  for (size_t i = 0; i < call.in.size(); ++i) {
    const Value* v = call.in[i].value;
    if (!v) continue;
    const Tensor& whole = ref_.tensor(op.inputs[i]);
    if (v->dtype != whole.dtype && !is_asked_sum(*v))
      refuse("operand {}, {}, is {}; {} of the one-device program reads {}", i, describe(ref_, *v), name_of(v->dtype),
             op.name, name_of(whole.dtype));
    exempt_sum(*v);
    if (!v->terms.whole()) partial.push_back(i);
    if (ref_.constant(v->tensor)) continue;
    const auto digits = v->region.spread(shape.in[i].dims, call.in[i].local).in(shape.in[i].digits);
    if (!digits && split.factor < 0)
      if (const FactorSplit two = split_of(v->region, shape.in[i], list); two.factor >= 0) return match(call, id, two);
    if (!digits) no_rule("{} of operand {}, of {}", to_string(v->region), i, to_string(whole.dims));
    for (size_t k = 0; k < digits->digits().size(); ++k) {
      const Digit& d = digits->digits()[k];
      const int f = shape.in[i].owner[k];
      if (group_of(list, i, true) >= 0 && shape.in[i].dim[k] == 0) continue;  // below, when samples are known
      if (f >= 0 && list[static_cast<size_t>(f)].reads_through(i)) {
        if ((d.any && !d.whole()) || d.set.runs().size() != 1)
          no_rule("{} reads {} of operand {} through a window", op.name, to_string(d.set), i);
        std::optional<Interval>& mine = read[static_cast<size_t>(f)];
        if (mine && !(*mine == d.set.runs()[0]))
          refuse("operand {} has {} of {}, another one [{}:{}]", i, to_string(d.set), list[static_cast<size_t>(f)].name,
                 mine->begin, mine->end);
        mine = d.set.runs()[0];
      } else if (f >= 0) {
        take(f, d, i);
      } else if (!d.whole()) {
        refuse("operand {} is {}; {} needs all of dimension {}", i, describe(ref_, *v), op.name, shape.in[i].dim[k]);
      }
    }
  }
  // Constants lie wherever the others do.
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (!call.in[i].value || !ref_.constant(call.in[i].value->tensor)) continue;
    const Layout& layout = shape.in[i];
    for (size_t k = 0; k < layout.owner.size(); ++k) {
      const auto f = static_cast<size_t>(layout.owner[k]), dim = static_cast<size_t>(layout.dim[k]);
      if (layout.owner[k] < 0 || of[f] || dim >= call.in[i].local.size()) continue;
      if (std::count(layout.dim.begin(), layout.dim.end(), layout.dim[k]) == 1)
        of[f] = Digit{layout.digits[k], Set::first(call.in[i].local[dim]), true};
    }
  }
  for (size_t f = 0; f < list.size(); ++f)
    for (size_t i = 0; i < call.in.size() && list[f].window.source == 1; ++i)  // which has no digit of its own
      if (list[f].reads_through(i) && call.in[i].value && !ref_.constant(call.in[i].value->tensor))
        read[f] = Interval{0, call.in[i].local.at(static_cast<size_t>(list[f].inputs[i].dim))};
  for (size_t f = 0; f < list.size(); ++f)
    if (read[f]) of[f] = Digit{list[f].extent, Set(made_through(call, op, list[f], *read[f], of[f]))};
  // Factors that results alone have.
  for (size_t o = 0; o < call.out.size(); ++o) {
    const Layout& layout = shape.out[o];
    const Dims& dims = ref_.tensor(op.outputs[o]).dims;
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
  std::vector<Digit> sets;
  TermBox box;
  std::vector<size_t> cut;  // factors that are reduced and not whole
  for (size_t f = 0; f < list.size(); ++f) {
    sets.push_back(of[f] ? *of[f] : Digit{list[f].extent, Set::first(list[f].extent)});
    const Digit& d = sets.back();
    if (d.extent != list[f].extent) no_rule("the extent of {} of {}", list[f].name, op.name);
    if (d.whole()) continue;
    switch (list[f].kind) {
      case FactorKind::kMap:
      case FactorKind::kWindow: break;
      case FactorKind::kReduce:
      case FactorKind::kLookup:
        if (d.any && list[f].kind == FactorKind::kLookup) no_rule("{} looks up any of {}", op.name, list[f].name);
        break;
      case FactorKind::kStream:
        if (d.any || d.set.runs().size() != 1)
          no_rule("{} reads {} of {} at once", op.name, to_string(d.set), list[f].name);
        break;
      default: refuse("{} may not be cut along {}, of which operands hold {}", op.name, list[f].name, to_string(d.set));
    }
    for (const Interval& run : d.set.runs())
      if (!d.any && list[f].unit > 1 && (run.begin % list[f].unit || run.end % list[f].unit))
        refuse("{} is cut within a unit of {} along {}", op.name, list[f].unit, list[f].name);
    cut.push_back(f);
  }

  // Rows of groups: those of the micro-batch, in which the device has some of the samples.
  std::optional<Interval> groups;
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
      if (at >= call.in.size() || !call.in[at].value) continue;
      const auto digits = call.in[at].value->region.in(ref_.tensor(op.inputs[at]).dims);
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

  // Terms that operands do not have.
  Terms terms;
  Joining combine;
  if (!partial.empty()) {
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
      if (call.in[partial[0]].value->terms.counted()) no_rule("terms of {} of which there are many alike", op.name);
      refuse("operand {} has not all terms: {}; {} is not linear in it", partial[0],
             describe(ref_, *call.in[partial[0]].value), op.name);
    }
    if (pairs) terms = std::move(*pairs);
    const std::vector<int> together = pairs ? std::vector<int>{} : *linear;
    const Value* unlike = nullptr;
    const auto beside = [&](bool united) {
      for (const int i : together) {
        const Value* v = static_cast<size_t>(i) < call.in.size() ? call.in[static_cast<size_t>(i)].value : nullptr;
        if (!v) continue;
        Terms mine = v->terms;
        if (mine.whole()) mine.add_summand(v->tensor);
        if (united) mine.unite(v->tensor);
        if (!terms.beside(mine)) return unlike = v, false;
      }
      return true;
    };
    // Two sums may have a summand in common, of which each is another image: each as one then.
    if (!beside(false)) {
      terms = {};
      if (!beside(true)) no_rule("{} adds terms of one sum to others of it: {}", op.name, describe(ref_, *unlike));
    }
  }

  // What each result is.
  const bool streams = std::ranges::any_of(cut, [&](size_t f) { return list[f].kind == FactorKind::kStream; });
  std::vector<Value> out;
  for (size_t o = 0; o < call.out.size(); ++o) {
    const Tensor& whole = ref_.tensor(op.outputs[o]);
    // Parts of a sum may be wider than the sum, which is rounded when all are there.
    const bool wide = call.out[o].dtype == accumulate_dtype(whole.dtype) &&
                      (streams || ((!cut.empty() || !partial.empty()) &&
                                   attr_string(call.attrs, "out_dtype") == name_of(call.out[o].dtype)));
    if (call.out[o].dtype != whole.dtype && !wide)
      refuse("it makes {} in {}; {} of the one-device program in {}", whole.name, name_of(call.out[o].dtype), op.name,
             name_of(whole.dtype));
    if (call.out[o].dtype != whole.dtype && !streams)
      exemptions_.insert("parts of products are added up in f32 and rounded once");
    Value v{.tensor = ref_.root(op.outputs[o]), .dtype = call.out[o].dtype};
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
    if (!same_rows(op, local, call.out[o].local))
      refuse("the operands give {} of {}, and the result has {}", to_string(local), whole.name,
             to_string(call.out[o].local));
    v.region = Region(std::move(digits));
    v.terms = terms, v.combine = combine;
    v.terms.rename(v.tensor);
    TermBox mine;
    for (const size_t f : cut) {
      const bool streamed =
          list[f].kind == FactorKind::kStream && (o >= list[f].outputs.size() || !list[f].outputs[o].present());
      if (!streamed && (o >= list[f].partial.size() || !list[f].partial[o])) continue;
      FactorSet terms_of{{id, static_cast<int32_t>(f)}, list[f].extent, sets[f].set, sets[f].any};
      if (list[f].group.rows && group_of(list, o, false) == static_cast<int>(f)) {
        // Those of its own rows are all that there are.
        const Interval run = sets[f].set.runs()[0];
        terms_of.extent = groups->size() * list[f].group.rows;
        terms_of.set =
            Set(Interval{run.begin - groups->begin * list[f].group.rows, run.end - groups->begin * list[f].group.rows});
        if (terms_of.set.is_first(terms_of.extent)) continue;
      }
      mine.push_back(std::move(terms_of));
      const bool merges = streamed && list[f].merge != OpCode{};
      const Joining how = merges ? Joining(list[f].merge) : Joining(list[f].combine_of(o));
      if ((mine.size() > 1 || !terms.whole()) && how != v.combine) no_rule("{} combines in two ways", op.name);
      v.combine = how;
    }
    if (const auto key = !mine.empty() && call.in.size() == 1 ? groups_behind(ref_, op.inputs[0]) : std::nullopt) {
      const auto groups = std::ranges::find_if(mine, [&](const FactorSet& f) {
        return list[static_cast<size_t>(f.key.factor)].inputs[0] == SubAxis{0, 1, 1};
      });
      if (groups != mine.end()) count_of_batch(ref_, *key, mine, groups, v.terms);
    }
    if (!mine.empty()) {
      if (v.terms.whole())
        v.terms.add_summand(v.tensor, mine);
      else
        v.terms.restrict(mine);
    }
    out.push_back(std::move(v));
  }
  // Operands must have the dims that their parts have.
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (!call.in[i].value) continue;
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
    if (!same_rows(op, local, call.in[i].local))
      refuse("operand {} has the shape {}; {} is {}", i, to_string(call.in[i].local), describe(ref_, *call.in[i].value),
             to_string(local));
  }
  std::vector<bool> windows;
  for (const auto& interval : read) windows.push_back(interval.has_value());
  check_attrs(call, op, shape, sets, windows, call.out.empty() ? Dims{} : call.out[0].local);
  check_box(call, op, out);
  return out;
}

void Kernels::check_attrs(const KernelCall& call, const Op& op, const Shape& shape, const std::vector<Digit>& sets,
                          const std::vector<bool>& windows, const Dims& first_result) {
  const OpDef& d = def(op.code);
  Attrs wanted = op.attrs;
  Attrs also;  // what else is as right
  if (wanted.contains("out_dtype") && !call.out.empty()) also["out_dtype"] = std::string(name_of(call.out[0].dtype));
  for (auto& [name, value] : wanted) {
    auto* ints = std::get_if<Ints>(&value);
    if (!ints || op.outputs.empty()) continue;
    const AttrRole role = role_of(d, name);
    if (role == AttrRole::kShape && ints->size() == ref_.tensor(op.outputs[0]).dims.size()) *ints = first_result;
    if (role == AttrRole::kEnds)
      for (size_t k = 0; k < ints->size(); ++k)
        if (call.in[0].local[k] != ref_.tensor(op.inputs[0]).dims[k]) (*ints)[k] = call.in[0].local[k];
  }
  // Of windows, entries that made_through() has looked at; left out are zeros.
  for (const char* name : kWindowAttrs) {
    const auto here = call.attrs.find(name);
    if (here == call.attrs.end() || !op.attrs.contains(name)) continue;
    const auto *mine = std::get_if<Ints>(&here->second), *own = std::get_if<Ints>(&op.attrs.at(name));
    if (mine == nullptr || own == nullptr) continue;
    const size_t each = std::string_view(name) == "padding" ? 2 : 1;
    Ints found = *mine, expected = *own;
    for (size_t f = 0; f < windows.size(); ++f) {
      const Factor& factor = shape.factors->list[f];
      if (!factor.window.present()) continue;
      found.resize(std::max(found.size(), each * factor.window_rank));
      expected.resize(found.size());
      for (size_t k = 0; k < each && windows[f]; ++k)
        expected[each * factor.window_dim + k] = found[each * factor.window_dim + k];
      if (!windows[f] && std::string_view(name) == "spatial") expected[factor.window_dim] = sets[f].set.size();
    }
    if (found == expected) also[name] = here->second;
  }
  for (size_t f = 0; f < sets.size(); ++f) {
    const Factor& factor = shape.factors->list[f];
    if (factor.kind == FactorKind::kStream && !sets[f].whole()) wanted[factor.piece_attr] = factor.extent;
    for (const char* name : factor.size_attrs) {
      if (sets[f].whole())
        also[name] = factor.extent;
      else
        wanted[name] = sets[f].set.size();
    }
    if (factor.begin_attr && factor.group.rows)
      also[factor.begin_attr] = call.attrs.at(factor.begin_attr);  // looked at
    if (!factor.begin_attr || sets[f].whole() || factor.group.rows) continue;
    if (sets[f].any || sets[f].set.runs().size() != 1) no_rule("where the part of {} begins", op.name);
    wanted[factor.begin_attr] = sets[f].set.runs()[0].begin;
  }
  for (const auto& [name, value] : wanted) {
    if (name == kIndexLimit) continue;  // a check
    const auto at = call.attrs.find(name);
    if (at == call.attrs.end()) refuse("attribute {} of {} is missing", name, op.name);
    if (equal(at->second, value) || (also.contains(name) && equal(at->second, also.at(name)))) continue;
    if (is_same_dtype(name, at->second, value)) continue;
    refuse("attribute {} is {}; {} of the one-device program has {}", name, to_string(at->second), op.name,
           to_string(value));
  }
}

// Where the kernel takes its part to lie is where it lies.
void Kernels::check_box(const KernelCall& call, const Op& op, const std::vector<Value>& results) {
  const OpDef& d = def(op.code);
  if (!(d.flags & (kRandom | kOffsetAware))) return;
  const uint32_t placed = d.placed_dims ? d.placed_dims(view_of(ref_.graph(), op)) : ~uint32_t{0};
  if (placed == 0) return;
  TensorId id = op.outputs.empty() ? kNone : op.outputs[0];
  const bool of_input = (d.flags & kBoxOfInput) || id == kNone || ref_.tensor(id).dims.empty();
  if (of_input) id = op.inputs.at(0);
  const Dims& dims = ref_.tensor(id).dims;
  const auto lies = (of_input ? call.in.at(0).value->region : results.at(0).region).in(dims);
  if (!lies) no_rule("where a part of {} lies", op.name);
  static const Box kNowhere;
  const Box& box = call.box ? *call.box : kNowhere;
  if (box.global != dims || box.origin.size() != dims.size())
    refuse("the box is one of {}, and {} of the one-device program is {}", to_string(box.global), op.name,
           to_string(dims));
  const Dims& local = of_input ? call.in[0].local : call.out[0].local;
  for (size_t k = 0; k < dims.size(); ++k) {
    if (!(placed >> k & 1)) continue;
    const Digit& found = lies->digits()[k];
    const Set said = positions(box, call.samples, k, dims[k], local[k]);
    if (found.any ? found.set.size() != said.size() : !(found.set == said))
      refuse("the box says {} of dimension {}, and the operands are {}", to_string(said), k, to_string(found.set));
  }
}

}  // namespace whale::proof
