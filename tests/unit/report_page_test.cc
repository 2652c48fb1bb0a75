// What the page of a plan is made of: activities of instructions, timelines that are folded, traces that are read back.
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "plan/figures.h"
#include "report/device_classes.h"
#include "report/measured.h"
#include "report/page.h"
#include "report/predicted_trace.h"
#include "report/step_timeline.h"
#include "unit/property.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

Plan plan_of(const small::Model& m, int devices, const std::string& strategy) {
  CompileOptions options;
  options.strategy = strategy;
  return compile(m.g, parse_devices("null:" + std::to_string(devices), {0, 1, 2, 3}), options);
}

size_t spans_in(const StepTimeline& t) {
  size_t n = 0;
  for (const QueueTrack& track : t.tracks) n += track.spans.size();
  return n;
}

// Some devices' queues with spans of a few activities, most of them close to each other.
StepTimeline random_timeline() {
  StepTimeline out;
  for (int32_t device = 0; device < *rc::gen::inRange(1, 4); ++device) {
    QueueTrack track{device, Queue::kCompute, {}};
    double now = 0;
    const int n = *rc::gen::inRange(1, 300);
    for (int k = 0; k < n; ++k) {
      now += *rc::gen::element(0.0, 0.0, 1e-9, 1e-3, 0.5);
      const double end = now + *rc::gen::element(0.0, 1e-7, 1e-3, 0.1);
      const auto activity = *rc::gen::element(Activity::kForward, Activity::kBackward, Activity::kUpdate);
      const int32_t label =
          out.label_of({"op" + std::to_string(*rc::gen::inRange(0, 40)), "mul", "a/b", activity, 1, 2});
      track.spans.push_back({label, *rc::gen::inRange(0, 3), now, end});
      now = end;
    }
    out.seconds = std::max(out.seconds, now);
    out.tracks.push_back(std::move(track));
  }
  return out;
}

double flops_of(const StepTimeline& t) {
  double sum = 0;
  for (const QueueTrack& track : t.tracks)
    for (const LabelledSpan& s : track.spans) sum += t.labels[s.label].flops;
  return sum;
}

}  // namespace

TEST_CASE("activities: a weight gradient makes what an update reads, and nothing else of backward does") {
  const small::Model m = small::mlp(10);
  const Plan plan = plan_of(m, 2, "replica");
  const Program& p = plan.entries[0].programs[0];
  const auto activities = activities_of(p, plan.groups);
  REQUIRE(activities.size() == p.segments.size());
  // Independent of what tells them: by the names of ops, of which this model has one for each.
  size_t weights = 0, inputs = 0;
  for (size_t s = 0; s < p.segments.size(); ++s)
    for (size_t k = 0; k < p.segments[s].instructions.size(); ++k) {
      const Instruction& i = p.segments[s].instructions[k];
      if (i.verb() == "all_reduce") CHECK(activities[s][k] == Activity::kCommunication);
      if (i.kernel() && i.phase == Phase::kForward) CHECK(activities[s][k] == Activity::kForward);
      const bool weight = i.verb() == "matmul_weight_grad";
      if ((!weight && i.verb() != "matmul") || i.phase != Phase::kBackward) continue;
      CHECK(activities[s][k] == (weight ? Activity::kWeightGradient : Activity::kBackward));
      ++(weight ? weights : inputs);
    }
  CHECK(weights > 0);
  CHECK(inputs > 0);
}

TEST_CASE("a timeline holds each instruction of each class once; its busy seconds are those of the simulator") {
  const small::Model m = small::gpt(8);
  const Plan plan = plan_of(m, 4, "replica(2) > pipeline(2, micro_batches=2)");
  const Entry& entry = plan.entries[0];
  const auto times = times_of(plan, entry, 1 << 20);
  REQUIRE(times);
  const StepTimeline t = timeline_of(plan, entry, *times);
  CHECK(spans_in(t) == times->events.size());
  CHECK(t.seconds == times->seconds);
  for (const QueueTrack& track : t.tracks) {
    double events = 0;
    for (const Event& e : times->events)
      if (e.device == track.device && e.queue == track.queue) events += e.end - e.start;
    double busy = 0;
    for (const double seconds : busy_of(t, track)) busy += seconds;
    CHECK(busy == doctest::Approx(events));
    CHECK(busy <= t.seconds * (1 + 1e-9));
  }
  CHECK(std::ranges::any_of(t.labels, [](const SpanLabel& l) { return l.scope.find("stage") != std::string::npos; }));
  const auto classes = classes_of(plan, entry, &*times);
  size_t devices = 0;
  for (const DeviceClass& c : classes) devices += c.devices.size();
  CHECK(devices == plan.devices.size());
  CHECK(classes.size() == 2);  // the stages
}

