// Measured timelines of a plan, read back from the files that runs write (plan/trace.h).
#pragma once

#include <string>
#include <vector>

#include "report/step_timeline.h"

namespace whale {

struct Measured {
  std::string entry;  // "train"; "": the files do not say
  int64_t batch = 0;
  StepTimeline timeline;  // of the devices that the files are of; each file begins at its own first span
};

// Text that may be anyone's: what is no timeline of this plan is an error that names the file by its place in `files`.
Measured measured_of(const Plan& plan, const std::vector<std::string>& files);

}  // namespace whale
