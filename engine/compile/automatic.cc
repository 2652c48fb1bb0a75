#include "compile/automatic.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "base/heap.h"
#include "base/side_by_side.h"
#include "base/text.h"
#include "base/thread_seconds.h"
#include "base/watch.h"
#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "compile/estimate.h"
#include "compile/judge.h"
#include "compile/prepare.h"
#include "compile/savings.h"
#include "compile/search_bounds.h"
#include "compile/shapes.h"
#include "schedule/schedule.h"
#include "task/strategy.h"

namespace whale {
namespace {

void check_prices(const std::vector<DeviceSpec>& devices, const SearchOptions& asked) {
  if (asked.objective != Objective::kPrice && !std::isfinite(asked.most_price)) return;
  const std::vector<std::string> names = names_of_kinds(devices);
  std::set<std::string> without;
  for (size_t d = 0; d < devices.size(); ++d)
    if (!(devices[d].figures.price_per_hour > 0)) without.insert(names[d]);
  if (without.empty()) return;
  throw invalid(
      "strategy auto is to go by the price of a step, and this cluster has no price of {}; give price_per_hour in a "
      "cluster file (docs/clusters.md), or device types that have one",
      fmt::join(without, ", "));
}

// Of a pipeline's step, that its stages work where all are alike.
double busy_share(const std::string& strategy) {
  for (const StrategyClause& clause : parse_clauses(strategy))
    for (const Scope& scope : clause.nest)
      if (scope.kind == ScopeKind::kPipeline && scope.micro_batches > 0)
        return static_cast<double>(scope.micro_batches) / static_cast<double>(scope.micro_batches + scope.count - 1);
  return 1;
}

class Search {
 public:
  Search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options)
      : asked_(options.search),
        began_(thread_seconds()),
        counts_(graph),
        sets_(device_sets(devices, options, options.precision.value_or(graph.training.precision))),
        judge_(graph, devices, options, counts_),
        shapes_(shapes_of(graph, counts_, sets_, options)) {}

  Found run() {
    out_.batch = counts_.batch;
    if (!asked_.present.empty()) {
      const Present present(asked_.present, std::ssize(sets_[0].devices));
      out_.not_tried += std::erase_if(shapes_, [&](const Shape& s) { return !present.is_near(s); });
    }
    // What is likely to be best first; the time runs out on the others.
    std::ranges::stable_sort(shapes_, {}, [&](const Shape& s) { return worth_of(s, s.rank); });
    if (asked_.front) each_set_first();
    looked_at_.resize(shapes_.size());
    estimate({});
    rank(out_, judge_);
    try_schedules();
    // Estimates say what is not worth a look, and may be too low for the best: what was left out by them has its turn
    // by what those take in truth.
    simulate_best();
    for (Bounds truth = walked_bounds(); truth.any() && estimate(truth); truth = walked_bounds()) simulate_best();
    try_neighbours();
    take_as_much_slower();
    rank(out_, judge_);
    out_.not_tried += static_cast<size_t>(std::ranges::count(looked_at_, 0));
    say_why(out_, judge_, asked_);
    return std::move(out_);
  }

 private:
  static constexpr double kLooked = 0.6;  // of the time; what is left is for the simulator
  static constexpr double kNone = std::numeric_limits<double>::infinity();

  double elapsed() const { return thread_seconds() - began_ + elsewhere_; }
  double worth_of(const Shape& s, double seconds) const {
    return asked_.objective == Objective::kPrice ? seconds * s.set->price_hour : seconds;
  }

  // The likeliest of each set of devices, cheap ones first, before the next likeliest of each: time may run out.
  void each_set_first() {
    std::map<const DeviceSet*, size_t> seen;
    std::vector<std::tuple<size_t, double, size_t>> order;  // its turn, the price of an hour, where it is
    for (size_t k = 0; k < shapes_.size(); ++k)
      order.emplace_back(seen[shapes_[k].set]++, shapes_[k].set->price_hour, k);
    std::ranges::stable_sort(order, {}, [](const auto& o) { return std::pair(std::get<0>(o), std::get<1>(o)); });
    std::vector<Shape> shapes;
    for (const auto& [turn, price, k] : order) shapes.push_back(std::move(shapes_[k]));
    shapes_ = std::move(shapes);
  }

  // Judged side by side: what is found does not depend on how many threads there are for it.
  struct Looked {
    bool in_time = false;
    std::optional<Judged> judged = {};
  };
  template <class List, class Judging>
  std::vector<Looked> look(const List& list, double until, const Judging& judging) {
    std::vector<Looked> out(list.size());
    const double before = elapsed();
    elsewhere_ += side_by_side(list.size(), threads_, [&](size_t k, double spent) {
      if (before + spent <= until) out[k] = {true, judging(list[k])};
    });
    return out;
  }

  // Of what was walked.
  Bounds walked_bounds() const {
    constexpr double kHour = 3600;
    const bool by_price = asked_.objective == Objective::kPrice;
    Bounds out;
    for (const Judged& j : out_.list)
      if (j.simulated && judge_.is_allowed(j))
        out.see(by_price ? j.price * kHour : j.seconds, asked_.front ? j.price / j.seconds * kHour : 0, j.seconds);
    return out;
  }

