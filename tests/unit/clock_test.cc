// The clock against a naive fixed point, closed forms, and who waits for whom.
#include "schedule/clock.h"

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <map>

#include "schedule/timing.h"
#include "unit/caught.h"

using namespace whale;

namespace {

// Work as a test writes it down: any of it may be impossible to end.
struct Task {
  enum Kind { kWork, kSend, kTake, kMeet } kind = kWork;
  size_t resource = 0, where = 0, member = 0;  // channel or place
  double seconds = 0;
  std::vector<size_t> ended = {}, begun = {};  // numbers of tasks
};
struct World {
  size_t resources = 1;
  std::vector<int64_t> channels = {};  // capacity
  std::vector<size_t> places = {};     // members
  std::vector<Task> tasks = {};
};

// Begins by repetition until nothing changes; -1 where nobody can begin. Slow and obvious.
std::vector<double> fixed_point(const World& w) {
  const size_t n = w.tasks.size();
  const auto number = [&](size_t i, auto same) {  // how many before it are alike
    return static_cast<size_t>(std::count_if(w.tasks.begin(), w.tasks.begin() + static_cast<std::ptrdiff_t>(i), same));
  };
  const auto nth = [&](size_t k, auto same) {
    for (size_t i = 0; i < n; ++i)
      if (same(w.tasks[i]) && k-- == 0) return static_cast<int64_t>(i);
    return int64_t{-1};
  };
  std::vector<double> begin(n, -1), seconds(n);
  for (size_t i = 0; i < n; ++i) seconds[i] = w.tasks[i].seconds;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < n; ++i) {
      if (begin[i] >= 0) continue;
      std::vector<size_t> together{i};
      bool can = true;
      const auto is = [&](Task::Kind kind) {
        return [&, kind](const Task& t) { return t.kind == kind && t.where == w.tasks[i].where; };
      };
      if (w.tasks[i].kind == Task::kMeet) {
        together.clear();
        const auto mine = [&](size_t member) {
          return [&, member](const Task& t) { return is(Task::kMeet)(t) && t.member == member; };
        };
        const size_t visit = number(i, mine(w.tasks[i].member));
        for (size_t m = 0; m < w.places[w.tasks[i].where]; ++m) {
          const int64_t other = nth(visit, mine(m));
          if (other < 0)
            can = false;
          else
            together.push_back(static_cast<size_t>(other));
        }
      }
      double at = 0, longest = 0;
      const auto wait = [&](int64_t other, bool ended) {
        if (other < 0 || begin[other] < 0)
          can = false;
        else
          at = std::max(at, begin[other] + (ended ? seconds[other] : 0));
      };
      for (const size_t k : together) {
        const Task& t = w.tasks[k];
        longest = std::max(longest, t.seconds);
        const auto on_mine = [&](const Task& o) { return o.resource == t.resource; };
        if (const size_t before = number(k, on_mine)) wait(nth(before - 1, on_mine), true);
        for (const size_t o : t.ended) wait(static_cast<int64_t>(o), true);
        for (const size_t o : t.begun) wait(static_cast<int64_t>(o), false);
        if (t.kind == Task::kTake) wait(nth(number(k, is(Task::kTake)), is(Task::kSend)), true);
        const size_t capacity = t.kind == Task::kSend ? static_cast<size_t>(w.channels[t.where]) : 0;
        if (const size_t sent = number(k, is(Task::kSend)); t.kind == Task::kSend && sent >= capacity)
          wait(nth(sent - capacity, is(Task::kTake)), true);
      }
      if (!can) continue;
      for (const size_t k : together) begin[k] = at, seconds[k] = longest;
      changed = true;
    }
  }
  return begin;
}

// Who takes what of which machine, by task; of a meeting, what all its members take.
struct Beside {
  Clock::Rates rates{};
  size_t machines = 0;
  struct Use {
    size_t machine;
    int kind;
  };
  std::vector<std::vector<Use>> uses;
};

