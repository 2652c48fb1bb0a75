// Options of the command line that had another name (docs/words.md): using the old one is an error that says the new.
#pragma once

#include <string_view>

namespace tool {

struct RenamedOption {
  std::string_view command, before, now;
};
inline constexpr RenamedOption kRenamedOptions[] = {{"plan", "--bridges", "--reshards"},
                                                    {"model", "--lazy", "--sparse-updates"},
                                                    {"model", "--no-lazy", "--no-sparse-updates"},
                                                    {"model", "--schedule", "--lr-schedule"}};

}  // namespace tool
