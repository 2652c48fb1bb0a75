#include "plan/plan.h"

#include <algorithm>

namespace whale {

const Entry* Plan::find_entry(std::string_view name, int64_t batch) const {
  for (const Entry& entry : entries)
    if (entry.name == name && entry.batch == batch) return &entry;
  return nullptr;
}

bool Plan::has_variable(std::string_view name) const {
  return std::any_of(variables.begin(), variables.end(), [&](const PlanVariable& v) { return v.name == name; });
}

}  // namespace whale
