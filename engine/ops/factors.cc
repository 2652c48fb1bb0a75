// Factors from text, and those of broadcasting.
#include <algorithm>

#include "ops/family.h"

namespace whale {
namespace {

std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> parts;
  while (true) {
    const size_t end = text.find(at);
    const std::string_view part = text.substr(0, end);
    if (at == ' ') {
      if (!part.empty()) parts.emplace_back(part);
    } else {
      parts.emplace_back(part);
    }
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

// The names of one operand's dimensions. "..." stands for the leading dimensions, aligned from the right as
// broadcasting does: the last of them is "b", then "b1", "b2" outwards.
std::vector<std::string> names_of(const std::string& text, const OpView& view, const TensorType& type, const char* what,
                                  size_t index) {
  std::vector<std::string> names = split(text, ' ');
  const auto dots = std::find(names.begin(), names.end(), "...");
  if (dots != names.end()) {
    const size_t named = names.size() - 1, rank = type.dims.size();
    WHALE_CHECK(rank >= named, "parse_factors: an operand has fewer dimensions than names");
    std::vector<std::string> batch;
    for (size_t i = rank - named; i-- > 0;) batch.push_back(i == 0 ? "b" : "b" + std::to_string(i));
    const auto at = names.erase(dots);
    names.insert(at, batch.begin(), batch.end());
  }
  if (names.size() != type.dims.size())
    throw internal("factors '{}' of {} name {} dimensions, {} {} has shape {}", text, def(view.code).name, names.size(),
                   what, index, to_string(type.dims));
  return names;
}

Factor& factor_named(Factors& factors, const OpView& view, const std::string& name) {
  for (Factor& f : factors.list)
    if (f.name == name) return f;
  Factor f;
  f.name = name;
  f.inputs.resize(view.inputs.size());
  f.outputs.resize(view.outputs.size());
  f.partial.resize(view.outputs.size());
  factors.list.push_back(std::move(f));
  return factors.list.back();
}

// Enters dimension `dim` of extent `extent` under the factor's name. An extent of 1 beside larger ones broadcasts.
void enter(Factor& f, std::vector<SubAxis> Factor::*side, size_t operand, int dim, int64_t extent) {
  if (f.extent > 1 && extent == 1) return;
  if (f.extent == 1 && extent > 1) {
    std::fill(f.inputs.begin(), f.inputs.end(), SubAxis{});
    std::fill(f.outputs.begin(), f.outputs.end(), SubAxis{});
  } else if (f.extent > 1 && f.extent != extent) {
    throw internal("factor '{}' has extents {} and {}", f.name, f.extent, extent);
  }
  f.extent = extent;
  (f.*side)[operand] = SubAxis{dim, 1, 1};
}

bool any(const std::vector<SubAxis>& sub_axes) {
  return std::any_of(sub_axes.begin(), sub_axes.end(), [](const SubAxis& d) { return d.present(); });
}

}  // namespace

Factors parse_factors(std::string_view text, const OpView& view) {
  const size_t arrow = text.find("->");
  WHALE_CHECK(arrow != std::string_view::npos, "parse_factors: no '->'");
  const std::vector<std::string> left = split(text.substr(0, arrow), ','), right = split(text.substr(arrow + 2), ',');
  const bool no_inputs = view.inputs.empty() && left.size() == 1;
  WHALE_CHECK(no_inputs || left.size() >= view.inputs.size(), "parse_factors: fewer operands than the op has");
  WHALE_CHECK(right.size() >= view.outputs.size(), "parse_factors: fewer results than the op has");
  Factors factors;
  const auto read = [&](const std::vector<std::string>& texts, const std::vector<TensorType>& types,
                        std::vector<SubAxis> Factor::*side, const char* what) {
    for (size_t i = 0; i < types.size(); ++i) {
      if (split(texts[i], ' ') == std::vector<std::string>{"_"}) continue;
      if (side == &Factor::inputs && !view.present[i]) continue;
      const std::vector<std::string> names = names_of(texts[i], view, types[i], what, i);
      for (size_t d = 0; d < names.size(); ++d)
        if (names[d] != ".")
          enter(factor_named(factors, view, names[d]), side, i, static_cast<int>(d), types[i].dims[d]);
    }
  };
  read(left, view.inputs, &Factor::inputs, "operand");
  read(right, view.outputs, &Factor::outputs, "result");
  for (Factor& f : factors.list) {
    if (any(f.outputs) || !any(f.inputs)) continue;
    f.kind = FactorKind::kReduce;
    f.partial.assign(view.outputs.size(), true);
  }
  return factors;
}

Factors elementwise_factors(const OpView& view) {
  Factors factors;
  const Dims& out = view.outputs.at(0).dims;
  for (size_t d = 0; d < out.size(); ++d) {
    Factor& f = factor_named(factors, view, "d" + std::to_string(d));
    f.extent = out[d];
    const auto enter_all = [&](const std::vector<TensorType>& types, std::vector<SubAxis>& sub_axes) {
      for (size_t i = 0; i < types.size(); ++i) {
        const size_t rank = types[i].dims.size(), shift = out.size() - rank;
        if (d >= shift && types[i].dims[d - shift] == out[d]) sub_axes[i] = SubAxis{static_cast<int>(d - shift), 1, 1};
      }
    };
    enter_all(view.inputs, f.inputs);
    enter_all(view.outputs, f.outputs);
  }
  return factors;
}

}  // namespace whale