  // All that may be within the bounds, and was not looked at yet; without any, by those of the estimates themselves.
  // Whether there was something.
  bool estimate(Bounds bounds) {
    constexpr size_t kAtOnce = 8;  // first few, which bound the others
    constexpr double kLonger = 3;  // is looked while nothing fits
    const bool given = bounds.any(), by_price = asked_.objective == Objective::kPrice;
    const auto hour_of = [&](const Shape& shape) { return asked_.front ? shape.set->price_hour : 0; };
    const auto until = [&] { return kLooked * asked_.seconds * (bounds.any() ? 1 : kLonger); };
    std::set<const DeviceSet*> seen;  // counts tell types apart by their peaks alone: of several each has its try
    const size_t before = out_.list.size();
    for (size_t next = 0, at_once = 1; next < shapes_.size(); at_once = std::min(2 * at_once, kAtOnce)) {
      std::vector<size_t> some;
      for (; next < shapes_.size() && some.size() < at_once; ++next) {
        const Shape& shape = shapes_[next];
        const bool first = !given && sets_[0].unlike && !shape.set->unlike && seen.insert(shape.set).second;
        const double least = counts_off_.least_seconds(shape);
        const bool hopeless = !first && worth_of(shape, least) > bounds.worth() &&
                              (!asked_.front || least > bounds.seconds_for(hour_of(shape)));
        if (looked_at_[next] == 0 && !hopeless && elapsed() <= until()) some.push_back(next);
      }
      std::vector<Looked> looked = look(some, until(), [&](size_t at) {
        const Shape& shape = shapes_[at];
        return judge_.first_that_fits(shape, by_price ? kNone : bounds.seconds_for(hour_of(shape)));
      });
      for (size_t k = 0; k < some.size(); ++k) {
        const Shape& shape = shapes_[some[k]];
        looked_at_[some[k]] = looked[k].in_time ? 1 : 0;
        std::optional<Judged>& mine = looked[k].judged;
        if (!mine) continue;
        if (judge_.is_allowed(*mine)) {
          counts_off_.see(shape, mine->seconds);
          if (!given) bounds.see(worth_of(shape, mine->seconds), hour_of(shape), mine->seconds);
        }
        out_.list.push_back(std::move(*mine));
      }
    }
    rank(out_, judge_);
    return out_.list.size() > before;
  }

  // Of the best pipeline: its other schedules, of which those that keep more alive may not fit; where one without any
  // bubble could be the best of all. From a present strategy its own schedule alone.
  void try_schedules() {
    constexpr std::string_view kLast = "micro_batches=";
    const auto best = std::ranges::find_if(out_.list, [&](const Judged& j) {
      return judge_.is_allowed(j) && j.candidate.strategy.find(kLast) != std::string::npos;
    });
    if (best == out_.list.end()) return;
    const double worth = judge_.worth(*best) * busy_share(best->candidate.strategy);
    if (worth > judge_.worth(out_.list[0])) return;
    std::vector<const char*> schedules;
    for (const char* schedule : {"interleaved", "zb_h1", "zb_v"})
      if (asked_.present.empty() || asked_.present.find(schedule) != std::string::npos) schedules.push_back(schedule);
    std::vector<Looked> looked = look(schedules, kLooked * asked_.seconds, [&](const char* schedule) {
      Candidate other = best->candidate;
      const bool by_plan = schedule_rule(schedule).split_backward;  // such have no condensed form
      if (!by_plan) other.rooms = {}, other.stages = {};
      const size_t end = other.strategy.find(')', other.strategy.find(kLast));
      // Without virtual stages interleaved is 1f1b.
      const char* more = std::string_view(schedule) == "interleaved" ? ", virtual_stages=2" : "";
      other.strategy.insert(end, fmt::format(", schedule={}{}", schedule, more));
      return judge_.as_written(std::move(other), by_plan);
    });
    for (Looked& other : looked)
      if (other.in_time) out_.list.push_back(std::move(*other.judged));
    rank(out_, judge_);
  }

  // By the simulator; what it cannot walk stays estimated.
  Judged walked(Judged j) const {
    j.walked = true;
    try {
      judge_.simulate(j);
    } catch (const Stopped&) {
      throw;
    } catch (const Error& e) {
      j.lost = e.message(), j.seconds = 0;
    }
    return j;
  }

  // Whether none that was walked is better, were this one's estimate as far off as any.
  bool may_be_best(const Judged& j) const {
    return std::ranges::none_of(out_.list, [&](const Judged& w) {
      if (!w.simulated || !judge_.is_allowed(w) || judge_.worth(w) >= judge_.worth(j) * off_) return false;
      return !asked_.front || (w.seconds < j.seconds * off_ && w.price <= j.price * off_);
    });
  }

