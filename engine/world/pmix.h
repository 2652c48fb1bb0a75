// Ranks that find each other by PMIx, which prterun, OpenMPI's mpirun and srun --mpi=pmix serve.
#pragma once

#include <optional>
#include <string>

#include "world/environment.h"

namespace whale {

// This process's place in its job, and where all meet: what `given` says, on rank 0, and else what rank 0 chooses.
// All ranks ask, and each hears the same however often. Opens libwhale_pmix.so, of `folder`; where it or libpmix is not
// there, throws unavailable, or gives none unless `needed`. Waits at most `timeout_seconds` for the other ranks: throws
// deadline_exceeded, and Stopped (base/watch.h); the next call goes on waiting.
std::optional<LaunchEnvironment> ask_pmix(const LaunchEnvironment& given, bool needed, const std::string& folder,
                                          double timeout_seconds);

// Says farewell to the launcher, once, if it was asked; at the end of the process that is done by itself, where the
// program ends by exit().
void leave_pmix();

}  // namespace whale
