#include "task/stages.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/watch.h"
#include "cost/measured.h"
#include "ops/cost.h"
#include "task/cut_places.h"
#include "task/refine_cuts.h"

namespace whale {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

template <class T>
class Table {
 public:
  Table(size_t rows, size_t columns) : columns_(columns), all_(rows * columns) {}
  T* operator[](size_t row) { return all_.data() + row * columns_; }
  void fill(const T& value) { std::ranges::fill(all_, value); }

 private:
  size_t columns_;
  std::vector<T> all_;
};

// Of one op; `read`: parameters that ops before it have read.
StageBytes bytes_of_op(const Graph& graph, const Op& op, const std::vector<char>& moves, std::vector<char>& read) {
  StageBytes out;
  for (const TensorId id : op.inputs) {
    if (id == kNone || graph.tensor(id).kind != TensorKind::kVariable || read[id] != 0) continue;
    read[id] = 1;
    out.parameters += whole_bytes(graph.tensor(id));
  }
  for (const TensorId id : op.outputs)
    if (id != kNone && moves[id] == 1) out.values += whole_bytes(graph.tensor(id));
  return out;
}

// Stages of which the devices are as fast are of one kind.
struct StageKinds {
  std::vector<DeviceRates> rates;
  std::vector<size_t> of_stage;
};
StageKinds kinds_of(const std::vector<DeviceRates>& rates, size_t stages) {
  StageKinds out;
  for (size_t s = 0; s < stages; ++s) {
    const DeviceRates& mine = rates[s % rates.size()];
    const auto at = std::ranges::find_if(out.rates, [&](const DeviceRates& r) { return r == mine; });
    out.of_stage.push_back(static_cast<size_t>(at - out.rates.begin()));
    if (at == out.rates.end()) out.rates.push_back(mine);
  }
  return out;
}

// Of its gradients: of products and the like two for one, of what passes over memory one, of what has none nothing;
// and what each micro-batch adds to sums of parameters' gradients.
double backward_seconds(const Graph& graph, const Op& op, const OpView& view, const std::vector<char>& moves,
                        double seconds, const DeviceRates& rates, double parts, double add_passes) {
  constexpr double kDense = 4;  // FLOPs of a byte
  const bool has = !op.outputs.empty() && op.outputs[0] != kNone && moves[op.outputs[0]] == 1 &&
                   is_float(graph.tensor(op.outputs[0]).dtype) && !has_flag(op.code, kNoGradient);
  if (!has) return 0;
  const OpCost cost = cost_of(view);
  double out = (cost.flops > kDense * cost.bytes ? 2 : 1) * seconds;
  if (graph.training.accumulation > 1 || parts > 1)
    for (const TensorId id : op.inputs)
      if (id != kNone && graph.tensor(id).kind == TensorKind::kVariable)
        out += parts * pass_seconds(add_passes * whole_bytes(graph.tensor(id)), rates);
  return out;
}

// How full the fullest device of a stage is with ops [begin, end).
class Fullness {
 public:
  Fullness(const Graph& graph, const std::vector<OpId>& ops, const std::vector<char>& moves, const StageRooms& rooms)
      : rooms_(rooms) {
    if (rooms.empty()) return;
    std::vector<char> read(graph.tensors.size());
    until_.emplace_back();
    for (const OpId op : ops) {
      const StageBytes mine = bytes_of_op(graph, graph.op(op), moves, read);
      until_.push_back({until_.back().parameters + mine.parameters, until_.back().values + mine.values});
    }
  }
  double of(size_t begin, size_t end, size_t stage) const {
    double full = 0;
    if (stage >= rooms_.size()) return full;
    const StageBytes bytes{until_[end].parameters - until_[begin].parameters,
                           until_[end].values - until_[begin].values};
    for (const StageRoom& room : rooms_[stage]) full = std::max(full, room.full(bytes));
    return full;
  }

 private:
  const StageRooms& rooms_;
  std::vector<StageBytes> until_;
};

}  // namespace

std::vector<StageBytes> bytes_of_stages(const Graph& graph, const std::vector<int32_t>& stage_of, size_t stages) {
  const std::vector<char> moves = moving_tensors(graph);
  std::vector<char> read(graph.tensors.size());
  std::vector<StageBytes> out(stages);
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    if (stage_of[i] < 0) continue;
    const StageBytes mine = bytes_of_op(graph, graph.ops[i], moves, read);
    StageBytes& stage = out[stage_of[i]];
    stage.parameters += mine.parameters, stage.values += mine.values;
  }
  return out;
}

