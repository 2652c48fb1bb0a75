// What makes a plan take less memory, and costs time: ZeRO, recompute and offload.
#pragma once

#include <array>
#include <vector>

#include "plan/figures.h"
#include "report/estimate.h"

namespace whale {

struct Saving {
  const char* name;
  int zero;
  Recompute recompute;
  uint32_t offload;  // classes in the host's memory
};
// By what they cost where the network is fast.
inline constexpr Saving kSavings[] = {
    {"", 0, Recompute::kNone, 0},
    {"zero 1", 1, Recompute::kNone, 0},
    {"recompute selective", 0, Recompute::kSelective, 0},
    {"zero 1, recompute selective", 1, Recompute::kSelective, 0},
    {"zero 2, recompute selective", 2, Recompute::kSelective, 0},
    {"zero 3, recompute selective", 3, Recompute::kSelective, 0},
    {"recompute full", 0, Recompute::kFull, 0},
    {"zero 1, recompute full", 1, Recompute::kFull, 0},
    {"zero 2, recompute full", 2, Recompute::kFull, 0},
    {"zero 3, recompute full", 3, Recompute::kFull, 0},
    {"zero 3, recompute full, offload state", 3, Recompute::kFull, kOffloadState},
    {"zero 3, recompute full, offload all", 3, Recompute::kFull, kOffloadAll},
};

// In addition to what is asked for. `replicas`: there are some, which ZeRO is between.
PlanOptions saved(PlanOptions asked, const Saving& saving, bool replicas);
// Whether `more` saves in no way less.
bool saves_as_much(const PlanOptions& more, const PlanOptions& less);

// What was seen of one strategy with some savings, and what others can come to at best.
class SavingsSeen {
 public:
  // Where devices are unlike, samples and stages go from one to the other: all have room together. `cut`: parameters go
  // with them.
  SavingsSeen(bool unlike, bool cut) : unlike_(unlike), cut_(cut) {}
  void see(const PlanOptions& options, const Estimate& estimate, const std::vector<DeviceSpec>& devices);
  // Bytes that a device lacks at least; 0: it may fit. `replicas`: that ZeRO is between.
  int64_t least_missing(const PlanOptions& options, double replicas) const;
  // Seconds of a step at least.
  double least_seconds(const PlanOptions& options) const;

 private:
  struct Class {
    MemoryClasses held;
    double has = 0;  // the least of its devices
    double devices = 0;
  };
  struct Seen {
    PlanOptions options;
    double seconds = 0;
    std::vector<Class> classes;  // empty where a device does not say how much it has
  };
  double least_missing(const Seen& seen, const PlanOptions& options, double replicas) const;

  bool unlike_, cut_;
  std::vector<Seen> seen_;
};

}  // namespace whale
