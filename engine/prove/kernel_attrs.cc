// What a kernel is told beside its operands: attributes, windows, the box of its part.
#include <algorithm>
#include <cmath>
#include <optional>

#include "prove/kernel.h"

namespace whale::proof {
namespace {

constexpr const char* kWindowAttrs[] = {"padding", "spatial", "output_padding"};

}  // namespace

// As GlobalIndex has it: each cut is a digit of the dimension, beside the others.
Set positions(const Box& box, Interval samples, size_t dim, int64_t extent, int64_t local) {
  std::vector<BoxCut> cuts;
  for (const BoxCut& c : box.cuts)
    if (c.sub_axis.dim == static_cast<int>(dim)) cuts.push_back(c);
  if (box.batch.present() && box.batch.dim == static_cast<int>(dim))
    cuts.push_back({box.batch, extent / (box.batch.outer * box.batch.inner), samples.begin, samples.size()});
  if (cuts.empty()) return Set(Interval{box.origin[dim], box.origin[dim] + local});
  if (box.origin[dim] != 0) refuse("the box has an origin of {} in dimension {} beside its cuts", box.origin[dim], dim);
  std::ranges::sort(cuts, std::ranges::greater{}, [](const BoxCut& c) { return c.sub_axis.inner; });
  Set out = Set::first(extent);
  int64_t outer = extent;  // of which the next one may be a digit
  for (const BoxCut& c : cuts) {
    const SubAxis& s = c.sub_axis;
    if (s.outer <= 0 || s.inner <= 0 || c.extent <= 0 || s.outer * c.extent * s.inner != extent ||
        outer % (c.extent * s.inner) != 0 || c.begin < 0 || c.begin + c.size > c.extent)
      refuse("the box is cut to [{}:{}] of {}, {} within each, in dimension {} of {}", c.begin, c.begin + c.size,
             c.extent, s.inner, dim, extent);
    outer = s.inner;
    const auto rows = places_of(s.outer, c.extent, s.inner, Set(Interval{c.begin, c.begin + c.size}));
    if (!rows) no_rule("a box of many parts");
    Set both;
    for (const Interval& a : out.runs())
      for (const Interval& b : rows->runs()) both.append({std::max(a.begin, b.begin), std::min(a.end, b.end)});
    out = std::move(both);
  }
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
    const auto at = call.attrs.find(name);
    if (name == kIndexLimit) {  // a check, where the plan has it
      const int64_t limit = d.index.input >= 0 ? index_range(view_of(ref_.graph(), op)).limit : 0;
      const int64_t said = at == call.attrs.end() ? 0 : attr_int(call.attrs, name);
      if (said != 0 && said != limit) refuse("it takes indices below {}; {} those below {}", said, op.name, limit);
      continue;
    }
    if (at == call.attrs.end()) refuse("attribute {} of {} is missing", name, op.name);
    if (same_attr(name, at->second, value) || (also.contains(name) && at->second == also.at(name))) continue;
    refuse("attribute {} is {}; {} of the one-device program has {}", name, to_string(at->second), op.name,
           to_string(value));
  }
}

uint32_t placed_dims(const Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  if (!(d.flags & (kRandom | kOffsetAware))) return 0;
  return d.placed_dims ? d.placed_dims(view_of(graph, op)) : ~uint32_t{0};
}

bool box_is_of_input(const Graph& graph, const Op& op) {
  return has_flag(op.code, kBoxOfInput) || op.outputs.empty() || op.outputs[0] == kNone ||
         graph.tensor(op.outputs[0]).dims.empty();
}

// Where the kernel takes its part to lie is where it lies.
void Kernels::check_box(const KernelCall& call, const Op& op, const std::vector<Value>& results) {
  const uint32_t placed = placed_dims(ref_.graph(), op);
  if (placed == 0) return;
  const bool of_input = box_is_of_input(ref_.graph(), op);
  const TensorId id = of_input ? op.inputs.at(0) : op.outputs[0];
  const Dims& dims = ref_.tensor(id).dims;
  const Dims& local = of_input ? call.in.at(0).local : call.out.at(0).local;
  const auto lies = (of_input ? call.in[0].value->region.spread(dims, local) : results.at(0).region).in(dims);
  if (!lies) no_rule("where a part of {} lies", op.name);
  static const Box kNowhere;
  const Box& box = call.box ? *call.box : kNowhere;
  if (box.global != dims || box.origin.size() != dims.size())
    refuse("the box is one of {}, and {} of the one-device program is {}", to_string(box.global), op.name,
           to_string(dims));
  for (size_t k = 0; k < dims.size(); ++k) {
    if (!(placed >> k & 1)) continue;
    const Digit& found = lies->digits()[k];
    const Set said = positions(box, call.samples, k, dims[k], local[k]);
    // An operand that is the same all along is so where the box says (Match::place_any).
    const bool anywhere = found.open();
    if (anywhere && !of_input) no_rule("where a part of {} lies", op.name);
    if (anywhere ? found.set.size() != said.size() : !(found.set == said))
      refuse("the box says {} of dimension {}, and the operands are {}", to_string(said), k, to_string(found.set));
  }
}

}  // namespace whale::proof
