#include "validate/left_out.h"

#include <algorithm>

namespace whale {

void LeftOut::add(const std::string& why) {
  const auto at = std::ranges::find(reasons_, why, &std::pair<std::string, size_t>::first);
  if (at == reasons_.end())
    reasons_.emplace_back(why, 1);
  else
    ++at->second;
}

size_t LeftOut::rows() const {
  size_t sum = 0;
  for (const auto& [_, rows] : reasons_) sum += rows;
  return sum;
}

void LeftOut::write(Json& out) const {
  out["rows_left_out"] = rows();
  Json& all = out["left_out"] = Json::object();
  for (const auto& [why, rows] : reasons_) all[why] = rows;
}

std::string LeftOut::line(size_t used) const {
  if (reasons_.empty()) return "";
  std::vector<std::string> parts;
  for (const auto& [why, rows] : reasons_) parts.push_back(fmt::format("{} {}", rows, why));
  return fmt::format("{} of {} rows; {} left out: {}\n", used, used + rows(), rows(), fmt::join(parts, ", "));
}

}  // namespace whale
