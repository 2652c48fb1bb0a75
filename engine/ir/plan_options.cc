#include "ir/plan_options.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace whale {
namespace {

struct ClassName {
  const char* name;
  OffloadClass bit;
};
constexpr ClassName kClasses[] = {{"state", kOffloadState},
                                  {"gradients", kOffloadGradients},
                                  {"parameters", kOffloadParameters},
                                  {"activations", kOffloadActivations}};

// An option as an attribute, and back.
Attr write(bool value) { return value; }
Attr write(const std::vector<double>& value) { return value; }
Attr write(const std::vector<Recompute>& value) {
  Ints out;
  for (const Recompute each : value) out.push_back(static_cast<int64_t>(each));
  return out;
}
Attr write(const std::optional<DType>& value) { return std::string(value ? name_of(*value) : ""); }
template <class Number>
Attr write(Number value) {
  return static_cast<int64_t>(value);
}

void read(const Attr& from, bool& to, int64_t) { to = std::get<bool>(from); }
void read(const Attr& from, std::vector<double>& to, int64_t) { to = std::get<std::vector<double>>(from); }
void read(const Attr& from, std::optional<DType>& to, int64_t) { to = parse_dtype(std::get<std::string>(from)); }
template <class Number>
void read(const Attr& from, Number& to, int64_t last) {
  const int64_t value = std::get<int64_t>(from);
  if (value < 0 || value > last) throw invalid("it is {}, expected 0 to {}", value, last);
  to = static_cast<Number>(value);
}
void read(const Attr& from, std::vector<Recompute>& to, int64_t last) {
  for (const int64_t value : std::get<Ints>(from)) read(Attr{value}, to.emplace_back(), last);
}

}  // namespace

uint32_t parse_offload(std::string_view names) {
  uint32_t classes = 0;
  while (!names.empty()) {
    const size_t end = std::min(names.find(','), names.size());
    std::string_view name = names.substr(0, end);
    while (name.starts_with(' ')) name.remove_prefix(1);
    while (name.ends_with(' ')) name.remove_suffix(1);
    const auto at =
        std::find_if(std::begin(kClasses), std::end(kClasses), [&](const ClassName& c) { return c.name == name; });
    if (at == std::end(kClasses))
      throw invalid("offload '{}': there is no class of this name; there are {}, joined by commas", brief(name),
                    offload_text(kOffloadAll));
    classes |= at->bit;
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return classes;
}

std::string offload_text(uint32_t classes) {
  std::string text;
  for (const ClassName& c : kClasses)
    if (classes & c.bit) text += (text.empty() ? "" : ", ") + std::string(c.name);
  return text;
}

Attrs attrs_of(const PlanOptions& options) {
  Attrs usual, out;
  each_option(PlanOptions(), [&](const char* name, const auto& value, OptionRule) { usual[name] = write(value); });
  each_option(options, [&](const char* name, const auto& value, OptionRule) {
    if (Attr mine = write(value); mine != usual[name]) out[name] = std::move(mine);
  });
  return out;
}

PlanOptions options_of(const Attrs& attrs) {
  PlanOptions out;
  size_t known = 0;
  each_option(out, [&](const char* name, auto& value, OptionRule rule) {
    const auto it = attrs.find(name);
    if (it == attrs.end()) return;
    ++known;
    try {
      read(it->second, value, rule.last);
    } catch (const std::bad_variant_access&) {
      throw invalid("option '{}' is of another type", name);
    } catch (const Error& e) {
      throw invalid("option '{}': {}", name, e.message());
    }
  });
  if (known == attrs.size()) return out;
  for (const auto& [name, value] : attrs) {
    bool found = false;
    each_option(out, [&, &asked = name](const char* each, const auto&, OptionRule) { found = found || asked == each; });
    if (!found) throw invalid("option '{}' is unknown; a newer libwhale may know it", name);
  }
  return out;
}

}  // namespace whale