std::vector<int32_t> cut_stages(const Graph& graph, const std::vector<OpId>& ops, int64_t stages,
                                int64_t virtual_stages, const CostModel& cost, bool keep_groups,
                                const std::vector<DeviceRates>& rates, const StageRooms& rooms, double parts,
                                const std::optional<StageClock>& clock) {
  const size_t n = ops.size();
  // Messages of one micro-batch travel beside the work on others, where devices are known to have engines for it.
  const bool beside = !rates.empty() && cost.beside;
  const StageKinds kinds =
      kinds_of(rates.empty() ? std::vector<DeviceRates>{cost.device} : rates, static_cast<size_t>(stages));
  // Seconds of the ops before, by kind of stage; `until`: by the fastest device for each op.
  std::vector<std::vector<double>> by_kind(kinds.rates.size(), std::vector<double>(n + 1)), backward = by_kind;
  std::vector<double> until(n + 1);
  const std::vector<char> moves = moving_tensors(graph);
  OpView view;
  for (size_t k = 0; k < n; ++k) {
    const Op& op = graph.op(ops[k]);
    put_view(graph, op, view);
    double least = std::numeric_limits<double>::infinity();
    for (size_t r = 0; r < kinds.rates.size(); ++r) {
      const double seconds = seconds_in_parts(view, kinds.rates[r], parts);
      by_kind[r][k + 1] = by_kind[r][k] + seconds;
      if (clock)
        backward[r][k + 1] =
            backward[r][k] + backward_seconds(graph, op, view, moves, seconds, kinds.rates[r], parts, cost.add_passes);
      least = std::min(least, seconds);
    }
    until[k + 1] = until[k] + least;
  }
  std::vector<CutPlace> places = cut_places(graph, ops, keep_groups);
  const auto wanted = static_cast<size_t>(stages);
  if (places.size() + 1 < wanted)
    throw invalid(
        "the pipeline wants {} stages{}, the model can be cut into at most {}; give {}, or nest replica or split "
        "to use more devices",
        stages,
        virtual_stages > 1 ? fmt::format(" ({} on each of {} devices)", virtual_stages, stages / virtual_stages) : "",
        places.size() + 1,
        virtual_stages > 1
            ? fmt::format("at most {} devices or fewer virtual stages", (std::ssize(places) + 1) / virtual_stages)
            : "so many");
  places.insert(places.begin(), CutPlace{0, 0});
  places.push_back({n, 0});
  const size_t ends = places.size();
  const auto seconds_of = [&](size_t j, size_t k, size_t s) {         // of stage s, counted from 1
    const double crossing = places[j].crossing + places[k].crossing;  // travels, and waits at both ends
    const std::vector<double>& mine = by_kind[kinds.of_stage[s - 1]];
    const double work = mine[places[k].at] - mine[places[j].at], travel = link_seconds(crossing, 0, cost.link);
    // Work is of the forward pass; what crosses travels once each way in all passes. Bytes count as ever where plans
    // did not fit: a dearer price would hide the work, and uneven stages hold more.
    return (beside ? std::max(work, travel / cost.passes) : work + travel) +
           cost.held_seconds(crossing) / cost.memory_price;
  };
  const Fullness full(graph, ops, moves, rooms);
  const auto full_of = [&](size_t j, size_t k, size_t s) { return full.of(places[j].at, places[k].at, s - 1); };
  // Even cuts give a bound: no stage of the best ones works longer alone.
  double bound = 0;
  for (size_t s = 1, from = 0; s <= wanted; ++s) {
    size_t to = ends - 1 - (wanted - s);  // leaves a place for each of the others
    while (to > from + 1 && until[places[to].at] > until[n] * static_cast<double>(s) / static_cast<double>(wanted))
      --to;
    if (s == wanted) to = ends - 1;
    bound = full_of(from, to, s) > 1 ? kNever : std::max(bound, seconds_of(from, to, s));
    from = to;
  }
  // The least that the slowest stage of any cut takes; then, of the cuts whose slowest is as good as that, the evenest:
  // the one with the least sum of squares. value[k][s]: of the first s stages when they end at place k.
  constexpr double kNear = 1 + 1e-9, kAsGood = 1.001;
  Table<double> value(ends, wanted + 1);
  Table<size_t> from(ends, wanted + 1);
  // `at_least`: no stage from a place to another measures less, the farther they are apart the more.
  const auto best = [&](double limit, const auto& measure, const auto& at_least, const auto& with) {
    const auto fewest = [&](double all) {  // stages that it takes
      return static_cast<size_t>(std::min(std::ceil(all / limit), static_cast<double>(wanted)));
    };
    value.fill(kNever);
    value[0][0] = 0;
    for (size_t k = 1; k < ends; ++k) {
      Watch::look();
      const size_t low = std::max<size_t>(1, fewest(at_least(0, k)));
      const size_t high = wanted - fewest(at_least(k, ends - 1));
      if (low > high) continue;  // nowhere the end of a stage: most places, where even cuts are near the best
      for (size_t j = k; j-- > 0 && at_least(j, k) <= limit;) {
        for (size_t s = low; s <= std::min(high, j + 1); ++s) {
          if (value[j][s - 1] >= kNever) continue;
          const double mine = measure(j, k, s);
          if (mine > limit) continue;
          if (const double now = with(value[j][s - 1], mine); now < value[k][s]) value[k][s] = now, from[k][s] = j;
        }
      }
    }
    return value[ends - 1][wanted];
  };
  const auto slowest_of = [](double before, double mine) { return std::max(before, mine); };
  const auto squares_of = [](double before, double mine) { return before + mine * mine; };
  const auto timed = [&](size_t j, size_t k, size_t s) { return full_of(j, k, s) > 1 ? kNever : seconds_of(j, k, s); };
  const auto alone = [&](size_t j, size_t k) { return until[places[k].at] - until[places[j].at]; };
  const double slowest = best(bound * kNear, timed, alone, slowest_of);
  if (slowest < kNever) {
    best(slowest * kAsGood, timed, alone, squares_of);
  } else {
    const auto nothing = [](size_t, size_t) { return 0.0; };
    const double fullest = best(kNever, full_of, nothing, slowest_of);
    best(fullest * kAsGood, full_of, nothing, squares_of);
  }
  std::vector<size_t> begins(wanted);
  for (size_t s = wanted, end = ends - 1; s > 0; --s) begins[s - 1] = end = from[end][s];
  if (clock && rooms.empty()) {
    const double per_sender = clock->senders * clock->micro_batches;
    const auto message = [&](size_t k, size_t s) {
      return link_seconds(places[k].crossing / per_sender, 1, clock->borders[s].link);
    };
    const PipelineOfCuts pipeline{
        .places = ends - 1,
        .micro_batches = clock->micro_batches,
        .warmups = clock->warmups,
        .times =
            [&](size_t j, size_t k, size_t s) {
              const std::vector<double>&ahead = by_kind[kinds.of_stage[s]], &back = backward[kinds.of_stage[s]];
              StageTimes out{.forward = (ahead[places[k].at] - ahead[places[j].at]) / parts,
                             .backward = (back[places[k].at] - back[places[j].at]) / parts,
                             .weight = 0};
              if (s + 1 < wanted) out.forward += clock->borders[s].forward.takes * message(k, s);
              if (s > 0) out.backward += clock->borders[s - 1].backward.takes * message(j, s - 1);
              return out;
            },
        .sends =
            [&](size_t k, size_t s) {
              const double seconds = message(k, s);
              return LinkTimes{clock->borders[s].forward.longer * seconds, clock->borders[s].backward.longer * seconds};
            }};
    // Two starts: by the work of small micro-batches, and of the whole batch.
    const std::vector<int32_t> whole = cut_stages(graph, ops, stages, virtual_stages, cost, keep_groups, rates);
    std::vector<size_t> start{0};
    for (size_t k = 1; k + 1 < ends; ++k)
      if (whole[places[k].at] != whole[places[k].at - 1]) start.push_back(k);
    std::vector<std::vector<size_t>> starts{std::move(start)};
    if (begins != starts[0]) starts.push_back(std::move(begins));
    begins = refined_cuts(pipeline, starts, clock->finds_warmup);
  }
  std::vector<int32_t> out(n);
  for (size_t s = 0; s < wanted; ++s)
    for (size_t k = places[begins[s]].at; k < n; ++k) out[k] = static_cast<int32_t>(s);
  return out;
}

}  // namespace whale
