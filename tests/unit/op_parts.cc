#include "op_parts.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/error.h"

namespace whale::test {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// One of the parts along a cut.
struct Fixed {
  const Factor* factor;
  FactorPart part;
  bool samples;
};

// An interval of a sub-axis of a tensor.
struct Cut {
  SubAxis sub_axis;
  Interval at;
};

bool has(const std::vector<int>& list, size_t i) {
  return std::find(list.begin(), list.end(), static_cast<int>(i)) != list.end();
}

std::vector<Cut> cuts_of(const std::vector<Fixed>& fixed, size_t operand, bool input) {
  std::vector<Cut> out;
  for (const Fixed& f : fixed) {
    const auto& list = input ? f.factor->inputs : f.factor->outputs;
    const bool rows =
        f.factor->group.rows != 0 && has(input ? f.factor->group.inputs : f.factor->group.outputs, operand);
    if (rows)
      out.push_back({SubAxis{0, 1, 1}, f.part.groups});
    else if (operand < list.size() && list[operand].present())
      out.push_back({list[operand],
                     input && f.factor->reads_through(operand) ? read_by(f.factor->window, f.part.at) : f.part.at});
  }
  return out;
}

// Per dimension, which of its positions are there.
using Positions = std::vector<std::vector<int64_t>>;

Positions positions_of(const Dims& dims, const std::vector<Cut>& cuts) {
  Positions out(dims.size());
  for (size_t d = 0; d < dims.size(); ++d)
    for (int64_t p = 0; p < dims[d]; ++p) {
      const bool here = std::all_of(cuts.begin(), cuts.end(), [&](const Cut& c) {
        if (c.sub_axis.dim != static_cast<int>(d)) return true;
        const int64_t extent = dims[d] / (c.sub_axis.outer * c.sub_axis.inner), at = p / c.sub_axis.inner % extent;
        return at >= c.at.begin && at < c.at.end;
      });
      if (here) out[d].push_back(p);
    }
  return out;
}

Dims dims_of(const Positions& positions) {
  Dims out;
  for (const auto& p : positions) out.push_back(static_cast<int64_t>(p.size()));
  return out;
}

// Where each element of the part is in the whole tensor.
std::vector<size_t> elements_of(const Dims& whole, const Positions& positions) {
  std::vector<size_t> out{0};
  for (size_t d = 0; d < whole.size(); ++d) {
    std::vector<size_t> next;
    for (const size_t base : out)
      for (const int64_t p : positions[d])
        next.push_back(base * static_cast<size_t>(whole[d]) + static_cast<size_t>(p));
    out = std::move(next);
  }
  return out;
}

Value part_of(const Value& whole, const std::vector<Cut>& cuts) {
  if (!whole.present()) return whole;
  const Positions positions = positions_of(whole.dims, cuts);
  Value out{whole.dtype, dims_of(positions), {}};
  for (const size_t e : elements_of(whole.dims, positions)) out.data.push_back(whole.data[e]);
  return out;
}

// ---- attributes and box -----------------------------------------------------------------------------------------
void pad_window(Attrs& attrs, const Factor& f, const Interval& share) {
  const WindowRead& w = f.window;
  const Interval read = read_by(w, share);
  int64_t low, high, more = 0;
  if (w.transposed) {
    // Element s of what is read reaches the results from s * stride - low on.
    low = w.low + share.begin - read.begin * w.stride;
    high = (read.size() - 1) * w.stride + w.reach - low - share.size();
    if (high < 0) more = -high, high = 0;
  } else {
    const int64_t first = share.begin * w.stride - w.low, last = (share.end - 1) * w.stride - w.low + w.reach;
    low = read.begin - first, high = last - read.end;
  }
  const auto write = [&](const char* name, size_t size, size_t at, int64_t value) {
    const auto found = attrs.find(name);
    if (found == attrs.end()) return;
    Ints& list = std::get<Ints>(found->second);
    if (list.empty()) list.assign(size, 0);
    list[at] = value;
  };
  write("padding", 2 * f.window_rank, 2 * f.window_dim, low);
  write("padding", 2 * f.window_rank, 2 * f.window_dim + 1, high);
  write("spatial", f.window_rank, f.window_dim, share.size());
  write("output_padding", f.window_rank, f.window_dim, more);
}

Attrs local_attrs(const OpView& view, const std::vector<Fixed>& fixed, const Dims& local_in, const Dims& local_out) {
  Attrs attrs = *view.attrs;
  const OpDef& d = def(view.code);
  for (auto& [name, value] : attrs) {
    auto* ints = std::get_if<Ints>(&value);
    if (ints == nullptr || view.outputs.empty()) continue;
    const AttrRole role = role_of(d, name);
    if (role == AttrRole::kShape && ints->size() == view.outputs[0].dims.size()) *ints = local_out;
    for (size_t k = 0; role == AttrRole::kEnds && k < ints->size(); ++k)
      if (local_in[k] != view.inputs[0].dims[k]) (*ints)[k] = local_in[k];
  }
  for (const Fixed& f : fixed) {
    for (const char* name : f.factor->size_attrs) attrs[name] = f.part.at.size();
    if (f.factor->piece_attr != nullptr) attrs[f.factor->piece_attr] = f.factor->extent;
    if (f.factor->window.present()) pad_window(attrs, *f.factor, f.part.at);
    if (f.factor->begin_attr == nullptr) continue;
    const int64_t rows = f.factor->group.rows;
    if (rows == 0 || f.part.groups.size() > 1)
      attrs[f.factor->begin_attr] = f.part.at.begin - f.part.groups.begin * rows;
  }
  return attrs;
}

// In the dimensions of which the kernel is declared to ask.
Place place_of(const OpView& view, const std::vector<Fixed>& fixed) {
  const OpDef& d = def(view.code);
  Place place;
  if (!(d.flags & (kRandom | kOffsetAware))) return place;
  const uint32_t placed = d.placed_dims ? d.placed_dims(view) : ~uint32_t{0};
  const bool of_input = (d.flags & kBoxOfInput) || view.outputs.empty() || view.outputs[0].dims.empty();
  if (placed == 0 || (of_input && view.inputs.empty())) return place;
  place.box.global = of_input ? view.inputs[0].dims : view.outputs[0].dims;
  place.box.origin.assign(place.box.global.size(), 0);
  std::vector<std::pair<Cut, bool>> cuts;
  for (const Fixed& f : fixed) {
    const auto& list = of_input ? f.factor->inputs : f.factor->outputs;
    if (list.empty() || !list[0].present()) continue;
    if (f.samples) place.box.batch = list[0], place.batch_begin = f.part.at.begin;
    cuts.push_back({{list[0], f.part.at}, f.samples});
  }
  for (const auto& [cut, samples] : cuts) {
    const SubAxis& s = cut.sub_axis;
    if (samples || !(placed >> s.dim & 1)) continue;
    const int64_t extent = place.box.global[s.dim] / (s.outer * s.inner);
    const auto in_dimension =
        std::count_if(cuts.begin(), cuts.end(), [&](const auto& other) { return other.first.sub_axis.dim == s.dim; });
    if (s.outer == 1 && in_dimension == 1)
      place.box.origin[s.dim] = cut.at.begin * s.inner;
    else
      place.box.cuts.push_back({s, extent, cut.at.begin, cut.at.size()});
  }
  return place;
}

// ---- results ----------------------------------------------------------------------------------------------------
// Results as large as the whole op's, of which some elements are known.
struct Known {
  std::vector<Value> values;
  std::vector<std::vector<char>> there;
};

class Parts {
 public:
  Parts(const OpDevice& device, const OpCall& call, const std::vector<Value>& whole, const std::vector<FactorCut>& cuts)
      : device_(device), call_(call), whole_(whole), cuts_(cuts), view_(view_of(call)) {
    for (const Value& v : whole) most_.push_back(largest(v));
  }

