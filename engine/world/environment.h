// What a launcher says of this process, in its environment.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace whale {

struct LaunchEnvironment {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 0;  // among those of this host; size 0: not said
  std::string address = {};            // of rank 0, where all meet
  uint16_t port = 0;
  std::string token = {};   // a secret of the job; empty: none
  const char* source = "";  // "torchrun", "mpirun", "pmix", "slurm"
};

using GetVariable = std::function<const char*(const char* name)>;  // null: not set
// Of the launcher's PMIx (pmix.h): this process's place, and where all meet, by what rank 0 has of `given` and else by
// its choice. None, unless it is `needed`: no PMIx can be opened here.
using AskPmix = std::function<std::optional<LaunchEnvironment>(const LaunchEnvironment& given, bool needed)>;

// The first that is there of: torchrun's variables, which `whale launch` and people set too; OpenMPI's mpirun; another
// launcher that speaks PMIx, such as prterun; a step of Slurm (srun). None: this process is alone. PMIx is asked where
// variables do not say where ranks of several hosts meet, and where there are no others. Throws invalid for half of a
// set, naming what is missing, and for values that mean nothing, naming the variable, what it holds and what is
// expected; and what asking throws.
std::optional<LaunchEnvironment> launch_environment(const GetVariable& get, const AskPmix& ask);
// Of this process. `folder`: where libwhale_pmix.so is; other ranks are waited for that long.
std::optional<LaunchEnvironment> launch_environment(const std::string& folder, double timeout_seconds);

}  // namespace whale
