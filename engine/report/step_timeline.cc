#include "report/step_timeline.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "base/format.h"
#include "base/text.h"
#include "base/watch.h"

namespace whale {
namespace {

constexpr size_t kBytesOfSpan = 24;          // as the page writes it
constexpr size_t kBytesOfLabel = 60;         // without its texts
constexpr size_t kMostOps = 6;               // named by a label that stands for several
constexpr size_t kMostText = 200;            // bytes of one text of a label
constexpr double kFinest = 1.0 / (1 << 17);  // of a step: the first gap that is closed

size_t bytes_of(const StepTimeline& timeline) {
  size_t bytes = 0;
  for (const SpanLabel& label : timeline.labels)
    bytes += kBytesOfLabel + label.name.size() + label.op.size() + label.scope.size();
  for (const QueueTrack& track : timeline.tracks) bytes += kBytesOfSpan * track.spans.size();
  return bytes;
}

// How much is told: which neighbours become one.
struct Fold {
  double gap = 0;             // seconds between them, at most
  bool micro_batches = true;  // those of different ones stay apart
  bool activities = true;     // and those that do something else, unless both are shorter than the gap
  bool names = true;
};

// Spans of a track that become one.
class Gathered {
 public:
  explicit Gathered(const StepTimeline& from) : from_(from) {}

  bool takes(const LabelledSpan& s, const Fold& fold) const {
    if (spans_.empty()) return true;
    const LabelledSpan& last = spans_.back();
    if (s.start - last.end > fold.gap) return false;
    if (!fold.activities && s.end - spans_.front().start <= fold.gap) return true;
    return label(s).activity == label(last).activity && (!fold.micro_batches || s.micro_batch == last.micro_batch);
  }
  void add(const LabelledSpan& s) { spans_.push_back(s); }
  bool empty() const { return spans_.empty(); }

  LabelledSpan into(StepTimeline& to, const Fold& fold) {
    const LabelledSpan& first = spans_.front();
    SpanLabel all = label(first);
    if (spans_.size() > 1) all = joined(fold);
    LabelledSpan out{to.label_of(std::move(all)), first.micro_batch, first.start, first.end};
    for (const LabelledSpan& s : spans_) out.end = std::max(out.end, s.end);
    spans_.clear();
    return out;
  }

 private:
  const SpanLabel& label(const LabelledSpan& s) const { return from_.labels[s.label]; }

  SpanLabel joined(const Fold& fold) const {
    const SpanLabel &first = label(spans_.front()), &last = label(spans_.back());
    SpanLabel out{.name = "", .op = "", .scope = "", .activity = longest()};
    if (fold.names) {
      out.name = first.name == last.name ? first.name : first.name + " ... " + last.name;
      out.scope = common(first.scope, last.scope);
    }
    std::vector<std::string_view> ops;
    out.count = 0;
    for (const LabelledSpan& s : spans_) {
      const SpanLabel& each = label(s);
      out.count += each.count, out.flops += each.flops;
      if (ops.size() < kMostOps && std::find(ops.begin(), ops.end(), each.op) == ops.end()) ops.push_back(each.op);
    }
    out.op = fmt::format("{}", fmt::join(ops, ", "));
    return out;
  }
  Activity longest() const {
    std::array<double, kActivities> seconds{};
    for (const LabelledSpan& s : spans_) seconds[static_cast<size_t>(label(s).activity)] += s.end - s.start;
    return static_cast<Activity>(std::max_element(seconds.begin(), seconds.end()) - seconds.begin());
  }
  // The scopes around both.
  static std::string common(const std::string& a, const std::string& b) {
    if (a == b) return a;
    size_t same = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()) && a[i] == b[i]; ++i)
      if (a[i] == '/') same = i;
    return a.substr(0, same);
  }

  const StepTimeline& from_;
  std::vector<LabelledSpan> spans_;
};

StepTimeline folded_by(const StepTimeline& timeline, const Fold& fold) {
  StepTimeline out;
  out.seconds = timeline.seconds;
  for (const QueueTrack& track : timeline.tracks) {
    Watch::look();
    QueueTrack& to = out.tracks.emplace_back(QueueTrack{track.device, track.queue, {}});
    Gathered now(timeline);
    for (const LabelledSpan& s : track.spans) {
      if (!now.takes(s, fold)) to.spans.push_back(now.into(out, fold));
      now.add(s);
    }
    if (!now.empty()) to.spans.push_back(now.into(out, fold));
  }
  return out;
}

}  // namespace

int32_t StepTimeline::label_of(SpanLabel label) {
  for (std::string* text : {&label.name, &label.op, &label.scope})
    if (text->size() > kMostText) *text = brief(*text, kMostText);
  const auto [known, fresh] = numbers_.try_emplace(std::move(label), static_cast<int32_t>(labels.size()));
  if (fresh) labels.push_back(known->first);
  return known->second;
}

StepTimeline timeline_of(const Plan& plan, const Entry& entry, const StepTimes& times) {
  StepTimeline out;
  out.seconds = times.seconds;
  Graph named;  // of the plan's scopes: the source has them before a strategy was laid over it
  named.scopes = plan.scopes;
  std::map<int32_t, std::vector<std::vector<Activity>>> activities;  // by program
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> labels;   // program, segment, instruction
  std::map<std::pair<int32_t, Queue>, std::vector<LabelledSpan>> tracks;
  for (const Event& e : times.events) {
    const int32_t program = entry.rows[e.device].program;
    const auto [label, fresh] = labels.try_emplace({program, e.segment, e.instruction});
    if (fresh) {
      const Program& p = entry.programs[program];
      const auto [of, first] = activities.try_emplace(program);
      if (first) of->second = activities_of(p, plan.groups);
      const auto s = static_cast<size_t>(e.segment), k = static_cast<size_t>(e.instruction);
      const Instruction& i = p.segments[s].instructions[k];
      label->second =
          out.label_of({i.name, std::string(i.verb()), named.scope_path(i.scope), of->second[s][k], 1, i.flops});
    }
    const int32_t u = entry.programs[program].schedule[e.row].micro_batch;
    tracks[{e.device, e.queue}].push_back({label->second, u, e.start, e.end});
  }
  for (auto& [at, spans] : tracks) {
    std::stable_sort(spans.begin(), spans.end(),
                     [](const LabelledSpan& a, const LabelledSpan& b) { return a.start < b.start; });
    out.tracks.push_back({at.first, at.second, std::move(spans)});
  }
  return out;
}

StepTimeline folded(const StepTimeline& timeline, size_t bytes) {
  if (bytes_of(timeline) <= bytes) return timeline;
  std::optional<StepTimeline> out;
  for (double gap = kFinest; gap < 1; gap *= 4) {
    Fold fold{.gap = gap * timeline.seconds};
    for (const bool apart : {true, false}) {
      fold.micro_batches = apart;
      out = folded_by(timeline, fold);
      if (bytes_of(*out) <= bytes) return *out;
    }
    fold.activities = fold.names = false;
    out = folded_by(timeline, fold);
    if (bytes_of(*out) <= bytes) return *out;
  }
  return *out;
}

std::array<double, kActivities> busy_of(const StepTimeline& timeline, const QueueTrack& track) {
  std::array<double, kActivities> busy{};
  for (const LabelledSpan& s : track.spans)
    busy[static_cast<size_t>(timeline.labels[s.label].activity)] += s.end - s.start;
  return busy;
}

}  // namespace whale
