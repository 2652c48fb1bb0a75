#include "validate/errors.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace whale {

void Errors::add(const std::vector<std::string>& groups, double predicted, double measured) {
  if (!(measured > 0) || !std::isfinite(measured) || !(predicted > 0) || !std::isfinite(predicted))
    throw invalid("{} was measured and {} predicted, expected seconds above 0", measured, predicted);
  const double error = predicted / measured - 1;
  all_.add(error);
  for (size_t level = 0; level < groups.size(); ++level) {
    auto at = std::ranges::find_if(groups_, [&](const Group& g) { return g.name == groups[level]; });
    if (at == groups_.end()) {
      at = std::ranges::find_if(groups_, [&](const Group& g) { return g.level > level; });
      at = groups_.insert(at, Group{groups[level], level});
    }
    at->add(error);
  }
}

void Errors::write(Json& out) const {
  out["rows"] = all_.rows;
  out["mean_absolute_error_percent"] = all_.percent();
  Json& groups = out["groups"] = Json::object();
  for (const Group& g : groups_)
    groups[g.name] = {{"rows", g.rows},
                      {"mean_absolute_error_percent", g.percent()},
                      {"mean_error_percent", 100 * g.over / static_cast<double>(g.rows)}};
}

std::string Errors::table() const {
  std::string out = fmt::format("{:<48} {:>7} {:>10} {:>10}\n", "", "rows", "|error|", "error");
  const auto line = [&](const Group& g) {
    if (g.rows)
      out += fmt::format("{:<48.48} {:>7} {:>8.2f} % {:>+8.2f} %\n", g.name, g.rows, g.percent(),
                         100 * g.over / static_cast<double>(g.rows));
  };
  line(all_);
  for (const Group& g : groups_) line(g);
  return out;
}

}  // namespace whale
