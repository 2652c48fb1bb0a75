#include "cost/measured_layers.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <string>

namespace whale {

Blocks blocks_of(const std::vector<Scope>& scopes) {
  Blocks out{.of_scope = std::vector<int32_t>(scopes.size(), kNone)};
  std::map<std::string, int32_t> known;
  for (size_t s = 0; s < scopes.size(); ++s) {
    const Scope* outermost = nullptr;
    for (ScopeId at = static_cast<ScopeId>(s); at > 0 && static_cast<size_t>(at) < scopes.size();
         at = scopes[at].parent)
      if (scopes[at].kind == ScopeKind::kName) outermost = &scopes[at];
    if (outermost == nullptr || outermost->name.empty() ||
        std::isdigit(static_cast<unsigned char>(outermost->name.back())) == 0)
      continue;
    const auto [at, fresh] = known.try_emplace(outermost->name, out.count);
    if (fresh) ++out.count;
    out.of_scope[s] = at->second;
  }
  return out;
}

std::vector<MeasuredLayer> layers_at(const MeasuredDevice& device, int64_t ways, double samples) {
  const auto distance = [&](const MeasuredLayers& l) {
    return std::abs(std::log(static_cast<double>(l.ways) / static_cast<double>(std::max<int64_t>(1, ways))));
  };
  const MeasuredLayers* nearest = nullptr;
  for (const MeasuredLayers& l : device.layers)
    if (nearest == nullptr || distance(l) < distance(*nearest)) nearest = &l;
  if (nearest == nullptr) return {};
  const double share = static_cast<double>(nearest->ways) / static_cast<double>(std::max<int64_t>(1, ways));
  std::vector<MeasuredLayer> out;
  for (size_t layer = 0; layer < nearest->layers.size(); ++layer) {
    MeasuredLayer mine;
    for (double MeasuredLayer::*part : {&MeasuredLayer::forward, &MeasuredLayer::backward}) {
      std::vector<std::pair<double, double>> points;
      for (const MeasuredLayers& l : device.layers)
        if (l.ways == nearest->ways && layer < l.layers.size() && l.layers[layer].*part > 0)
          points.emplace_back(static_cast<double>(l.samples), l.layers[layer].*part);
      if (!points.empty()) mine.*part = share * MeasuredTimes(std::move(points)).at(samples);
    }
    out.push_back(mine);
  }
  return out;
}

}  // namespace whale
