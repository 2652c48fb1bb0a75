// Pipeline schedules: bubble and memory against their closed forms, deadlock under blocking sends.
#include "schedule/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "schedule/timing.h"
#include "schedule/verify.h"
#include "unit/caught.h"

using namespace whale;

namespace {

// Times that every number of virtual stages here divides, so that sums are exact.
const StageTimes kEqual{12, 12, 12};
const std::vector<StageTimes> kTimes = {kEqual, {12, 24, 12}, {24, 12, 36}, {36, 48, 24}, {60, 12, 12}, {12, 24, 0}};

double whole(const StageTimes& t) { return t.forward + t.backward + t.weight; }

// Every shape: p in {1, 2, 3, 4, 8}, m to 4p, the virtual stages the schedule takes of {1, 2, 3, 4}.
void each_shape(std::string_view name, const std::function<void(const PipelineSchedule&, int p, int m, int v)>& visit) {
  const ScheduleRule& rule = schedule_rule(name);
  for (const int p : {1, 2, 3, 4, 8}) {
    for (int m = 1; m <= 4 * p; ++m) {
      for (int v = rule.min_virtual_stages; v <= std::min(rule.max_virtual_stages, 4); ++v) {
        CAPTURE(name);
        CAPTURE(p);
        CAPTURE(m);
        CAPTURE(v);
        visit(make_schedule(name, p, m, v), p, m, v);
      }
    }
  }
}

// The larger of the nearly even rounds in which interleaving takes its micro-batches.
int round_size(int p, int m) {
  const int rounds = std::max(1, m / p);
  return (m + rounds - 1) / rounds;
}

}  // namespace

TEST_CASE("1f1b of 4 stages and 8 micro-batches, as text") {
  CHECK(to_string(make_schedule("1f1b", 4, 8)) ==
        "0: F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7\n"
        "1: F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7\n"
        "2: F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7\n"
        "3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7\n");
  CHECK(to_string(make_schedule("zb_h1", 2, 3)) ==
        "0: F0 F1 B0 W0 F2 B1 W1 B2 W2\n"
        "1: F0 B0 F1 B1 W0 F2 B2 W1 W2\n");
  CHECK(to_string(make_schedule("interleaved", 2, 2, 2)) ==
        "0: F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0\n"
        "1: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0\n");
}

TEST_CASE("bubbles of gpipe and 1f1b: (p - 1)(T_F + T_B + T_W), also with fewer micro-batches than stages") {
  for (const char* name : {"gpipe", "1f1b"}) {
    each_shape(name, [](const PipelineSchedule& schedule, int p, int m, int) {
      for (const StageTimes& t : kTimes) {
        const Timeline line = run_clock(schedule, t);
        CHECK(line.busy == m * whole(t));
        CHECK(line.bubble() == (p - 1) * whole(t));
      }
      CHECK(run_clock(schedule, kEqual).bubble_share() == double(p - 1) / (m + p - 1));
    });
  }
}

TEST_CASE("bubble of interleaved: a v-th of 1f1b's, more where there are fewer micro-batches than stages") {
  each_shape("interleaved", [](const PipelineSchedule& schedule, int p, int m, int v) {
    for (const StageTimes& t : kTimes)
      CHECK(run_clock(schedule, t).bubble() == ((p - 1) + (v - 1) * std::max(0, p - m)) * whole(t) / v);
    if (m >= p) CHECK(run_clock(schedule, kEqual).bubble_share() == double(p - 1) / (v * m + p - 1));
  });
}

TEST_CASE("makespan of zb_h1") {
  each_shape("zb_h1", [](const PipelineSchedule& schedule, int p, int m, int) {
    for (const StageTimes& t : kTimes) {
      const double lead = t.forward + std::max(0.0, t.backward - t.weight);
      CHECK(run_clock(schedule, t).bubble() == (p - 1) * lead + std::max(0, p - m) * std::min(t.backward, t.weight));
    }
    if (m >= p) CHECK(run_clock(schedule, kEqual).bubble_share() == double(p - 1) / (3 * m + p - 1));
  });
}

TEST_CASE("zb_v with equal times: no bubble within any device's span from 2p - 1 micro-batches on") {
  each_shape("zb_v", [](const PipelineSchedule& schedule, int p, int m, int) {
    const Timeline line = run_clock(schedule, kEqual);
    if (m >= 2 * p - 1) {
      CHECK(line.span_bubble() == 0);
      CHECK(line.bubble() == (p - 1) * kEqual.forward / 2);
    } else if (m == p) {
      CHECK(line.bubble() == (p - 1) * kEqual.forward);
    }
  });
}