// From one begin or end to the next, looking at everything each time.
std::vector<std::pair<double, double>> flow(const World& w, const Beside& b) {
  const size_t n = w.tasks.size();
  struct State {
    bool begun = false, ended = false;
    double begin = 0, end = 0, left = 0;
  };
  std::vector<State> states(n);
  double now = 0;
  // A meeting is its members together.
  const auto members = [&](size_t i) {
    std::vector<size_t> out;
    if (w.tasks[i].kind != Task::kMeet) return std::vector<size_t>{i};
    std::map<size_t, size_t> visits;
    const auto visit_of = [&](size_t k) {
      size_t before = 0;
      for (size_t j = 0; j < k; ++j)
        before += w.tasks[j].kind == Task::kMeet && w.tasks[j].where == w.tasks[k].where &&
                  w.tasks[j].member == w.tasks[k].member;
      return before;
    };
    for (size_t j = 0; j < n; ++j)
      if (w.tasks[j].kind == Task::kMeet && w.tasks[j].where == w.tasks[i].where && visit_of(j) == visit_of(i))
        out.push_back(j);
    return out;
  };
  const auto number = [&](size_t i, Task::Kind kind) {
    size_t before = 0;
    for (size_t j = 0; j < i; ++j) before += w.tasks[j].kind == kind && w.tasks[j].where == w.tasks[i].where;
    return before;
  };
  const auto nth = [&](size_t k, Task::Kind kind, size_t where) {
    for (size_t j = 0; j < n; ++j)
      if (w.tasks[j].kind == kind && w.tasks[j].where == where && k-- == 0) return j;
    return n;
  };
  const auto may = [&](size_t i) {
    for (size_t j = 0; j < i; ++j)
      if (w.tasks[j].resource == w.tasks[i].resource && !states[j].ended) return false;
    for (const size_t o : w.tasks[i].ended)
      if (!states[o].ended) return false;
    for (const size_t o : w.tasks[i].begun)
      if (!states[o].begun) return false;
    if (w.tasks[i].kind == Task::kTake)
      if (!states[nth(number(i, Task::kTake), Task::kSend, w.tasks[i].where)].ended) return false;
    if (w.tasks[i].kind == Task::kSend)
      if (const auto c = static_cast<size_t>(w.channels[w.tasks[i].where]); number(i, Task::kSend) >= c)
        if (!states[nth(number(i, Task::kSend) - c, Task::kTake, w.tasks[i].where)].ended) return false;
    return true;
  };
  for (;;) {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t i = 0; i < n; ++i) {
        if (states[i].begun) continue;
        const std::vector<size_t> all = members(i);
        if (!std::ranges::all_of(all, may)) continue;
        double longest = 0;
        for (const size_t k : all) longest = std::max(longest, w.tasks[k].seconds);
        for (const size_t k : all) states[k] = {true, longest <= 0, now, now, longest};
        changed = true;
      }
    }
    std::vector<unsigned> kinds(b.machines);
    for (size_t i = 0; i < n; ++i)
      if (states[i].begun && !states[i].ended)
        for (const auto& use : b.uses[i]) kinds[use.machine] |= 1u << use.kind;
    std::vector<double> rate(n, 1);
    double step = 1e300;
    for (size_t i = 0; i < n; ++i) {
      if (!states[i].begun || states[i].ended) continue;
      for (const size_t k : members(i))
        for (const auto& use : b.uses[k]) rate[i] = std::min(rate[i], b.rates[kinds[use.machine]][use.kind]);
      step = std::min(step, states[i].left / rate[i]);
    }
    if (step == 1e300) break;
    now += step;
    for (size_t i = 0; i < n; ++i) {
      State& s = states[i];
      if (!s.begun || s.ended) continue;
      s.left -= step * rate[i];
      if (s.left < 1e-9) s.ended = true, s.end = now;
    }
  }
  std::vector<std::pair<double, double>> out;
  for (const State& s : states) out.emplace_back(s.begin, s.end);
  return out;
}

struct Run {
  std::vector<double> begin, end = {};
  std::vector<Clock::Item> items;
  Clock::Stuck stuck;
};
Run run(const World& w, const Beside& beside = {}) {
  Clock clock;
  for (size_t r = 0; r < w.resources; ++r) clock.resource();
  for (const int64_t capacity : w.channels) clock.channel(capacity);
  for (const size_t members : w.places) clock.place(members);
  Run out;
  for (const Task& t : w.tasks)
    out.items.push_back(t.kind == Task::kWork   ? clock.work(t.resource, t.seconds)
                        : t.kind == Task::kSend ? clock.send(t.where, t.resource, t.seconds)
                        : t.kind == Task::kTake ? clock.take(t.where, t.resource, t.seconds)
                                                : clock.meet(t.where, t.member, t.resource, t.seconds));
  for (size_t i = 0; i < w.tasks.size(); ++i) {
    for (const size_t o : w.tasks[i].ended) clock.after(out.items[i], out.items[o]);
    for (const size_t o : w.tasks[i].begun) clock.after_begin(out.items[i], out.items[o]);
  }
  for (size_t m = 0; m < beside.machines; ++m) clock.machine(beside.rates);
  for (size_t i = 0; i < beside.uses.size(); ++i)
    for (const auto& use : beside.uses[i]) clock.runs_on(out.items[i], use.machine, use.kind);
  out.stuck = clock.run();
  for (const Clock::Item i : out.items) out.begin.push_back(clock.begin(i)), out.end.push_back(clock.end(i));
  return out;
}

