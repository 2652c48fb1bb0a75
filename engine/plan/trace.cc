#include "plan/trace.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "base/format.h"
#include "base/json.h"
#include "plan/figures.h"

namespace whale {
namespace {

// Text is written, not a tree of values: a step may have a million spans.
class TraceWriter {
 public:
  explicit TraceWriter(const Plan& plan) : plan_(plan) { named_.scopes = plan.scopes; }

  void name(const char* what, int32_t device, int32_t queue, const std::string& name) {
    next();
    fmt::format_to(std::back_inserter(text_), R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{"name":{}}}}})",
                   device, queue, what, text_of(Json(name)));
  }

  void span(const TraceTrack& track, const TraceSpan& s, int64_t origin) {
    next();
    const auto [known, fresh] = written_.try_emplace(s.instruction);
    if (fresh) known->second = described(*s.instruction);
    fmt::format_to(std::back_inserter(text_),
                   R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},{},"micro_batch":{}}}}})", track.device,
                   static_cast<int>(track.queue), microseconds(s.begin - origin), microseconds(s.end - s.begin),
                   known->second, s.micro_batch);
  }

  std::string ended(const TraceOf& of) {
    const Json other = {{"timeline", kTraceClocks[static_cast<size_t>(of.clock)]},
                        {"model", plan_.model},
                        {"strategy", plan_.strategy},
                        {"entry", of.entry},
                        {"batch", of.batch},
                        {"devices", plan_.devices.size()}};
    return R"({"displayTimeUnit":"ms","otherData":)" + text_of(other) + R"(,"traceEvents":[)" + text_ + "]}";
  }

 private:
  void next() {
    if (!text_.empty()) text_ += ",\n";
  }
  // To the nanosecond: neighbours never overlap by rounding.
  static std::string microseconds(int64_t nanoseconds) {
    return fmt::format("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000);
  }
  // But for the micro-batch, which ends the arguments.
  std::string described(const Instruction& i) const {
    return fmt::format(R"("name":{},"cat":"{}","args":{{"op":{},"scope":{},"flops":{})", text_of(Json(i.name)),
                       name_of(i.phase), text_of(Json(i.verb())), text_of(Json(named_.scope_path(i.scope))),
                       text_of(json_value(i.flops)));
  }

  const Plan& plan_;
  Graph named_;  // of the plan's scopes: the source has them before a strategy was laid over it
  std::map<const Instruction*, std::string> written_;
  std::string text_;
};

}  // namespace

std::string trace_text(const Plan& plan, const TraceOf& of, const std::vector<TraceTrack>& tracks,
                       const std::vector<std::string>& names) {
  int64_t origin = INT64_MAX;
  for (const TraceTrack& track : tracks)
    for (const TraceSpan& s : track.spans) origin = std::min(origin, s.begin);
  TraceWriter out(plan);
  int32_t device = kNone;
  for (const TraceTrack& track : tracks) {
    const auto d = static_cast<size_t>(track.device);
    if (track.device != device)
      out.name("process_name", track.device, 0,
               d < names.size() ? names[d] : fmt::format("{} {}", name_of(plan.devices[d].kind), d));
    device = track.device;
    if (track.spans.empty()) continue;
    out.name("thread_name", track.device, static_cast<int32_t>(track.queue), name_of(track.queue));
    for (const TraceSpan& s : track.spans) out.span(track, s, origin);
  }
  return out.ended(of);
}

}  // namespace whale
