#include "report/choice_report.h"

#include <map>

#include "base/format.h"
#include "base/json.h"
#include "base/text.h"
#include "plan/figures.h"
#include "shard/sharded_graph.h"

namespace whale {
namespace {

// "replica by b, split by n", of the axes along which the op is cut; of a part of a factor what is outside and inside.
std::string cuts_text(const Graph& graph, const Axes& axes, const Choices& choices, size_t op) {
  const Factors factors = factors_of(graph, graph.ops[op]);
  std::string text;
  for (size_t a = 0; a < axes.axes(); ++a) {
    const OpCut& cut = choices.cuts[a][op];
    if (!cut.present()) continue;
    text += fmt::format("{}{} by {}", text.empty() ? "" : ", ", axes.axis_name(a), factors.list[cut.factor].name);
    if (!(cut.sub == SubAxisPart{})) text += fmt::format(":{}x{}", cut.sub.outer, cut.sub.inner);
  }
  return text.empty() ? "whole" : text;
}

// Rows that agree but for numbers in the name, which become stars.
class Folded {
 public:
  Folded(std::vector<ChoiceRow>& rows, bool fold) : rows_(rows), fold_(fold) {}
  void add(ChoiceRow row) {
    const std::string pattern = fold_ ? starred(row.name) : fmt::format("{} {}", row.name, rows_.size());
    const auto [at, fresh] =
        row_of_.try_emplace(fmt::format("{} {} {} {} {}", pattern, row.op, static_cast<int>(row.phase), row.cuts,
                                        fmt::join(row.results, " ")),
                            rows_.size());
    if (fresh) {
      rows_.push_back(std::move(row));
      return;
    }
    ChoiceRow& known = rows_[at->second];
    known.name = pattern, known.count += row.count, known.price += row.price;
  }

 private:
  std::vector<ChoiceRow>& rows_;
  bool fold_;
  std::map<std::string, size_t> row_of_;
};

std::string price_text(const Price& price) {
  std::string text = seconds_text(price.compute_seconds);
  if (price.moved_bytes > 0)
    text += fmt::format(" + {} for {}", seconds_text(price.move_seconds), bytes_text(price.moved_bytes));
  return text;
}

}  // namespace

ChoiceReport choice_report(const Graph& graph, const TaskGraphs& tasks, const Choices& choices, bool fold) {
  const Axes axes{tasks, choices.micro_batches};
  ChoiceReport report;
  report.strategy = tasks.strategy;
  for (size_t a = 0; a < axes.axes(); ++a) report.axes += fmt::format("{}{}", a ? ", " : "", axes.axis_name(a));
  report.step = price_of_step(graph, tasks, choices);
  const auto lies = [&](TensorId id) {
    const Tensor& t = graph.tensor(id);
    std::string text = fmt::format("{}{} {}", name_of(t.dtype), to_string(t.dims), to_string(choices.shardings[id]));
    if (const auto to = choices.settled.find(id); to != choices.settled.end())
      text += fmt::format(", then {}", to_string(to->second));
    return text;
  };
  Folded variables(report.variables, fold);
  for (const Variable& v : graph.variables)
    variables.add({graph.tensor(v.tensor).name, "variable", Phase::kForward, "", {lies(v.tensor)}, 1, {}});
  Folded ops(report.ops, fold);
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    ChoiceRow row{op.name, def(op.code).name, op.phase, cuts_text(graph, axes, choices, i), {}, 1, choices.prices[i]};
    for (const TensorId id : op.outputs)
      if (id != kNone) row.results.push_back(lies(id));
    ops.add(std::move(row));
  }
  return report;
}

std::string choices_text(const ChoiceReport& report) {
  std::string text = fmt::format(
      "{}\nshardings along {}: R replicated, S a cut of a dimension, P a part of a sum\n"
      "a step, nothing beside anything: {}\n\nvariables live\n",
      report.strategy, report.axes, price_text(report.step));
  const auto times = [](int64_t count) { return count > 1 ? fmt::format(" x {}", count) : ""; };
  for (const ChoiceRow& row : report.variables)
    text += fmt::format("  {}{}  {}\n", row.name, times(row.count), fmt::join(row.results, "; "));
  const ChoiceRow* last = nullptr;
  for (const ChoiceRow& row : report.ops) {
    if (!last || last->phase != row.phase) text += fmt::format("\n{}\n", name_of(row.phase));
    last = &row;
    text += fmt::format("  {} ({}){}: {}  [{}]\n", row.name, row.op, times(row.count), row.cuts, price_text(row.price));
    text += fmt::format("    {}\n", fmt::join(row.results, "; "));
  }
  return text;
}

std::string choices_json(const ChoiceReport& report) {
  const auto price = [](const Price& p) {
    return Json{
        {"compute_seconds", p.compute_seconds}, {"move_seconds", p.move_seconds}, {"moved_bytes", p.moved_bytes}};
  };
  Json out{{"strategy", report.strategy}, {"axes", report.axes}, {"step", price(report.step)}};
  for (const ChoiceRow& row : report.variables)
    out["variables"].push_back({{"name", row.name}, {"sharding", row.results[0]}, {"count", row.count}});
  for (const ChoiceRow& row : report.ops)
    out["ops"].push_back({{"name", row.name},
                          {"op", row.op},
                          {"phase", name_of(row.phase)},
                          {"cuts", row.cuts},
                          {"results", row.results},
                          {"count", row.count},
                          {"price", price(row.price)}});
  return out.dump(2);
}

}  // namespace whale
