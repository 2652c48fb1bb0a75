// The worlds of a process that is one of several.
#pragma once

#include <memory>
#include <string>

#include "world/world.h"

namespace whale {

struct ProcessOptions {
  int rank = 0, size = 1;
  std::string address = "127.0.0.1";  // of rank 0 (meeting.h)
  uint16_t port = 0;
  std::string token;
  double timeout_seconds = 30;
  double run_timeout_seconds = 0;  // World::patience
  std::string folder;              // where libwhale_ucx.so is
};

// Meets the others: waits until all are there. Throws what meet() does, and unavailable where letters cannot be
// carried. One rank alone needs nobody.
std::shared_ptr<Worlds> join_processes(const ProcessOptions& options);

}  // namespace whale
