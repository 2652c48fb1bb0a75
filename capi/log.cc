#include "log.h"

#include <chrono>
#include <memory>
#include <utility>

#include "guard.h"
#include "handles.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

struct whale_log {
  std::deque<LogRecord> records;
  int64_t dropped = 0;
};

namespace whale::capi {

void Log::add(whale_severity severity, const char* topic, const std::string& message) noexcept {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const std::lock_guard lock(mutex_);
  try {
    records_.push_back({severity, std::chrono::duration_cast<std::chrono::nanoseconds>(now).count(), topic, message});
  } catch (...) {
    ++dropped_;
    return;
  }
  if (records_.size() <= kMost) return;
  records_.pop_front();
  ++dropped_;
}

std::deque<LogRecord> Log::drain(int64_t& dropped) {
  std::deque<LogRecord> out;
  const std::lock_guard lock(mutex_);
  out.swap(records_);
  dropped = std::exchange(dropped_, 0);
  return out;
}

}  // namespace whale::capi

whale_status* whale_engine_drain_log(whale_engine* engine, whale_log** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    auto log = std::make_unique<whale_log>();
    log->records = engine->log->drain(log->dropped);
    *out = log.release();
  });
}

size_t whale_log_count(const whale_log* log) { return log == nullptr ? 0 : log->records.size(); }
int64_t whale_log_dropped(const whale_log* log) { return log == nullptr ? 0 : log->dropped; }

whale_status* whale_log_get(const whale_log* log, size_t index, whale_log_record* out) {
  return guard([&] {
    const auto& records = need(log, "log").records;
    if (index >= records.size()) throw invalid("argument `index` is {}; there are {} records", index, records.size());
    const LogRecord& r = records[index];
    fill(out,
         {sizeof(whale_log_record),
          r.severity,
          r.nanoseconds,
          {r.topic, std::strlen(r.topic)},
          {r.message.data(), r.message.size()}},
         "out");
  });
}

void whale_log_release(whale_log* log) { delete log; }