TEST_CASE("peak activations equal their closed forms on every stage") {
  const auto check = [](const char* name, const std::function<int(int i, int p, int m, int v)>& form) {
    each_shape(name, [&](const PipelineSchedule& schedule, int p, int m, int v) {
      const std::vector<LivePeak> peaks = live_peaks(schedule);
      for (int i = 0; i < p; ++i) {
        CHECK(peaks[i].activations == form(i, p, m, v));
        if (!schedule.split_backward) CHECK(peaks[i].weights == 0);
      }
    });
  };
  check("gpipe", [](int, int, int m, int) { return m; });
  check("1f1b", [](int i, int p, int m, int) { return std::min(m, p - i); });
  check("zb_h1", [](int i, int p, int m, int) { return std::min(m, p - i); });
  check("interleaved",
        [](int i, int p, int m, int v) { return std::min(m * v, 2 * (p - 1 - i) + (v - 1) * round_size(p, m) + 1); });
}

TEST_CASE("peak bytes with weight-gradient memory") {
  const double activation = 8, weight = 3;
  each_shape("zb_h1", [&](const PipelineSchedule& schedule, int p, int m, int) {
    if (m < p) return;
    const std::vector<double> bytes = peak_bytes(schedule, activation, weight);
    for (int i = 0; i < p; ++i) CHECK(bytes[i] == (p - i) * activation + i * weight);
  });
  each_shape("zb_v", [&](const PipelineSchedule& schedule, int p, int m, int) {
    const std::vector<double> bytes = peak_bytes(schedule, activation, weight);
    for (int i = 0; i < p; ++i) {
      CHECK(bytes[i] <= p * activation);  // 1f1b's first stage, on every device
      if (m < 2 * p - 1) continue;
      CHECK(live_peaks(schedule)[i].activations == 2 * p);
      CHECK(bytes[i] == p * activation);
    }
  });
}

TEST_CASE("on the clock every item comes once, after all that it needs, and forward before backward before weight") {
  for (const ScheduleRule& rule : schedule_rules()) {
    each_shape(rule.name, [](const PipelineSchedule& schedule, int p, int m, int v) {
      // Stages of different speed: the order must hold for any times.
      std::vector<StageTimes> times;
      for (int s = 0; s < p * v; ++s) times.push_back({1.0 + s % 3, 2.0 + s % 2, 1.0 + s % 5});
      const Timeline line = run_clock(schedule, times);
      std::vector<WorkTime> forward(p * v * m), backward(p * v * m);
      int items = 0, wrong = 0;
      for (int d = 0; d < p; ++d) {
        for (size_t n = 0; n < schedule.devices[d].size(); ++n, ++items) {
          const WorkItem& item = schedule.devices[d][n];
          const int at = model_stage(schedule, d, item.virtual_stage) * m + item.micro_batch;
          if (item.kind == WorkKind::kForward) forward[at] = line.devices[d][n];
          if (item.kind == WorkKind::kBackward) backward[at] = line.devices[d][n];
          // A weight gradient stands behind its backward in the order of its own device, so that this has been seen.
          if (item.kind == WorkKind::kWeight)
            wrong += backward[at].end <= 0 || backward[at].end > line.devices[d][n].start;
          if (n > 0) wrong += line.devices[d][n - 1].end > line.devices[d][n].start;
        }
      }
      for (int s = 0; s < p * v; ++s) {
        for (int u = 0; u < m; ++u) {
          const int at = s * m + u;
          wrong += forward[at].end > backward[at].start;
          if (s > 0) wrong += forward[at - m].end > forward[at].start || backward[at].end > backward[at - m].start;
        }
      }
      CHECK(items == p * v * m * (schedule.split_backward ? 3 : 2));
      CHECK(wrong == 0);
    });
  }
}

TEST_CASE("unbuffered sends deadlock all but gpipe, a capacity of 1 suffices for all but interleaved") {
  for (const ScheduleRule& rule : schedule_rules()) {
    if (rule.name == "interleaved") continue;
    each_shape(rule.name, [&](const PipelineSchedule& schedule, int p, int m, int) {
      const bool free = p == 1 || m == 1 || rule.name == "gpipe";
      CHECK(capacity_needed(schedule) == (free ? 0 : 1));
      // A capacity of 1 costs no time where stages are equally fast.
      CHECK(run_clock(schedule, kEqual, 1).makespan == run_clock(schedule, kEqual).makespan);
    });
  }
}

