// The kit of missing waits: drops each wait of random plans in turn, those for the row before included, and trains on
// `lag` devices. Whatever wait others do not imply (causes.h says so) is to show within a few seeds: another number, an
// error, or a crash.
//
//   wait_kit --plans 20 --seeds 20 --first 1 [--most WAITS] [--least PERCENT] [--only TEXT] [-v]
//
// --first: number of the first plan; --most: waits of a plan that are tried; --only: those that are shown with that
// text. Ends with 1 when less than --least of the needed ones are seen: which of two queues is ahead is chance, and 20
// seeds leave some unseen.
#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "base/error.h"
#include "causes.h"
#include "cluster/devices.h"
#include "fault.h"
#include "plan_case.h"
#include "process.h"
#include "trainer.h"

namespace whale::test {
namespace {

constexpr int kSteps = 3;
constexpr int64_t kIds = 3;    // integers are below
constexpr size_t kFewest = 8;  // waits of a plan that is worth it

struct Arguments {
  int64_t plans = 20, seeds = 20, first = 1, most = 1 << 20, least = 99;
  std::string only;
  bool verbose = false;
};

// Where a wait of a plan stands.
struct Place {
  std::string text;
  std::function<void(Entry&)> drop;
};

std::vector<Place> waits_of(const Entry& entry) {
  std::vector<Place> out;
  for (size_t p = 0; p < entry.programs.size(); ++p) {
    const Program& program = entry.programs[p];
    for (size_t s = 0; s < program.segments.size(); ++s)
      for (size_t i = 0; i < program.segments[s].instructions.size(); ++i) {
        const Instruction& does = program.segments[s].instructions[i];
        for (size_t w = 0; w < does.waits.size(); ++w)
          if (does.waits[w].queue != does.queue)
            out.push_back({fmt::format("program {}, {} {}: '{}' for {}", p, program.segments[s].name, i, does.name,
                                       does.waits[w].index),
                           [=](Entry& e) {
                             auto& waits = e.programs[p].segments[s].instructions[i].waits;
                             waits.erase(waits.begin() + static_cast<ptrdiff_t>(w));
                           }});
      }
    for (size_t c = 0; c < program.row_waits.size(); ++c)
      for (size_t w = 0; w < program.row_waits[c].size(); ++w)
        out.push_back({fmt::format("program {}, waits {}: {} for {} of the row before", p, c,
                                   program.row_waits[c][w].at, program.row_waits[c][w].on.index),
                       [=](Entry& e) {
                         RowWaits& waits = e.programs[p].row_waits[c];
                         waits.erase(waits.begin() + static_cast<ptrdiff_t>(w));
                       }});
  }
  return out;
}

// What a device computes for samples that it has not, nobody sees come too early.
bool has_samples_everywhere(const PlanCase& c, const Entry& entry) {
  const auto has = [](const SampleCut& cut) { return cut.whole.size() > 0; };
  return c.batch >= c.devices * micro_batches_of(c) && std::ranges::count(c.state_shares, 0) == 0 &&
         std::ranges::all_of(entry.rows, [&](const DeviceRow& row) { return std::ranges::all_of(row.samples, has); });
}

// All that some steps hand out, vote on and leave behind; "X": a parameter that nothing moves would not show it either.
std::string trained(const Plan& plan, const Graph& graph, int64_t batch) {
  Trainer trainer(plan, 1, true);
  std::vector<char> moved(plan.variables.size());
  const auto each = [&](auto body) {
    for (size_t v = 0; v < plan.variables.size(); ++v)
      trainer.each_copy(v, [&](int32_t, size_t, double x) { body(v, x); });
  };
  std::vector<double> start;
  each([&](size_t, double x) { start.push_back(x); });
  Dice dice(1);
  std::string out;
  const auto put = [&](const double& x) { out.append(reinterpret_cast<const char*>(&x), sizeof x); };
  for (int step = 0; step < kSteps; ++step) {
    for (const std::vector<double>& values : trainer.step(random_inputs(graph, batch, dice, kIds)))
      std::ranges::for_each(values, put);
    std::ranges::for_each(trainer.losses(), put);
  }
  size_t k = 0;
  each([&](size_t v, double x) {
    moved[v] |= x != start[k++];
    put(x);
  });
  for (size_t v = 0; v < moved.size(); ++v)
    if (plan.variables[v].trainable && !moved[v]) return "X";
  return out;
}

void set_seed(Plan& plan, int64_t seed) {
  for (DeviceSpec& d : plan.devices) d.index = static_cast<int>(seed);
}

struct Counts {
  int64_t plans = 0, waits = 0, implied = 0, seen = 0, missed = 0, seeds = 0, latest = 0;
};

class Kit {
 public:
  explicit Kit(const Arguments& a) : a_(a) {}