  Known all() { return along(0); }
  double most(size_t result) const { return most_[result]; }  // of its parts, and of the whole

 private:
  Known along(size_t k) {
    if (k == cuts_.size()) return one();
    const FactorCut& cut = cuts_[k];
    std::optional<Known> out;
    for (const FactorPart& part : cut.parts) {
      fixed_.push_back({cut.factor, part, cut.samples});
      Known next = along(k + 1);
      fixed_.pop_back();
      if (out)
        join(*out, std::move(next), *cut.factor);
      else
        out = std::move(next);
    }
    return *out;
  }

  Known nothing() const {
    Known out;
    for (const Value& v : whole_) {
      out.values.push_back({v.dtype, v.dims, std::vector<double>(v.data.size())});
      out.there.emplace_back(v.data.size(), 0);
    }
    return out;
  }

  // One part of all that is cut.
  Known one() {
    Known out = nothing();
    OpCall local{call_.code, {}, {}, call_.key};
    bool reads_nothing = false;
    for (size_t i = 0; i < call_.in.size(); ++i) {
      local.in.push_back(part_of(call_.in[i], cuts_of(fixed_, i, true)));
      const Value& v = local.in.back();
      reads_nothing |= v.present() && v.data.empty() && !call_.in[i].data.empty();
    }
    std::vector<TensorType> types;
    std::vector<std::vector<size_t>> at;
    bool makes_nothing = true;
    for (size_t o = 0; o < whole_.size(); ++o) {
      const Positions positions = positions_of(whole_[o].dims, cuts_of(fixed_, o, false));
      types.push_back({whole_[o].dtype, dims_of(positions)});
      at.push_back(elements_of(whole_[o].dims, positions));
      makes_nothing &= at.back().empty();
    }
    // Such a part has no kernel: its sums have no terms.
    if (reads_nothing || makes_nothing) return out;
    local.attrs = local_attrs(view_, fixed_, local.in.empty() ? Dims{} : local.in[0].dims,
                              types.empty() ? Dims{} : types[0].dims);
    const std::vector<TensorType> inferred = view_of(local).outputs;
    if (inferred != types) {
      std::string text;
      for (const TensorType& t : inferred) text += " " + to_string(t);
      throw internal("the shape rule gives{} for a part, {}", text, to_string(local));
    }
    const std::vector<Value> values = device_.run(local, place_of(view_, fixed_), types);
    for (size_t o = 0; o < values.size(); ++o) {
      most_[o] = std::max(most_[o], largest(values[o]));
      for (size_t e = 0; e < at[o].size(); ++e)
        out.values[o].data[at[o][e]] = values[o].data[e], out.there[o][at[o][e]] = 1;
    }
    return out;
  }

