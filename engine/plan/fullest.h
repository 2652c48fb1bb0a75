// When a program's arena is fullest, and what is in it then.
#pragma once

#include <vector>

#include "plan/lives.h"

namespace whale {

struct Fullest {
  int64_t when = 0;                // a position of lives_of()
  std::vector<BufferId> storages;  // that are alive then; ascending
};
Fullest fullest_of(const Program& program, Memory memory);

}  // namespace whale