TEST_CASE("property: a folded timeline covers what it was made from, in order, and keeps to its bound") {
  CHECK(test::holds("folded timelines", 200, [] {
    const StepTimeline whole = random_timeline();
    const auto bytes = static_cast<size_t>(*rc::gen::inRange(2000, 40000));
    const StepTimeline small = folded(whole, bytes);
    RC_ASSERT(small.seconds == whole.seconds);
    RC_ASSERT(small.tracks.size() == whole.tracks.size());
    RC_ASSERT(spans_in(small) <= whole.tracks.size() * 2000 + bytes);
    if (spans_in(small) == spans_in(whole)) RC_ASSERT(small.labels == whole.labels);
    RC_ASSERT(flops_of(small) == flops_of(whole));
    size_t text = 0;
    for (const SpanLabel& l : small.labels) text += l.name.size() + l.op.size() + l.scope.size();
    RC_ASSERT(spans_in(small) * 24 + text <= std::max(bytes, whole.tracks.size() * 400));
    for (size_t t = 0; t < whole.tracks.size(); ++t) {
      const auto &now = small.tracks[t].spans, &all = whole.tracks[t].spans;
      RC_ASSERT(!now.empty());
      for (size_t k = 1; k < now.size(); ++k) RC_ASSERT(now[k - 1].end <= now[k].start);
      size_t k = 0;
      for (const LabelledSpan& s : all) {  // each lies in one
        while (k < now.size() && now[k].end < s.end) ++k;
        RC_ASSERT(k < now.size());
        RC_ASSERT(now[k].start <= s.start);
      }
    }
  }));
}

TEST_CASE("a predicted trace that is read back as if it were measured says the same") {
  const small::Model m = small::gpt(8);
  const Plan plan = plan_of(m, 2, "pipeline(2, micro_batches=2)");
  std::string trace = predicted_trace(plan);
  CHECK_NOTHROW(measured_of(plan, {trace}));  // of null devices it is what a run gives
  Plan here = plan;
  for (DeviceSpec& d : here.devices) d.kind = DeviceKind::kRef;
  CHECK_THROWS_WITH_AS(measured_of(here, {trace}), doctest::Contains("is a predicted timeline"), Error);
  const std::string mark = R"("timeline":"predicted")";
  REQUIRE(trace.find(mark) != std::string::npos);
  trace.replace(trace.find(mark), mark.size(), R"("timeline":"measured")");
  const Measured back = measured_of(plan, {trace});
  const auto times = times_of(plan, plan.entries[0], 1 << 20);
  const StepTimeline t = timeline_of(plan, plan.entries[0], *times);
  CHECK(back.entry == "train");
  CHECK(back.batch == plan.entries[0].batch);
  CHECK(back.timeline.seconds == doctest::Approx(t.seconds).epsilon(1e-3));
  REQUIRE(back.timeline.tracks.size() == t.tracks.size());
  for (size_t k = 0; k < t.tracks.size(); ++k) {
    CHECK(back.timeline.tracks[k].device == t.tracks[k].device);
    CHECK(back.timeline.tracks[k].queue == t.tracks[k].queue);
    REQUIRE(back.timeline.tracks[k].spans.size() == t.tracks[k].spans.size());
    for (size_t s = 0; s < t.tracks[k].spans.size(); ++s) {
      const LabelledSpan &a = back.timeline.tracks[k].spans[s], &b = t.tracks[k].spans[s];
      CHECK(back.timeline.labels[a.label] == t.labels[b.label]);
      CHECK(a.start == doctest::Approx(b.start).epsilon(1e-6));
      CHECK(a.micro_batch == b.micro_batch);
    }
  }
}

TEST_CASE("a page holds its data and no byte that ends them") {
  const Json data = {{"name", "</script><!--&'\"\xff\x01"}};
  const std::string page = page_html(data);
  const std::string begin = R"(id="data">)";
  const size_t at = page.find(begin) + begin.size(), end = page.find("</script>", at);
  const std::string text = page.substr(at, end - at);
  CHECK(text.find_first_of("<>&") == std::string::npos);
  CHECK(std::ranges::all_of(text, [](char c) { return c >= 0x20 && c < 0x7F; }));
  CHECK(Json::parse(text)["name"] == "</script><!--&'\"\xEF\xBF\xBD\x01");
}
