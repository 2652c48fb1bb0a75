#include "run/flight_record.h"

#include <unistd.h>

#include <array>
#include <ctime>

namespace whale {
namespace {

double seconds(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// Times are seconds before the record was made.
Json described(const QueuePlace& place, const Recorder::Event& event, const std::vector<int32_t>& ranks, int64_t now) {
  Json out = {{"what", place_text(place, ranks)},
              {"op", place.instruction->verb()},
              {"name", place.of},
              {"scope", place.scope},
              {"phase", phase_text(place.instruction->phase)},
              {"row", event.row},
              {"instruction", event.instruction},
              {"step", event.step},
              {"waits", waits_for_others(*place.instruction)}};
  if (place.stage >= 0) out["stage"] = place.stage;
  if (place.micro_batch >= 0) out["micro_batch"] = place.micro_batch;
  if (!place.devices.empty()) out["devices"] = place.devices;
  out["began"] = event.begin == 0 ? Json() : Json(seconds(now - event.begin));
  out["seconds"] = event.end == 0 ? Json() : Json(seconds(event.end - event.begin));
  return out;
}

}  // namespace

std::string flight_record_json(const Machine& machine, const Executor* last, const std::string& error) {
  static const std::vector<int32_t> kOneRank;
  const Plan& plan = machine.plan();
  const Wire* wire = machine.wire();
  const std::vector<int32_t>& ranks = wire == nullptr ? kOneRank : machine.ranks();
  const int64_t now = now_nanoseconds();
  Json record = {{"flight_record", 1},
                 {"rank", wire == nullptr ? 0 : wire->rank()},
                 {"ranks", wire == nullptr ? 1 : wire->size()},
                 {"host", host_name()},
                 {"process", getpid()},
                 {"time", static_cast<int64_t>(std::time(nullptr))},
                 {"model", plan.model},
                 {"strategy", plan.strategy},
                 {"error", error}};
  Json queues = Json::array();
  if (last != nullptr) {
    const RankPlace place = last->place();
    record["entry"] = last->entry().name;
    record["batch"] = last->entry().batch;
    record["waits"] = place.waits;
    record["at"] = place.what;
    for (size_t d = 0; d < machine.size(); ++d)
      for (size_t s = 0; s < kQueues; ++s) {
        const Recorder* recorder = last->recorder(d, s);
        if (recorder == nullptr) continue;
        const Recorder::Seen seen = recorder->see();
        Json events = Json::array();
        for (const Recorder::Event& event : seen.events)
          events.push_back(described(place_of(plan, last->entry(), d, event), event, ranks, now));
        queues.push_back({{"device", d},
                          {"kind", name_of(plan.devices[d].kind)},
                          {"queue", kQueueDefs[s].name},
                          {"in_run", seen.in_run},
                          {"instructions", std::move(events)}});
      }
  }
  record["queues"] = std::move(queues);
  return text_of(record);
}

}  // namespace whale
