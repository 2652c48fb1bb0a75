// Where initial values that are in files (InitKind::kFile) may be read, and which file a path means.
#pragma once

#include <string>

namespace whale {

struct InitFiles {
  std::string base;            // folder that paths are relative to; empty: the working directory
  bool bounded = false;        // by `root`: the model or plan came from a file or from bytes
  std::string root;            // folder that holds, itself or further down, all that may be read; empty: nothing may
  bool given = false;          // root was chosen by the host (engine option init_dir)
  const char* what = "model";  // that came, for messages: "model" or "plan"
};

// The file that `file` means, without links where it is bounded. PERMISSION_DENIED when it is outside; `variable` is
// for the message. Whether it is there is for its reader to say.
std::string init_path(const std::string& file, const InitFiles& files, const std::string& variable);

// `file`, a path relative to `base`, as one relative to `folder`: both empty: the working directory. Absolute paths
// stay.
std::string rebased(const std::string& file, const std::string& base, const std::string& folder);

}  // namespace whale
