// What a run did when: filled by the device threads into memory set aside before, read between runs.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale {

inline int64_t now_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Time that this thread has had on a processor.
inline int64_t cpu_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

struct TimelineRecord {
  const Instruction* instruction = nullptr;
  int32_t micro_batch = 0;
  int64_t begin = 0, end = 0;  // nanoseconds of the steady clock
};

struct QueueTimes {  // nanoseconds of the last run
  int64_t ops = 0, collectives = 0, copies = 0, waiting = 0;
  // Of the processor, on the queue's own thread, when tracing was on: in all, and inside ops, collectives and copies.
  int64_t cpu = 0, cpu_inside = 0;
};

struct QueueTimeline {
  std::vector<TimelineRecord> records;  // never grows in a run
  QueueTimes times;
};
using DeviceTimeline = std::array<QueueTimeline, kQueues>;

// The devices that are here, as plan/trace.h writes timelines.
std::string to_chrome_trace(const std::vector<DeviceTimeline>& devices, const Plan& plan, const Entry& entry);

}  // namespace whale
