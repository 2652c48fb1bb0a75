#include "report/measured.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "base/watch.h"
#include "plan/figures.h"
#include "plan/trace.h"
#include "report/predicted_trace.h"

namespace whale {
namespace {

using Value = nlohmann::json;

constexpr double kMostMicroseconds = 1e15;  // thirty years

// What instructions of a device's program do, by what a trace says of them.
using Known = std::map<std::tuple<std::string, std::string, std::string>, Activity>;  // name, op, phase

Known known_of(const Plan& plan, const Program& p) {
  Known known;
  const std::vector<std::vector<Activity>> activities = activities_of(p, plan.groups);
  for (size_t s = 0; s < p.segments.size(); ++s)
    for (size_t k = 0; k < p.segments[s].instructions.size(); ++k) {
      const Instruction& i = p.segments[s].instructions[k];
      known.try_emplace({i.name, std::string(i.verb()), name_of(i.phase)}, activities[s][k]);
    }
  return known;
}

class TraceReader {
 public:
  TraceReader(const Plan& plan, Measured& out) : plan_(plan), out_(out) {}

  void read(const std::string& text, size_t number) {
    number_ = number;
    const Value file = Value::parse(text, nullptr, false);
    if (file.is_discarded()) throw fault("is no JSON");
    const Value none = Value::object();
    if (const Value& about = file.is_object() && file.contains("otherData") ? file["otherData"] : none;
        about.is_object())
      check_about(about);
    const Value* events = file.is_array()                                    ? &file
                          : file.is_object() && file.contains("traceEvents") ? &file["traceEvents"]
                                                                             : nullptr;
    if (events == nullptr || !events->is_array()) throw fault("has no list \"traceEvents\"");
    std::set<int32_t> here;
    for (size_t e = 0; e < events->size(); ++e) {
      const Value& event = (*events)[e];
      if (text_at(event, "ph") != "X") continue;
      Watch::look();
      const std::string where = fmt::format("event {}", e);
      const auto device = static_cast<int32_t>(number_at(event, "pid", 0, static_cast<double>(plan_.devices.size()) - 1,
                                                         where + " is of process {}; the plan has the devices"));
      const auto queue = static_cast<Queue>(static_cast<int>(
          number_at(event, "tid", 0, kQueues - 1, where + " is of thread {}; a device has the queues")));
      if (taken_.contains(device)) throw fault(fmt::format("is of device {}, and so is one before it", device));
      here.insert(device);
      span(event, device, queue, where);
    }
    if (here.empty()) throw fault("holds no spans (\"ph\": \"X\")");
    taken_.insert(here.begin(), here.end());
  }

  void end() {
    for (auto& [at, spans] : spans_) {
      std::stable_sort(spans.begin(), spans.end(),
                       [](const LabelledSpan& a, const LabelledSpan& b) { return a.start < b.start; });
      out_.timeline.tracks.push_back({at.first, at.second, std::move(spans)});
    }
  }

 private:
  Error fault(const std::string& what) const {
    return invalid("trace {} {}; expected a timeline as `whale run --trace FILE` writes it for this plan", number_,
                   what);
  }

  static std::string text_at(const Value& from, const char* key) {
    if (!from.is_object() || !from.contains(key) || !from[key].is_string()) return "";
    return from[key].get<std::string>();
  }

  double number_at(const Value& from, const char* key, double least, double most, const std::string& what) const {
    const bool there = from.is_object() && from.contains(key) && from[key].is_number();
    const double x = there ? from[key].get<double>() : NAN;
    if (!(x >= least && x <= most))
      throw fault(fmt::format("{} {} to {}",
                              fmt::format(fmt::runtime(what), there ? fmt::format("{}", x) : std::string("none")),
                              least, most));
    return x;
  }