TEST_CASE(
    "interleaved needs a capacity of one for each micro-batch by which a round is larger than the pipeline, and one "
    "more") {
  each_shape("interleaved", [](const PipelineSchedule& schedule, int p, int m, int v) {
    const int waiting = std::max(0, round_size(p, m) - p) + 1;
    // A single round only gets slower with less capacity; several rounds deadlock.
    const bool several = m >= 2 * p && v > 1;
    CHECK(capacity_needed(schedule) == (p == 1 || m == 1 ? 0 : several ? waiting : 1));
    CHECK(run_clock(schedule, kEqual, waiting).makespan == run_clock(schedule, kEqual).makespan);
  });
}

TEST_CASE("a deadlock is reported with the items in its cycle") {
  const PipelineSchedule schedule = make_schedule("1f1b", 2, 2);
  const Deadlock deadlock = find_deadlock(schedule, 0);
  REQUIRE(deadlock.cycle.size() == 2);
  CHECK(to_string(schedule, deadlock) ==
        "device 0 cannot send F1: device 1 has not taken F1\n"
        "device 1 cannot send B0: device 0 has not taken B0\n");
  CHECK(has(message_of([&] { verify_schedule(schedule, 0); }), "cannot send F1"));
  CHECK(has(message_of([&] { run_clock(schedule, kEqual, 0); }), "cannot send F1"));
  CHECK_NOTHROW(verify_schedule(schedule, 1));

  // Orders that no capacity can save.
  PipelineSchedule early = make_schedule("gpipe", 1, 1);
  std::swap(early.devices[0][0], early.devices[0][1]);
  CHECK(to_string(early, find_deadlock(early, kUnlimitedCapacity)) ==
        "device 0 cannot start B0: device 0 has not run F0\n");
  CHECK(has(message_of([&] { capacity_needed(early); }), "any capacity"));
}

TEST_CASE("blocking costs time: a slow receiver holds the sender up") {
  // Two stages, the second five times slower. With a capacity of 1 device 0 may be two forwards ahead of it, not three.
  const std::vector<StageTimes> times = {{1, 1, 0}, {5, 5, 0}};
  const PipelineSchedule schedule = make_schedule("gpipe", 2, 4);
  const auto released = [&](int capacity, int n) {
    return run_clock(schedule, times, capacity).devices[0][n].released;
  };
  CHECK(released(kUnlimitedCapacity, 3) == 4);
  CHECK(released(1, 0) == 1);
  CHECK(released(1, 1) == 2);
  CHECK(released(1, 2) == 6);   // F1 starts at 6 on device 1
  CHECK(released(1, 3) == 11);  // and F2 at 11
  CHECK(released(0, 1) == 6);
}

TEST_CASE("incomplete and impossible schedules are refused") {
  CHECK(has(message_of([] { make_schedule("dualpipe", 2, 2); }), "'dualpipe', expected one of " + schedule_names()));
  CHECK(has(message_of([] { make_schedule("1f1b", 2, 0); }), "0 micro-batches"));
  CHECK(has(message_of([] { make_schedule("1f1b", 0, 2); }), "0 stages"));
  CHECK(has(message_of([] { make_schedule("1f1b", 2, 2, 2); }), "2 virtual stages per device, expected 1"));
  CHECK(has(message_of([] { make_schedule("zb_v", 2, 2, 3); }), "expected 2"));
  CHECK(make_schedule("zb_v", 2, 2).shape.virtual_stages == 2);

  PipelineSchedule missing = make_schedule("1f1b", 2, 2);
  missing.devices[1].pop_back();
  CHECK(has(message_of([&] { find_deadlock(missing, 1); }), "7 items, expected 8"));
  PipelineSchedule twice = make_schedule("1f1b", 2, 2);
  twice.devices[1].back() = twice.devices[1].front();
  CHECK(has(message_of([&] { find_deadlock(twice, 1); }), "device 1, item 3 (F0): is there twice"));
  CHECK(has(message_of([] { run_clock(make_schedule("zb_v", 2, 2), std::vector<StageTimes>(2)); }), "expected 4"));
}
