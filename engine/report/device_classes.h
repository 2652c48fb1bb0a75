// Devices that do the same, which a picture draws once.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "simulate/simulate.h"

namespace whale {

inline constexpr size_t kMostClasses = 64;  // that are drawn

struct DeviceClass {
  int32_t first = 0, program = 0;
  std::vector<int32_t> devices;  // rising
};

// What kind of device it is, without its number or cores: "cpu", "null-16MB".
std::string kind_text(const DeviceSpec& device);

// Of one program, kind, memory and number of samples; and at the same times, where that leaves no more than
// kMostClasses. times: may be null.
std::vector<DeviceClass> classes_of(const Plan& plan, const Entry& entry, const StepTimes* times);

// What part of the work is theirs along each axis of their mesh that cuts it: "replica 0 of 3: 4 of 8 by the shares
// (4,2,2)".
std::vector<std::string> parts_of(const Plan& plan, const Entry& entry, const DeviceClass& devices);

}  // namespace whale