  void check_about(const Value& about) {
    if (text_at(about, "timeline") == kTraceClocks[static_cast<size_t>(TraceClock::kPredicted)] &&
        !is_of_null_devices(plan_))
      throw fault("is a predicted timeline, not one of a run");
    for (const auto& [key, own] : {std::pair{"model", plan_.model}, std::pair{"strategy", plan_.strategy}})
      if (about.contains(key) && text_at(about, key) != own)
        throw fault(fmt::format("is of {} '{}', and the plan of '{}'", key, brief(text_at(about, key)), brief(own)));
    if (about.contains("devices"))
      number_at(about, "devices", static_cast<double>(plan_.devices.size()), static_cast<double>(plan_.devices.size()),
                "is of {} devices; the plan has");
    const std::string entry = text_at(about, "entry");
    const int64_t batch = about.contains("batch")
                              ? static_cast<int64_t>(number_at(about, "batch", 0, 9e15, "is of batch {}, expected"))
                              : 0;
    if (number_ > 1 && (entry != out_.entry || batch != out_.batch))
      throw fault(fmt::format("is of {} with batch {}, and the first one of {} with batch {}", brief(entry), batch,
                              brief(out_.entry), out_.batch));
    out_.entry = entry, out_.batch = batch;
  }

  void span(const Value& event, int32_t device, Queue queue, const std::string& where) {
    const double begin =
        number_at(event, "ts", 0, kMostMicroseconds, where + " begins at {}, expected microseconds of");
    const double length = number_at(event, "dur", 0, kMostMicroseconds, where + " lasts {}, expected microseconds of");
    const Value none = Value::object();
    const Value& args = event.contains("args") && event["args"].is_object() ? event["args"] : none;
    SpanLabel label{text_at(event, "name"), text_at(args, "op"), text_at(args, "scope")};
    label.activity = activity(device, queue, label, text_at(event, "cat"));
    if (args.contains("flops") && args["flops"].is_number()) {
      const double flops = args["flops"].get<double>();
      if (std::isfinite(flops)) label.flops = flops;
    }
    const double u =
        args.contains("micro_batch") && args["micro_batch"].is_number() ? args["micro_batch"].get<double>() : 0;
    const auto micro_batch = static_cast<int32_t>(u >= 0 && u < INT32_MAX ? u : 0);
    const double end = begin + length;
    out_.timeline.seconds = std::max(out_.timeline.seconds, end * 1e-6);
    spans_[{device, queue}].push_back(
        {out_.timeline.label_of(std::move(label)), micro_batch, begin * 1e-6, end * 1e-6});
  }

  Activity activity(int32_t device, Queue queue, const SpanLabel& label, const std::string& phase) {
    const Entry* entry = plan_.find_entry(out_.entry, out_.batch);
    if (entry == nullptr && !plan_.entries.empty()) entry = &plan_.entries[0];
    if (entry != nullptr) {
      const int32_t program = entry->rows[device].program;
      const auto [known, fresh] = programs_.try_emplace(program);
      if (fresh) known->second = known_of(plan_, entry->programs[program]);
      if (const auto at = known->second.find({label.name, label.op, phase}); at != known->second.end())
        return at->second;
    }
    if (carrier_of(queue) == Carrier::kNetwork) return Activity::kCommunication;
    if (carrier_of(queue) == Carrier::kHostLink) return Activity::kHostCopy;
    return phase == "backward" ? Activity::kBackward : phase == "update" ? Activity::kUpdate : Activity::kForward;
  }

  const Plan& plan_;
  Measured& out_;
  size_t number_ = 0;
  std::set<int32_t> taken_;
  std::map<int32_t, Known> programs_;
  std::map<std::pair<int32_t, Queue>, std::vector<LabelledSpan>> spans_;
};

}  // namespace

Measured measured_of(const Plan& plan, const std::vector<std::string>& files) {
  Measured out;
  TraceReader reader(plan, out);
  for (size_t f = 0; f < files.size(); ++f) reader.read(files[f], f + 1);
  reader.end();
  return out;
}

}  // namespace whale
