#include "compile/remedy_changes.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <limits>
#include <set>

#include "compile/checks.h"
#include "compile/savings.h"
#include "plan/groups.h"

namespace whale {
namespace {

constexpr const char* kPolicies[] = {"none", "selective", "full"};

// In quotes, as a shell takes it.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string{c};
  return out + "'";
}

// The text with all of its micro_batches times as many; 0 times: 0.
std::string with_micro_batches(std::string strategy, int64_t times) {
  constexpr std::string_view kWritten = "micro_batches=";
  for (size_t at = strategy.find(kWritten); at != std::string::npos; at = strategy.find(kWritten, at)) {
    at += kWritten.size();
    size_t end = at;
    while (end < strategy.size() && std::isdigit(static_cast<unsigned char>(strategy[end])) != 0) ++end;
    if (end == at || end - at > 9) continue;
    const std::string number = std::to_string(times * std::stoll(strategy.substr(at, end - at)));
    strategy.replace(at, end - at, number);
  }
  return strategy;
}

int64_t bytes_of(const MemoryClasses& held, uint32_t offload) {
  int64_t out = 0;
  if (offload & kOffloadState) out += held.state;
  if (offload & kOffloadActivations) out += held.activations;
  if (offload & kOffloadGradients) out += held.gradients;
  if (offload & kOffloadParameters) out += held.parameters;
  return out;
}

bool same_held(const RemedyChanges::Measured& base, const std::vector<const RemedyChanges::Measured*>& chosen,
               size_t d) {
  const auto same = [&](const RemedyChanges::Measured& m) {
    const MemoryClasses &a = m.held[d], &b = m.held[d - 1];
    return a.total() == b.total() && a.parameters == b.parameters && a.activations == b.activations;
  };
  return same(base) && std::ranges::all_of(chosen, [&](const RemedyChanges::Measured* m) { return same(*m); });
}

}  // namespace

RemedyChanges::RemedyChanges(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked,
                             const Plan& plan, const Shortage& shortage, bool options_too)
    : graph_(graph),
      devices_(devices),
      asked_(asked),
      plan_(plan),
      shortage_(shortage),
      options_too_(options_too),
      trains_(shortage.entry == "train"),
      evaluates_(!trains_ && trains(graph)),
      strategy_(asked.strategy.empty() ? graph.default_strategy : asked.strategy) {}

CompileOptions RemedyChanges::options_of(const Change& change) const {
  CompileOptions out = asked_;
  static_cast<PlanOptions&>(out) = change.options;
  if (change.times == 1) return out;
  if (strategy_.find("micro_batches=") != std::string::npos)
    out.strategy = with_micro_batches(strategy_, change.times),
    out.accumulation *= out.accumulation > 1 ? change.times : 1;
  else
    out.accumulation = change.times * plan_.micro_batches;
  return out;
}

std::string RemedyChanges::flags_of(const CompileOptions& options) const {
  std::vector<std::string> out;
  const bool all = options_too_;
  if (all || options.strategy != asked_.strategy)
    if (!options.strategy.empty()) out.push_back("--strategy " + quoted(options.strategy));
  if (options.accumulation != (all ? 0 : asked_.accumulation))
    out.push_back(fmt::format("--accumulation {}", options.accumulation));
  if (options.zero > (all ? 0 : asked_.zero)) out.push_back(fmt::format("--zero {}", options.zero));
  if (options.recompute > (all ? Recompute::kNone : asked_.recompute))
    out.push_back(fmt::format("--recompute {}", kPolicies[static_cast<size_t>(options.recompute)]));
  if (options.offload != (all ? 0 : asked_.offload)) {
    std::string classes = offload_text(options.offload);
    std::erase(classes, ' ');
    out.push_back("--offload " + classes);
  }
  return fmt::format("{}", fmt::join(out, " "));
}

bool RemedyChanges::is_asked_for(const std::string& strategy) const {
  return strategy.empty() || strategy == strategy_ || strategy == plan_.strategy;
}

