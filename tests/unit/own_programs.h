// Plans without holes: each device's program as it runs, for what looks at or changes one device alone.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "plan/placed.h"

namespace whale {

inline void give_own_programs(Entry& entry) {
  std::map<std::pair<int32_t, Ints>, int32_t> known;
  std::vector<Program> programs;
  for (DeviceRow& row : entry.rows) {
    const auto [at, fresh] = known.try_emplace({row.program, row.placed}, static_cast<int32_t>(programs.size()));
    if (fresh) programs.push_back(bound(entry.programs[row.program], row));
    row.program = at->second;
    row.placed.clear();
  }
  entry.programs = std::move(programs);
}

}  // namespace whale
