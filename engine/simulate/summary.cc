#include "simulate/summary.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "base/error.h"
#include "plan/figures.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

using Spans = std::vector<std::pair<double, double>>;

// Where several overlap they are one; ascending.
Spans joined(Spans spans) {
  std::ranges::sort(spans);
  Spans out;
  for (const auto& [begin, end] : spans) {
    if (end <= begin) continue;
    if (out.empty() || begin > out.back().second)
      out.emplace_back(begin, end);
    else
      out.back().second = std::max(out.back().second, end);
  }
  return out;
}

double length(const Spans& spans) {
  double sum = 0;
  for (const auto& [begin, end] : spans) sum += end - begin;
  return sum;
}

// Of two that are joined.
double shared(const Spans& a, const Spans& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].second, b[j].second) - std::max(a[i].first, b[j].first));
    if (a[i].second < b[j].second)
      ++i;
    else
      ++j;
  }
  return sum;
}

struct Busy {
  Spans compute, communication;
  std::map<std::string, double> phases;
};

}  // namespace

Json simulation_json(const Plan& plan, const Entry& entry) {
  constexpr size_t kMost = size_t{1} << 26;
  const auto began = std::chrono::steady_clock::now();
  const std::optional<StepTimes> times = times_of(plan, entry, kMost);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  if (!times)
    throw error(Code::kResourceExhausted,
                "a step of this plan has more than {} instructions of unlike devices; simulate fewer micro-batches",
                kMost);
  std::map<int32_t, Busy> busy;  // by class
  for (const Event& event : times->events) {
    const Program& p = entry.programs[entry.rows[event.device].program];
    const Instruction& i = p.segments[event.segment].instructions[event.instruction];
    Busy& mine = busy[times->classes[event.device]];
    const bool moves = i.group() != kNone || i.link() != kNone || i.kind() == InstructionKind::kVote ||
                       i.kind() == InstructionKind::kCopy;
    (moves ? mine.communication : mine.compute).emplace_back(event.start, event.end);
    if (!moves) mine.phases[name_of(i.phase)] += event.end - event.start;
  }
  Json out{{"seconds", json_value(times->seconds)},
           {"instructions", times->events.size()},
           {"walk_seconds", json_value(took.count())},
           {"classes", Json::array()}};
  std::map<int32_t, std::vector<int32_t>> devices;
  for (size_t d = 0; d < times->classes.size(); ++d) devices[times->classes[d]].push_back(static_cast<int32_t>(d));
  for (auto& [number, list] : devices) {
    const Spans compute = joined(std::move(busy[number].compute));
    const Spans communication = joined(std::move(busy[number].communication));
    const double hidden = shared(compute, communication);
    Json phases = Json::object();
    for (const auto& [name, seconds] : busy[number].phases) phases[name] = json_value(seconds);
    out["classes"].push_back({{"devices", list},
                              {"compute_seconds", json_value(length(compute))},
                              {"phases", std::move(phases)},
                              {"communication_seconds", json_value(length(communication))},
                              {"hidden_seconds", json_value(hidden)},
                              {"idle_seconds", json_value(std::max(0.0, times->seconds - length(compute) -
                                                                            length(communication) + hidden))}});
  }
  return out;
}

std::string simulation_text(const Json& s) {
  const double whole = s["seconds"].get<double>();
  const auto share = [&](const Json& c, const char* of) {
    return whole > 0 ? fmt::format("{:.1f} %", 100 * c[of].get<double>() / whole) : std::string("-");
  };
  std::string out = fmt::format("a step takes {}\n\n{:<28}{:>10}{:>15}{:>11}{:>8}\n", seconds_text(whole), "devices",
                                "compute", "communication", "beside it", "idle");
  constexpr size_t kRows = 40, kRuns = 3;
  for (size_t k = 0; k < s["classes"].size() && k < kRows; ++k) {
    const Json& c = s["classes"][k];
    out += fmt::format("{:<28}{:>10}{:>15}{:>11}{:>8}\n", devices_text(c["devices"].get<std::vector<int32_t>>(), kRuns),
                       share(c, "compute_seconds"), share(c, "communication_seconds"), share(c, "hidden_seconds"),
                       share(c, "idle_seconds"));
  }
  if (s["classes"].size() > kRows) out += fmt::format("and {} more classes of devices\n", s["classes"].size() - kRows);
  const double walked = s["walk_seconds"].get<double>();
  out += fmt::format("\n{} instructions walked in {}, {:.2f} million a second\n", s["instructions"].get<int64_t>(),
                     seconds_text(walked), static_cast<double>(s["instructions"].get<int64_t>()) / walked / 1e6);
  return out;
}

}  // namespace whale
