#include "cost/profile_text.h"

#include <map>
#include <string>

#include "base/error.h"
#include "base/json_input.h"
#include "base/text.h"
#include "cost/measured.h"
#include "cost/plausible.h"

namespace whale {
namespace {

constexpr const char* kExpected =
    "expected a JSON object of figures by name, as `whale devices --probe -o FILE` writes it, or of times of a model's "
    "ops, as `whale profile MODEL -o FILE` does";

Json object_of(std::string_view text) {
  Json out;
  try {
    out = parse_json(text);
  } catch (const Error& e) {
    throw invalid("no profile: {}; {}", kExpected, e.message());
  }
  if (!out.is_object()) throw invalid("no profile: {}; found {}", kExpected, brief(text_of(out), 60));
  if (out.empty()) throw invalid("no profile: {}; found an empty object", kExpected);
  if (out.contains("nodes")) throw invalid("no profile, but a cluster: give it as --devices file:FILE; {}", kExpected);
  return out;
}

Profile read(std::string_view text, const std::string& path) {
  Json given = object_of(text);
  const std::shared_ptr<MeasuredProfile> measured = measured_of(given);
  if (given.contains("profile"))
    given = Json(given["profile"]);
  else if (measured)
    given = Json::object();
  if (!given.is_object()) throw invalid("no profile: {}; found {}", kExpected, brief(text_of(given), 60));
  if (given.empty() && !measured) throw invalid("no profile: {}; found no figure in it", kExpected);
  std::map<std::string, bool> whole;  // figures, and whether they are whole numbers
  each_figure(kMachineOfCores,
              [&](const char* name, auto value) { whole[name] = std::is_integral_v<decltype(value)>; });
  Attrs figures;
  for (const auto& [name, value] : given.items()) {
    const auto known = whole.find(name);
    if (known == whole.end()) {
      std::string names;
      for (const auto& [each, _] : whole) names += (names.empty() ? "" : ", ") + each;
      throw invalid("a profile has no figure '{}'; there are {}", brief(name, 40), names);
    }
    if (!value.is_number() || (known->second && !value.is_number_integer()))
      throw invalid("figure '{}' of the profile is {}, expected a {}number", name, brief(text_of(value), 60),
                    known->second ? "whole " : "");
    if (known->second)
      figures[name] = value.get<int64_t>();
    else
      figures[name] = value.get<double>();
  }
  Profile out = profile_of(figures);
  if (measured) {
    measured->path = path;
    check_plausible(*measured, figures.contains("device.flops_per_second") ? &out.device : nullptr);
  }
  out.measured = measured;
  return out;
}

}  // namespace

Profile profile_of_text(std::string_view json, const std::string& path) {
  if (path.empty()) return read(json, path);
  try {
    return read(json, path);
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("'{}': {}", brief(path), e.message()));
  }
}

}  // namespace whale
