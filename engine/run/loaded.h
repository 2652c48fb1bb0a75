// What a session knows of the checkpoint that it loaded last.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace whale {

struct LoadedCheckpoint {
  std::string directory, id;
  int64_t format = 0;
  bool checksums = false;                  // format 1 has none
  uint64_t seed = 0;                       // which the session goes on with
  std::vector<std::string> left_out = {};  // optimizer state that the plan has no place for
  std::string optimizer = {};              // that it was trained with; empty: the checkpoint does not say
};

}  // namespace whale