  void join(Known& to, Known from, const Factor& f) const {
    std::vector<bool> carries;
    for (size_t o = 0; o < whole_.size(); ++o) carries.push_back(o < f.outputs.size() && f.outputs[o].present());
    if (f.kind == FactorKind::kStream && f.merge != OpCode{}) return merge(to, from, f);
    for (size_t o = 0; o < whole_.size(); ++o) {
      const bool adds = (o < f.partial.size() && f.partial[o]) || (f.kind == FactorKind::kStream && !carries[o]);
      for (size_t e = 0; e < whole_[o].data.size(); ++e) {
        if (!from.there[o][e]) continue;
        double &a = to.values[o].data[e], b = from.values[o].data[e];
        if (!to.there[o][e])
          a = b, to.there[o][e] = 1;
        else if (adds)
          a = combined(f.combine_of(o), a, b);
        else if (carries[o])
          throw internal("result {} has element {} from two parts of {}", o, e, f.name);
        else if (device_.same_order() && !(a == b) && !(std::isnan(a) && std::isnan(b)))
          throw internal("result {} is declared to have nothing to do with {}, and parts of it give {} and {}", o,
                         f.name, a, b);
      }
    }
  }

  // Of the results of two rounds, by the op that is declared for it. It works element by element, so that it does not
  // matter which are known.
  void merge(Known& to, const Known& from, const Factor& f) const {
    OpCall call{f.merge, {}, to.values, 0};
    call.in.insert(call.in.end(), from.values.begin(), from.values.end());
    call.attrs = complete_attrs(def(f.merge), {{"out_dtype", std::string(name_of(whole_[0].dtype))}});
    const auto any = [](const Known& k) { return std::count(k.there[0].begin(), k.there[0].end(), 1) > 0; };
    if (!any(from)) return;
    if (any(to)) {
      to.values = device_.run(call);
    } else {
      to = from;
    }
  }

