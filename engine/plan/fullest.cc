#include "plan/fullest.h"

#include <map>

namespace whale {

Fullest fullest_of(const Program& program, Memory memory) {
  const std::vector<Life> lives = lives_of(program);
  const auto here = [&](size_t b) { return lives[b].first >= 0 && program.buffers[b].memory == memory; };
  std::map<int64_t, int64_t> change;
  for (size_t b = 0; b < lives.size(); ++b)
    if (here(b)) {
      change[lives[b].first] += bytes_of_versions(program.buffers[b]);
      change[lives[b].last + 1] -= bytes_of_versions(program.buffers[b]);
    }
  Fullest out;
  int64_t now = 0, most = 0;
  for (const auto& [at, bytes] : change)
    if ((now += bytes) > most) most = now, out.when = at;
  for (size_t b = 0; b < lives.size(); ++b)
    if (here(b) && lives[b].first <= out.when && out.when <= lives[b].last)
      out.storages.push_back(static_cast<BufferId>(b));
  return out;
}

}  // namespace whale