  int run() {
    for (int64_t number = a_.first; counts_.plans < a_.plans; ++number) try_plan(number);
    fmt::print(
        "{} plans, {} waits: {} are implied by others, {} of {} others were seen when they were missing, after {:.1f} "
        "seeds in the mean, {} at most\n",
        counts_.plans, counts_.waits, counts_.implied, counts_.seen, counts_.seen + counts_.missed,
        static_cast<double>(counts_.seeds) / static_cast<double>(std::max<int64_t>(1, counts_.seen)), counts_.latest);
    return 100 * counts_.seen >= a_.least * (counts_.seen + counts_.missed) ? 0 : 1;
  }

 private:
  void try_plan(int64_t number) {
    Dice dice(static_cast<uint64_t>(number));
    const PlanCase c = random_plan_case(dice);
    if (c.devices < 2) return;
    const Graph graph = graph_of(c);
    Plan plan;
    try {
      plan = compile(graph, parse_devices(fmt::format("lag:{}", c.devices)), options_of(c, graph));
    } catch (const Error&) {
      return;  // a case that is refused
    }
    std::vector<Place> places = waits_of(train_of(plan));
    if (places.size() < kFewest || !has_samples_everywhere(c, train_of(plan))) return;
    const Ended whole = in_process([&] { return trained(plan, graph, c.batch); });
    if (whole.how != Ended::How::kWell || whole.said[0] == 'X') return;  // its loss is not finite, or the like
    ++counts_.plans;
    std::erase_if(places, [&](const Place& p) { return p.text.find(a_.only) == std::string::npos; });
    while (std::ssize(places) > a_.most) places.erase(places.begin() + dice.below(std::ssize(places)));
    int64_t missed = 0;
    const Causes causes(plan, train_of(plan));
    if (const std::string race = causes.race_in(train_of(plan)); !race.empty())
      throw internal("plan {} has a race: {}", number, race);
    for (const Place& place : places) missed += !tried(plan, causes, place, graph, c.batch, whole.said);
    if (a_.verbose || missed > 0)
      fmt::print("plan {}: {} waits, {} missed: {}\n", number, places.size(), missed, to_string(c));
    std::fflush(stdout);
  }

  bool tried(const Plan& plan, const Causes& causes, const Place& place, const Graph& graph, int64_t batch,
             const std::string& whole) {
    ++counts_.waits;
    Plan damaged = plan;
    place.drop(train_of(damaged));
    const std::string race = causes.race_in(train_of(damaged));
    if (race.empty()) return ++counts_.implied, true;
    const Ended ended = in_process(
        [&] {
          for (int64_t seed = 1; seed <= a_.seeds; ++seed) {
            set_seed(damaged, seed);
            std::string said;
            try {
              said = trained(damaged, graph, batch);
            } catch (const std::exception&) {  // an index that is none, ...
            }
            if (said != whole) return fmt::format("{}", seed);
          }
          return std::string("S");
        },
        600);
    const bool seen = ended.how != Ended::How::kWell || ended.said != "S";
    if (!seen) {
      ++counts_.missed;
      fmt::print("  not seen: {}: {}\n", place.text, race);
      return false;
    }
    const int64_t seed = ended.how == Ended::How::kWell ? std::atoll(ended.said.c_str()) : 1;
    ++counts_.seen, counts_.seeds += seed, counts_.latest = std::max(counts_.latest, seed);
    return true;
  }

  Arguments a_;
  Counts counts_;
};

}  // namespace
}  // namespace whale::test

int main(int count, char** texts) {
  whale::test::Arguments a;
  CLI::App app("drops each wait of random plans in turn, and trains on devices that are late at random");
  app.add_option("--plans", a.plans);
  app.add_option("--seeds", a.seeds);
  app.add_option("--first", a.first);
  app.add_option("--most", a.most);
  app.add_option("--least", a.least);
  app.add_option("--only", a.only);
  app.add_flag("-v", a.verbose);
  CLI11_PARSE(app, count, texts);
  try {
    return whale::test::Kit(a).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "wait_kit: %s\n", e.what());
    return 2;
  }
}