  const OpDevice& device_;
  const OpCall& call_;
  const std::vector<Value>& whole_;
  const std::vector<FactorCut>& cuts_;
  const OpView view_;
  std::vector<Fixed> fixed_;
  std::vector<double> most_;
};

}  // namespace

Interval read_by(const WindowRead& w, const Interval& share) {
  Interval read{share.begin * w.stride - w.low, (share.end - 1) * w.stride - w.low + w.reach};
  if (w.transposed) {
    // The first s with share.begin + low - s * stride < reach; no later than what pads by nothing below zero.
    const int64_t first = floor_div(share.begin + w.low - w.reach, w.stride) + 1;
    read = {std::min(first, floor_div(share.begin + w.low, w.stride)), floor_div(share.end - 1 + w.low, w.stride) + 1};
  }
  read = {std::max<int64_t>(read.begin, 0), std::min(read.end, w.source)};
  return read.begin < read.end ? read : Interval{};
}

double combined(Combine combine, double a, double b) {
  switch (combine) {
    case Combine::kSum: return a + b;
    case Combine::kMax: return std::max(a, b);
    case Combine::kMin: return std::min(a, b);
    case Combine::kLogSumExp: return std::log(std::exp(a) + std::exp(b));
  }
  return std::nan("");
}

std::string to_string(const FactorCut& cut) {
  std::string out = fmt::format("{}{}", cut.factor->name, cut.samples ? " of samples" : "");
  for (const FactorPart& p : cut.parts) out += fmt::format(" [{}:{}]", p.at.begin, p.at.end);
  return out;
}

double largest(const Value& value) {
  double most = 0;
  for (const double x : value.data)
    if (std::isfinite(x)) most = std::max(most, std::fabs(x));
  return most;
}

std::string difference(const OpDevice& device, const std::vector<Value>& found, const std::vector<Value>& expected,
                       const std::vector<double>& sums) {
  if (found.size() != expected.size()) return fmt::format("{} results, not {}", found.size(), expected.size());
  for (size_t o = 0; o < expected.size(); ++o) {
    const Value &a = found[o], &b = expected[o];
    if (a.dims != b.dims) return fmt::format("result {} is {}, not {}", o, to_string(a.dims), to_string(b.dims));
    const double rounding = device.rounding(b.dtype) * sums[o];
    for (size_t e = 0; e < b.data.size(); ++e) {
      const double x = a.data[e], y = b.data[e];
      if (x == y || (std::isnan(x) && std::isnan(y)) || std::fabs(x - y) <= rounding) continue;
      return fmt::format("result {} has {} at {}, not {}", o, x, e, y);
    }
  }
  return "";
}

std::string difference(const OpDevice& device, const OpCall& call, const std::vector<Value>& whole,
                       const std::vector<FactorCut>& cuts) {
  try {
    Parts parts(device, call, whole, cuts);
    const Known all = parts.all();
    std::vector<double> sums(whole.size());
    for (size_t o = 0; o < whole.size(); ++o) {
      const auto none = std::find(all.there[o].begin(), all.there[o].end(), 0);
      if (none != all.there[o].end()) return fmt::format("result {} has nothing at {}", o, none - all.there[o].begin());
      const bool adds = std::any_of(cuts.begin(), cuts.end(), [&](const FactorCut& cut) {
        const Factor& f = *cut.factor;
        return f.kind == FactorKind::kStream || (o < f.partial.size() && f.partial[o]);
      });
      if (adds || !device.same_order()) sums[o] = parts.most(o);
    }
    return difference(device, all.values, whole, sums);
  } catch (const Error& e) {
    return e.message();
  }
}

}  // namespace whale::test