bool RemedyChanges::has_form_asked_for(const std::string& strategy) const {
  const std::string form = with_micro_batches(strategy, 0);
  return is_asked_for(strategy) || form == with_micro_batches(strategy_, 0) ||
         form == with_micro_batches(plan_.strategy, 0);
}

bool RemedyChanges::may_have_more_micro_batches() const {
  const bool written = std::ranges::any_of(
      graph_.scopes, [](const Scope& s) { return s.kind == ScopeKind::kPipeline && s.micro_batches > 0; });
  return strategy_.find("micro_batches=") != std::string::npos || (!written && trains(graph_));
}

std::vector<RemedyChanges::Change> RemedyChanges::single_changes(const Measured& base) const {
  std::vector<Change> out;
  const PlanOptions& now = asked_;
  const auto with = [&](const auto& set) {
    Change change{now};
    set(change);
    out.push_back(std::move(change));
  };
  const bool recomputes = trains_ && now.stage_recompute.empty();
  const bool replicas = most_replicas(plan_.meshes) > 1 && !now.adasum;
  if (recomputes && now.recompute < Recompute::kSelective)
    with([](Change& c) { c.options.recompute = Recompute::kSelective; });
  for (int level = now.zero + 1; replicas && level <= 3; ++level)
    if (trains(graph_)) with([&](Change& c) { c.options.zero = level; });
  if (recomputes && now.recompute < Recompute::kFull) with([](Change& c) { c.options.recompute = Recompute::kFull; });
  const int64_t samples = samples_together();
  std::set<int64_t> more{2, 4, 8, 16, 64};
  if (samples > 1 && samples < 64) more.insert(samples);  // one each
  for (const int64_t times : more)
    if (times <= samples && may_have_more_micro_batches()) with([&](Change& c) { c.times = times; });
  if (activations_are_too_many(base))
    std::stable_partition(out.begin(), out.end(), [&](const Change& c) { return c.options.zero == now.zero; });
  for (const OffloadClass each : offload_by_size(base))
    if (!(now.offload & each) && (trains_ || each == kOffloadParameters || (each == kOffloadState && evaluates_)))
      with([&](Change& c) { c.options.offload |= each; });
  return out;
}

bool RemedyChanges::activations_are_too_many(const Measured& base) const {
  for (size_t d = 0; d < devices_.size(); ++d)
    if (const int64_t has = devices_[d].memory_bytes; has > 0 && base.held[d].activations > has) return true;
  return false;
}

// On the device that lacks most.
std::vector<OffloadClass> RemedyChanges::offload_by_size(const Measured& base) const {
  std::vector<OffloadClass> out{kOffloadState, kOffloadActivations, kOffloadGradients, kOffloadParameters};
  std::ranges::stable_sort(out, std::greater{},
                           [&](OffloadClass each) { return bytes_of(base.held[shortage_.device], each); });
  return out;
}

bool RemedyChanges::may_be_enough(const Change& change, const Measured& base) const {
  return bytes_of(base.held[shortage_.device], change.options.offload & ~asked_.offload) >= base.tried.missing;
}

int64_t RemedyChanges::samples_together() const {
  const int64_t batch = shortage_.batch > 0 ? shortage_.batch : std::max<int64_t>(1, batch_of(graph_));
  const int64_t parts = most_replicas(plan_.meshes) * plan_.micro_batches;
  return (batch + parts - 1) / parts;
}

