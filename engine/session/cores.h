// Which cores each CPU device of a session gets.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "plan/plan.h"

namespace whale {

// How many devices of an engine's sessions use each core.
using CoreUse = std::map<int, int>;

// The specs with `cores` decided. Cores named by hand (cpu@CORES) stay; one that is not in `allowed` is an error that
// says which there are. The other CPU devices get as many as the plan gave them (of fewer `usable` ones their share),
// or `threads` when that is positive: the least used ones, of equals those of the plan. `use` is counted up.
std::vector<DeviceSpec> assign_cores(std::vector<DeviceSpec> specs, const std::vector<int>& usable,
                                     const std::vector<int>& allowed, int threads, CoreUse& use);

// The cores that an engine's sessions have; thread-safe.
class CoreLeases {
 public:
  // Until the result is gone. Of cores that this process may use.
  class Lease {
   public:
    Lease(std::shared_ptr<CoreLeases> from, std::vector<DeviceSpec> specs, bool counted);
    ~Lease();
    Lease(const Lease&) = delete;
    const std::vector<DeviceSpec>& specs() const { return specs_; }

   private:
    std::shared_ptr<CoreLeases> from_;
    std::vector<DeviceSpec> specs_;
    bool counted_;
  };
  // pin false: the specs say how many cores each device has, and none is taken.
  static std::unique_ptr<Lease> lease(const std::shared_ptr<CoreLeases>& from, std::vector<DeviceSpec> specs,
                                      int threads, bool pin);

 private:
  std::mutex mutex_;
  CoreUse use_;
};

}  // namespace whale