// Members and ends of channels keep to one resource each, as those of plans do.
World random_world(bool forward_only) {
  World w;
  w.resources = static_cast<size_t>(*rc::gen::inRange(1, 5));
  const int channels = *rc::gen::inRange(0, 4), places = *rc::gen::inRange(0, 3), tasks = *rc::gen::inRange(1, 40);
  const auto resource = [&] { return static_cast<size_t>(*rc::gen::inRange(0, static_cast<int>(w.resources))); };
  std::vector<std::pair<size_t, size_t>> ends;
  for (int c = 0; c < channels; ++c)
    w.channels.push_back(*rc::gen::inRange(1, 4)), ends.emplace_back(resource(), resource());
  for (int p = 0; p < places; ++p)
    w.places.push_back(static_cast<size_t>(*rc::gen::inRange(1, static_cast<int>(w.resources) + 1)));
  for (int i = 0; i < tasks; ++i) {
    Task t{.resource = resource(), .seconds = static_cast<double>(*rc::gen::inRange(0, 5))};
    const int kind = *rc::gen::inRange(0, 4);
    if (kind == 1 && channels) {
      t.kind = Task::kSend, t.where = static_cast<size_t>(*rc::gen::inRange(0, channels)),
      t.resource = ends[t.where].first;
      // Mostly taken, by whoever takes.
      w.tasks.push_back(t);
      if (*rc::gen::inRange(0, 12)) {
        t.kind = Task::kTake, t.resource = ends[t.where].second;
        w.tasks.push_back(t);
      }
      continue;
    }
    if (kind == 2 && places) {
      t.kind = Task::kMeet, t.where = static_cast<size_t>(*rc::gen::inRange(0, places));
      const bool all = *rc::gen::inRange(0, 12) != 0;
      for (size_t m = 0; m < w.places[t.where] && (all || m == 0); ++m) {
        t.member = t.resource = m;
        t.seconds = static_cast<double>(*rc::gen::inRange(0, 5));
        w.tasks.push_back(t);
      }
      continue;
    }
    w.tasks.push_back(t);
  }
  const int n = static_cast<int>(w.tasks.size());
  for (int i = 0; i < n; ++i) {
    const int most = forward_only ? i : n;
    for (int k = *rc::gen::inRange(0, 3); k > 0 && most > 0; --k) {
      const auto other = static_cast<size_t>(*rc::gen::inRange(0, most));
      if (!forward_only && *rc::gen::inRange(0, 20)) continue;  // few: most would close circles
      (*rc::gen::inRange(0, 2) ? w.tasks[i].ended : w.tasks[i].begun).push_back(other);
    }
  }
  return w;
}

}  // namespace

TEST_CASE("the clock of random work is its fixed point, and it is stuck exactly where that is") {
  int ended = 0, stuck = 0;
  for (const bool forward_only : {true, false})
    CHECK(rc::check("the clock", [&] {
      const World w = random_world(forward_only);
      const std::vector<double> want = fixed_point(w);
      const Run got = run(w);
      const bool possible = std::find(want.begin(), want.end(), -1) == want.end();
      RC_ASSERT(got.stuck.items.empty() == possible);
      ++(possible ? ended : stuck);
      if (possible) RC_ASSERT(got.begin == want);
      // Whoever is named can never begin.
      for (const Clock::Item item : got.stuck.items)
        for (size_t i = 0; i < got.items.size(); ++i)
          if (got.items[i] == item) RC_ASSERT(want[i] < 0);
    }));
  CHECK(ended > 20);
  CHECK(stuck > 20);
}

TEST_CASE("random work on machines that it shares flows as it does step by step, and is never faster than alone") {
  int slower = 0;
  CHECK(rc::check("beside", [&] {
    const World w = random_world(true);
    const std::vector<double> alone = fixed_point(w);
    RC_PRE(std::find(alone.begin(), alone.end(), -1) == alone.end());
    Beside beside;
    beside.machines = static_cast<size_t>(*rc::gen::inRange(1, 4));
    for (unsigned running = 1; running < beside.rates.size(); ++running)
      for (int kind = 0; kind < Clock::kKinds; ++kind)
        beside.rates[running][kind] = running == 1u << kind ? 1.0 : 1.0 / *rc::gen::element(1.0, 1.5, 2.0, 4.0);
    for (size_t i = 0; i < w.tasks.size(); ++i) {
      beside.uses.emplace_back();
      if (*rc::gen::inRange(0, 6) == 0) continue;
      beside.uses.back().push_back({static_cast<size_t>(*rc::gen::inRange(0, static_cast<int>(beside.machines))),
                                    *rc::gen::inRange(0, Clock::kKinds)});
    }
    const std::vector<std::pair<double, double>> want = flow(w, beside);
    const Run got = run(w, beside), free = run(w);
    RC_ASSERT(got.stuck.items.empty());
    for (size_t i = 0; i < want.size(); ++i) {
      RC_ASSERT(std::abs(got.begin[i] - want[i].first) < 1e-6);
      RC_ASSERT(std::abs(got.end[i] - want[i].second) < 1e-6);
      RC_ASSERT(got.end[i] > free.end[i] - 1e-6);
      slower += got.end[i] > free.end[i] + 1e-6;
    }
  }));
  CHECK(slower > 100);
}