std::vector<RemedyChanges::Guess> RemedyChanges::combined(const Measured& base,
                                                          const std::vector<Measured>& singles) const {
  std::vector<Guess> out;
  std::vector<const Measured*> chosen;
  const auto add = [&](auto&& self, size_t from) -> void {
    constexpr size_t kTogether = 7;
    if (chosen.size() >= 2) out.push_back(guess_of(base, chosen));
    if (chosen.size() == kTogether) return;
    for (size_t k = from; k < singles.size(); ++k) {
      const Change& c = singles[k].tried.change;
      const bool same = std::ranges::any_of(chosen, [&](const Measured* other) {
        const Change& o = other->tried.change;
        const auto both = [&](bool a, bool b) { return a && b; };
        return both(c.options.zero != asked_.zero, o.options.zero != asked_.zero) ||
               both(c.options.recompute != asked_.recompute, o.options.recompute != asked_.recompute) ||
               both(c.times > 1, o.times > 1);
      });
      if (same) continue;
      chosen.push_back(&singles[k]);
      self(self, k + 1);
      chosen.pop_back();
    }
  };
  add(add, 0);
  return out;
}

RemedyChanges::Guess RemedyChanges::guess_of(const Measured& base, const std::vector<const Measured*>& chosen) const {
  Guess out{{asked_}, chosen.size(), base.tried.seconds, -std::numeric_limits<double>::infinity()};
  for (const Measured* one : chosen) {
    const Change& c = one->tried.change;
    PlanOptions& o = out.change.options;
    o.zero = std::max(o.zero, c.options.zero), o.recompute = std::max(o.recompute, c.options.recompute);
    o.offload |= c.options.offload, out.change.times *= c.times;
    out.seconds *= one->tried.seconds / base.tried.seconds;
  }
  constexpr int64_t MemoryClasses::*kAll[] = {&MemoryClasses::parameters, &MemoryClasses::state,
                                              &MemoryClasses::buffers,    &MemoryClasses::gradients,
                                              &MemoryClasses::copies,     &MemoryClasses::activations};
  for (size_t d = 0; d < devices_.size(); ++d) {
    const int64_t has = devices_[d].memory_bytes;
    if (has == 0 || (d > 0 && devices_[d] == devices_[d - 1] && same_held(base, chosen, d))) continue;
    double held = 0;
    for (const auto each : kAll) {
      const auto mine = static_cast<double>(base.held[d].*each);
      double part = mine, added = 0;
      for (const Measured* one : chosen) {
        const auto then = static_cast<double>(one->held[d].*each);
        if (then <= mine)
          part *= mine > 0 ? then / mine : 1;
        else
          added = std::max(added, then - mine);  // copies of what the host holds; in turn, as a rule
      }
      held += part + added;
    }
    out.missing = std::max(out.missing, held - static_cast<double>(has));
  }
  return out;
}

std::vector<RemedyChanges::Guess> RemedyChanges::together(const Measured& base, const std::vector<Measured>& singles,
                                                          bool helping) const {
  // By kind: all offload goes together, of the others one does.
  const Measured *zero = nullptr, *times = nullptr;
  std::vector<const Measured*> recomputes{nullptr}, all;
  for (const Measured& m : singles) {
    const Change& c = m.tried.change;
    if (c.options.recompute != asked_.recompute) {
      recomputes.push_back(&m);
      continue;
    }
    if (helping && m.tried.bytes >= base.tried.bytes) continue;
    const auto is_less = [&](const Measured* so_far) {
      return so_far == nullptr || (helping ? m.tried.bytes < so_far->tried.bytes
                                           : !saves_as_much(so_far->tried.change.options, c.options) ||
                                                 c.times > so_far->tried.change.times);
    };
    if (c.options.zero != asked_.zero) {
      if (is_less(zero)) zero = &m;
    } else if (c.times > 1) {
      if (is_less(times)) times = &m;
    } else {
      all.push_back(&m);
    }
  }
  for (const Measured* one : {zero, times})
    if (one != nullptr) all.push_back(one);
  std::vector<Guess> out;
  for (const Measured* recompute : recomputes) {
    std::vector<const Measured*> chosen = all;
    if (recompute != nullptr) chosen.push_back(recompute);
    if (!chosen.empty()) out.push_back(guess_of(base, chosen));
  }
  return out;
}

}  // namespace whale
