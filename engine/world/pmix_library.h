// What a library that speaks PMIx with this process's launcher exports. As the back ends' (device.h): one symbol,
// `version` is compared for equality before anything else is touched.
#pragma once

#include <string>

namespace whale {

struct PmixJob {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 0;  // as LaunchEnvironment
  std::string host = {};               // what the launcher calls this one; empty: not said
};

// One after another, each once a process; all throw unavailable with PMIx's own word.
struct PmixEntry {
  const char* version;
  // Waits for the launcher's server on this host, no other rank. Beside MPI, which joins and leaves the same server, it
  // is counted.
  PmixJob (*join)();
  // What rank 0 has said, whose argument it is; waits until every rank of the job is here, without an end.
  std::string (*share)(const PmixJob& job, const std::string& said);
  // A process that ends without it has failed, to some launchers. None can join again.
  void (*leave)();
};
#define WHALE_PMIX_SYMBOL "whale_pmix"

}  // namespace whale