TEST_CASE("two kinds of work on one machine, by hand") {
  Clock::Rates rates{};
  for (auto& each : rates) each.fill(1);
  rates[0b11] = {0.5, 0.25, 1, 1, 1};
  Clock clock;
  const size_t compute = clock.resource(), link = clock.resource(), machine = clock.machine(rates);
  const Clock::Item first = clock.work(compute, 4), message = clock.work(link, 1), second = clock.work(compute, 4);
  for (const Clock::Item i : {first, second}) clock.runs_on(i, machine, 0);
  clock.runs_on(message, machine, 1);
  CHECK(clock.run().items.empty());
  CHECK(clock.end(message) == 4);  // a quarter of a second's work in each
  CHECK(clock.end(first) == 6);    // 2 of 4 done by then
  CHECK(clock.begin(second) == 6);
  CHECK(clock.end(second) == 10);
}

TEST_CASE("1f1b handed to the clock by itself: (p - 1) / m of the work is bubble, with a capacity of 1 a channel") {
  for (const int p : {1, 2, 4, 8})
    for (const int m : {8, 16, 64}) {
      const PipelineSchedule schedule = make_schedule("1f1b", p, m);
      Clock clock;
      std::map<std::pair<int, bool>, size_t> channels;  // from this stage, forward
      for (int s = 0; s < p; ++s)
        for (const bool forward : {true, false}) channels[{s, forward}] = clock.channel(1);
      double end = 0;
      std::vector<Clock::Item> items;
      for (int s = 0; s < p; ++s) {
        const size_t device = clock.resource();
        for (const WorkItem& item : schedule.devices[s]) {
          const bool forward = item.kind == WorkKind::kForward;
          const int from = forward ? s - 1 : s + 1, to = forward ? s + 1 : s - 1;
          if (from >= 0 && from < p) clock.take(channels[{from, forward}], device, 0);
          items.push_back(clock.work(device, forward ? 1 : 2));
          if (to >= 0 && to < p) clock.send(channels[{s, forward}], device, 0);
        }
      }
      CHECK(clock.run().items.empty());
      for (const Clock::Item i : items) end = std::max(end, clock.end(i));
      CHECK(end == 3 * m + 3 * (p - 1));
      CHECK((end - 3 * m) / (3 * m) == doctest::Approx(static_cast<double>(p - 1) / m));
      CHECK(end == run_clock(schedule, {1, 1, 1}, 1).makespan);
    }
}

TEST_CASE("who waits for whom for ever") {
  // Two meetings in two orders.
  Clock clock;
  const size_t a = clock.resource(), b = clock.resource(), x = clock.place(2), y = clock.place(2);
  const Clock::Item at_x = clock.meet(x, 0, a, 1), at_y = clock.meet(y, 0, a, 1);
  clock.meet(y, 1, b, 1), clock.meet(x, 1, b, 1);
  Clock::Stuck stuck = clock.run();
  CHECK(stuck.circle);
  std::sort(stuck.items.begin(), stuck.items.end());
  CHECK(stuck.items == std::vector{at_x, at_y});

  // A message that nobody sends, behind work.
  Clock waiting;
  const size_t c = waiting.channel(1), r = waiting.resource();
  waiting.work(r, 1);
  const Clock::Item taken = waiting.take(c, r, 1);
  stuck = waiting.run();
  CHECK(!stuck.circle);
  CHECK(stuck.items.back() == taken);

  // A place that nobody frees.
  Clock full;
  const size_t narrow = full.channel(2), s = full.resource();
  for (int k = 0; k < 2; ++k) full.send(narrow, s, 1);
  const Clock::Item third = full.send(narrow, s, 1);
  stuck = full.run();
  CHECK(!stuck.circle);
  CHECK(stuck.items.back() == third);
}