  // Estimates of pipelines have messages for nothing: the best are walked, until none that is left can be better. What
  // is just over a bound by its estimate may be within it.
  void simulate_best() {
    constexpr size_t kAtOnce = 2;
    for (size_t walks = 0; walks < asked_.simulated || elapsed() <= asked_.seconds;) {
      std::vector<Judged*> some;
      for (Judged& j : out_.list) {
        if (some.size() == kAtOnce) break;
        if (!j.simulated && !j.walked && judge_.would_be_allowed(j, off_) && may_be_best(j)) some.push_back(&j);
      }
      if (some.empty()) break;
      walks += some.size();
      std::vector<Looked> looked = look(some, kNone, [&](const Judged* j) { return walked(*j); });
      for (size_t k = 0; k < some.size(); ++k) {
        Judged& mine = *looked[k].judged;
        if (mine.simulated) {
          estimated_ += some[k]->seconds, walked_ += mine.seconds;
          off_ = std::min(off_, mine.seconds / some[k]->seconds);
        }
        *some[k] = std::move(mine);
      }
    }
    rank(out_, judge_);
  }

  // Of the best other numbers of micro-batches than were looked through: those next to its own that cut the batch, as
  // long as that gains.
  void try_neighbours() {
    constexpr int kRounds = 4;
    for (int round = 0; round < kRounds && elapsed() <= asked_.seconds && !out_.list.empty(); ++round) {
      const Judged& best = out_.list[0];
      if (!best.simulated || !judge_.is_allowed(best)) return;
      std::vector<Candidate> others;
      for (const int64_t parts : next_to(micro_batches_of(best.candidate))) {
        Candidate other = with_micro_batches(best.candidate, parts);
        if (std::ranges::none_of(out_.list, [&](const Judged& j) { return is_same(j.candidate, other); }))
          others.push_back(std::move(other));
      }
      const double before = judge_.worth(best);
      std::vector<Looked> looked = look(others, asked_.seconds, [&](const Candidate& other) {
        const Judged estimated = judge_.as_written(other, false);
        return estimated.lost.empty() && estimated.missing == 0 ? walked(estimated) : estimated;
      });
      for (Looked& other : looked)
        if (other.in_time) out_.list.push_back(std::move(*other.judged));
      rank(out_, judge_);
      if (judge_.worth(out_.list[0]) >= before) return;
    }
  }
  static bool is_same(const Candidate& a, const Candidate& b) {
    return a.strategy == b.strategy && a.accumulation == b.accumulation && a.devices == b.devices &&
           saves_as_much(a.options, b.options) && saves_as_much(b.options, a.options);
  }
  // 0: it has none that are said.
  static int64_t micro_batches_of(const Candidate& c) {
    if (c.accumulation > 0 || c.strategy.empty()) return c.accumulation;
    for (const StrategyClause& clause : parse_clauses(c.strategy))
      for (const Scope& scope : clause.nest)
        if (scope.kind == ScopeKind::kPipeline && scope.micro_batches > 0) return scope.micro_batches;
    return 0;
  }
  static Candidate with_micro_batches(Candidate c, int64_t parts) {
    c.rooms = {}, c.stages = {};
    if (c.accumulation > 0) {
      c.accumulation = parts > 1 ? parts : 0;
      return c;
    }
    constexpr std::string_view kWritten = "micro_batches=";
    const size_t at = c.strategy.find(kWritten) + kWritten.size();
    c.strategy.replace(at, c.strategy.find_first_not_of("0123456789", at) - at, std::to_string(parts));
    return c;
  }
  // Two below and two above, of those that divide the batch.
  Ints next_to(int64_t parts) const {
    constexpr std::ptrdiff_t kEach = 2;
    if (parts == 0) return {};
    const Ints all = divisors(counts_.batch);
    const auto at = std::ranges::lower_bound(all, parts);
    Ints out(std::max(all.begin(), at - std::min<std::ptrdiff_t>(kEach, at - all.begin())), at);
    const auto above = at != all.end() && *at == parts ? at + 1 : at;
    out.insert(out.end(), above, above + std::min<std::ptrdiff_t>(kEach, all.end() - above));
    return out;
  }

  // What is estimated alone, as those were that were walked.
  void take_as_much_slower() {
    if (walked_ <= estimated_) return;
    for (Judged& j : out_.list)
      if (!j.simulated && j.seconds > 0) judge_.set_seconds(j, j.seconds * walked_ / estimated_);
  }

  static constexpr double kTooHigh = 0.97;  // that an estimate may be, whatever was seen

  const SearchOptions& asked_;
  size_t threads_ = usable_cores().size();
  double began_, elsewhere_ = 0;  // of this thread's own time; what others took longer
  ModelCounts counts_;
  std::vector<DeviceSet> sets_;
  Judge judge_;
  std::vector<Shape> shapes_;
  std::vector<char> looked_at_;  // of the shapes
  CountsOff counts_off_;
  double estimated_ = 0, walked_ = 0, off_ = kTooHigh;  // seconds of what was walked; the least of one over the other
  Found out_;
};

}  // namespace

Found search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  check_prices(devices, options.search);
  check_graph(graph, options);
  keep_heap();
  return stoppable([&] { return Search(graph, devices, options).run(); });
}

}  // namespace whale
