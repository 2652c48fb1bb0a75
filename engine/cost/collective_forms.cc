#include "cost/collective_forms.h"

namespace whale {

double all_reduce_seconds(AllReduceForm form, const GroupWork& work, const Profile& profile) {
  constexpr double kPasses = 3;  // of an addition: two operands and the sum
  const auto n = static_cast<double>(work.members), here = static_cast<double>(work.widest);
  const auto messages = [&](double count, double bytes) {
    return count * (profile.link.latency_seconds + bytes / profile.link.bytes_per_second);
  };
  const auto additions = [&](double count, double bytes) {
    return count * kPasses * bytes / profile.device.bytes_per_second;
  };
  const double others = here * (n - 1);
  switch (form) {
    case AllReduceForm::kWhole: return messages(others, work.bytes) + additions(others, work.bytes);
    case AllReduceForm::kSlices: return messages(2 * others, work.bytes / n) + additions(others, work.bytes / n);
    case AllReduceForm::kChain: break;
  }
  const double hops = 2 * static_cast<double>(work.processes - 1);
  return messages(hops, work.chunk) + 2 * work.bytes / profile.link.bytes_per_second + additions(here, work.bytes);
}

AllReduceForm choose_all_reduce(const GroupWork& work, const Profile& profile) {
  AllReduceForm best = AllReduceForm::kWhole;
  for (const AllReduceForm form : {AllReduceForm::kSlices, AllReduceForm::kChain}) {
    if (form == AllReduceForm::kChain && (work.processes < 2 || work.widest < 2)) continue;
    if (all_reduce_seconds(form, work, profile) < all_reduce_seconds(best, work, profile)) best = form;
  }
  return best;
}

double gather_seconds(GatherForm form, const GroupWork& work, const Profile& profile) {
  constexpr double kPasses = 2;    // of a copy
  constexpr double kMeetings = 2;  // of a process's members: before they copy, and after
  const auto n = static_cast<double>(work.members), here = static_cast<double>(work.widest);
  const auto processes = static_cast<double>(work.processes);
  const double part = work.bytes / n, message = profile.link.latency_seconds + part / profile.link.bytes_per_second;
  if (form == GatherForm::kEach) return here * (n - 1) * message;
  return here * (processes - 1) * message + kMeetings * profile.link.latency_seconds +
         here * (n - processes) * kPasses * part / profile.device.bytes_per_second;
}

GatherForm choose_gather(const GroupWork& work, const Profile& profile) {
  if (work.processes < 2 || work.widest < 2) return GatherForm::kEach;
  const bool once = gather_seconds(GatherForm::kOnce, work, profile) < gather_seconds(GatherForm::kEach, work, profile);
  return once ? GatherForm::kOnce : GatherForm::kEach;
}

}  // namespace whale
