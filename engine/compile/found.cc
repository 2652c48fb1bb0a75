#include "compile/found.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "base/text.h"
#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "compile/judge.h"
#include "plan/figures.h"

namespace whale {
namespace {

std::string options_text(const Judged& j) {
  std::vector<std::string> out;
  const PlanOptions& o = j.candidate.options;
  if (j.candidate.accumulation > 0) out.push_back(fmt::format("accumulation {}", j.candidate.accumulation));
  if (o.zero > 0) out.push_back(fmt::format("zero {}", o.zero));
  if (o.recompute != Recompute::kNone)
    out.emplace_back(o.recompute == Recompute::kFull ? "recompute full" : "recompute selective");
  if (o.offload != 0) out.emplace_back(o.offload == kOffloadState ? "offload state" : "offload all");
  return fmt::format("{}", fmt::join(out, ", "));
}

}  // namespace

void rank(Found& found, const Judge& judge) {
  const auto key = [&](const Judged& j) {
    const bool allowed = judge.is_allowed(j);
    return std::tuple(!allowed, !(j.seconds > 0 && j.missing == 0), j.missing, allowed ? 0 : judge.times_over(j),
                      judge.worth(j), j.seconds + j.price);
  };
  std::ranges::stable_sort(found.list, [&](const Judged& a, const Judged& b) { return key(a) < key(b); });
}

void say_why(Found& found, const Judge& judge, const SearchOptions& asked) {
  const Judged* winner = found.list.empty() || !judge.is_allowed(found.list[0]) ? nullptr : &found.list[0];
  for (Judged& j : found.list) {
    j.allowed = judge.is_allowed(j);
    if (&j == winner || !j.lost.empty()) continue;
    if (j.missing > 0)
      j.lost = fmt::format("does not fit: {}{} are missing", j.at_least ? "at least " : "",
                           bytes_text(static_cast<double>(j.missing)));
    else if (j.price > asked.most_price)
      j.lost = fmt::format("over the budget: {:.4g} a step, at most {:.4g} was asked for", j.price, asked.most_price);
    else if (judge.is_too_slow(j))
      j.lost = fmt::format("too slow: {:.5g} samples a second, at least {:.5g} were asked for",
                           static_cast<double>(found.batch) / j.seconds, asked.least_throughput);
    else if (winner != nullptr && asked.objective == Objective::kPrice && winner->price > 0)
      j.lost = fmt::format("{:.2f} times the price", j.price / winner->price);
    else if (winner != nullptr && winner->seconds > 0)
      j.lost = fmt::format("{:.2f} times as slow", j.seconds / winner->seconds);
    else
      j.lost = "no faster";
  }
}

std::string whole_text(const Judged& j) {
  std::string out = j.candidate.strategy.empty() ? "as it is annotated" : j.candidate.strategy;
  if (const std::string options = options_text(j); !options.empty()) out += ", " + options;
  if (!j.candidate.of.empty()) out += " (" + j.candidate.of + ")";
  return out;
}

std::string found_text(const Found& found, const std::vector<DeviceSpec>& devices) {
  std::string out = fmt::format("{:>10}{:>10}{:>10}  {}\n", "a step", "memory", "price", "strategy");
  constexpr size_t kRows = 12, kWide = 110;
  for (size_t k = 0; k < found.list.size() && k < kRows; ++k) {
    const Judged& j = found.list[k];
    out += fmt::format("{:>10}{:>10}{:>10}  {}{}\n", j.seconds > 0 ? seconds_text(j.seconds) : "-",
                       j.bytes > 0 ? bytes_text(static_cast<double>(j.bytes)) : "-",
                       j.price > 0 ? fmt::format("{:.3g}", j.price) : "-", brief(whole_text(j), kWide),
                       j.simulated ? "" : " *");
    if (!j.lost.empty()) out += fmt::format("{:32}{}\n", "", brief(j.lost, kWide));
  }
  out += "* estimated; the others are timed by the simulator\n";
  if (found.list.size() > kRows) out += fmt::format("and {} more\n", found.list.size() - kRows);
  if (found.not_tried > 0)
    out += fmt::format("{} were not tried: by counts many times as slow, or there was no time\n", found.not_tried);
  if (found.fits() && found.winner().candidate.devices.size() < devices.size())
    out += fmt::format("{} of {} devices stay idle\n", devices.size() - found.winner().candidate.devices.size(),
                       devices.size());
  return out;
}

Json json_of(const Judged& j, const std::vector<DeviceSpec>& devices) {
  constexpr const char* kPolicies[] = {"none", "selective", "full"};
  const PlanOptions& o = j.candidate.options;
  return {{"strategy", j.candidate.strategy},
          {"options", options_text(j)},
          {"accumulation", j.candidate.accumulation},
          {"zero", o.zero},
          {"recompute", kPolicies[static_cast<size_t>(o.recompute)]},
          {"offload", o.offload == 0               ? ""
                      : o.offload == kOffloadState ? "state"
                                                   : "state,gradients,parameters,activations"},
          {"devices", j.candidate.devices},
          {"all_devices", j.candidate.devices.size() == devices.size() && std::ranges::is_sorted(j.candidate.devices)},
          {"devices_text", to_string(chosen_of(devices, j.candidate.devices))},
          {"seconds", json_value(j.seconds)},
          {"simulated", j.simulated},
          {"bytes", j.bytes},
          {"missing_bytes", j.missing},
          {"price", json_value(j.price)},
          {"lost", j.lost}};
}
Json found_json(const Found& found, const std::vector<DeviceSpec>& devices) {
  Json rows = Json::array(), front = Json::array();
  for (const Judged& j : found.list) rows.push_back(json_of(j, devices));
  for (const Judged& j : pareto_front(found)) front.push_back(json_of(j, devices));
  const bool computes = std::ranges::any_of(devices, [](const DeviceSpec& d) { return traits(d.kind).computes; });
  return {{"batch", found.batch}, {"computes", computes},  // false: the devices are not here
          {"fits", found.fits()}, {"candidates", rows},   {"not_tried", found.not_tried}, {"pareto", front}};
}

std::vector<Judged> pareto_front(const Found& found) {
  std::vector<Judged> out;
  for (const Judged& j : found.list)
    if (j.allowed) out.push_back(j);
  std::ranges::stable_sort(out, [](const Judged& a, const Judged& b) {
    return std::pair(a.price, a.seconds) < std::pair(b.price, b.seconds);
  });
  double fastest = std::numeric_limits<double>::infinity();
  std::erase_if(out, [&](const Judged& j) {
    if (j.seconds >= fastest) return true;
    fastest = j.seconds;
    return false;
  });
  return out;
}

}  // namespace whale
