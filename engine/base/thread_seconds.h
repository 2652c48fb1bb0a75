// The time of this thread's own work: searches that are bounded by it find the same on a busy machine, and a probe
// finds rates.
#pragma once

#include <ctime>

namespace whale {

inline double thread_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace whale
