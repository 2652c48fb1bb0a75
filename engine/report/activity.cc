#include "report/activity.h"

#include "plan/figures.h"
#include "plan/lives.h"

namespace whale {
namespace {

Activity of_kernel(const Program& p, const Instruction& i, const std::vector<Holds>& holds) {
  if (i.phase == Phase::kForward) return Activity::kForward;
  if (i.phase == Phase::kUpdate) return Activity::kUpdate;
  bool gradient = false;  // and nothing besides
  for (const BufferId b : i.out) {
    if (b == kNone) continue;
    gradient = holds[storage_of(p, b)] == Holds::kGradient;
    if (!gradient) break;
  }
  return gradient ? Activity::kWeightGradient : Activity::kBackward;
}

Activity activity_of(const Program& p, const Instruction& i, const std::vector<Holds>& holds) {
  switch (i.kind()) {
    case InstructionKind::kKernel: return of_kernel(p, i, holds);
    case InstructionKind::kFeed:
    case InstructionKind::kFetch: return Activity::kData;
    case InstructionKind::kCopy: return Activity::kHostCopy;
    default: return Activity::kCommunication;  // a commit waits for the votes of others
  }
}

}  // namespace

std::vector<std::vector<Activity>> activities_of(const Program& program, const std::vector<Group>& groups) {
  const std::vector<Holds> holds = contents_of(program, groups);
  std::vector<std::vector<Activity>> out(program.segments.size());
  for (size_t s = 0; s < out.size(); ++s)
    for (const Instruction& i : program.segments[s].instructions) out[s].push_back(activity_of(program, i, holds));
  return out;
}

}  // namespace whale
