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
  const char* source = "";  // "torchrun", "slurm", "mpirun"
};

using GetVariable = std::function<const char*(const char* name)>;  // null: not set

// The first that is there of: torchrun's variables, which `whale launch` and people set too; OpenMPI's mpirun; a step
// of Slurm (srun). None: this process is alone. Throws invalid for half of a set, naming what is missing, and for
// values that mean nothing, naming the variable, what it holds and what is expected.
std::optional<LaunchEnvironment> launch_environment(const GetVariable& get);
std::optional<LaunchEnvironment> launch_environment();  // of this process

}  // namespace whale
