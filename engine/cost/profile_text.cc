#include "cost/profile_text.h"

#include <map>
#include <string>

#include "base/error.h"
#include "base/json.h"
#include "cost/measured.h"

namespace whale {

Profile profile_of_text(std::string_view json) {
  Json given = Json::parse(json, nullptr, false);
  std::shared_ptr<const MeasuredProfile> measured = measured_of(given);
  if (given.is_object() && given.contains("profile"))
    given = Json(given["profile"]);
  else if (measured)
    given = Json::object();
  if (!given.is_object())
    throw invalid(
        "no profile: expected a JSON object of figures by name, as `whale devices --probe -o FILE` writes it, or "
        "of times of a model's ops, as `whale profile` does");
  std::map<std::string, bool> whole;  // figures, and whether they are whole numbers
  each_figure(kMachineOfCores,
              [&](const char* name, auto value) { whole[name] = std::is_integral_v<decltype(value)>; });
  Attrs figures;
  for (const auto& [name, value] : given.items()) {
    const auto known = whole.find(name);
    if (known == whole.end()) {
      std::string names;
      for (const auto& [each, _] : whole) names += (names.empty() ? "" : ", ") + each;
      throw invalid("a profile has no figure '{}'; there are {}", name, names);
    }
    if (!value.is_number() || (known->second && !value.is_number_integer()))
      throw invalid("figure '{}' of the profile is {}, expected a {}number", name, value.dump(),
                    known->second ? "whole " : "");
    if (known->second)
      figures[name] = value.get<int64_t>();
    else
      figures[name] = value.get<double>();
  }
  Profile out = profile_of(figures);
  out.measured = std::move(measured);
  return out;
}

}  // namespace whale
