// What the engine did, for a caller to drain. Nothing is printed.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "whale/whale.h"

namespace whale::capi {

struct LogRecord {
  whale_severity severity = WHALE_SEVERITY_INFO;
  int64_t nanoseconds = 0;  // since 1970
  const char* topic = "";   // of static life
  std::string message;
};

class Log {
 public:
  static constexpr size_t kMost = 1000;

  // From any thread. Without memory for it the record is dropped: nothing fails for its log.
  void add(whale_severity severity, const char* topic, const std::string& message) noexcept;
  // All records and how many were dropped before the first.
  std::deque<LogRecord> drain(int64_t& dropped);

 private:
  std::mutex mutex_;
  std::deque<LogRecord> records_;
  int64_t dropped_ = 0;
};

}  // namespace whale::capi
