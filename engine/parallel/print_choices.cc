// The text of choices: `whale plan --choices`, and the dump of the pass.
#include <algorithm>

#include "base/format.h"
#include "parallel/choose.h"
#include "parallel/layout_graph.h"

namespace whale {
namespace {

// "split by n", of the axes along which the op is cut; a part of a factor with what is outside and inside of it.
std::string cuts_text(const Graph& graph, const Axes& axes, const Choices& choices, size_t op) {
  const Factors factors = factors_of(graph, graph.ops[op]);
  std::string text;
  for (size_t a = 0; a < axes.count(); ++a) {
    const OpCut& cut = choices.cuts[a][op];
    if (!cut.present()) continue;
    const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
    text += fmt::format("{}{} by {}", text.empty() ? "" : ", ", axes.name(a), f.name);
    if (!(cut.sub == SubDigit{})) text += fmt::format(":{}x{}", cut.sub.outer, cut.sub.inner);
  }
  return text.empty() ? "whole" : text;
}

}  // namespace

std::string print(const Graph& graph, const TaskGraphs& tasks, const Choices& choices) {
  const Axes axes{&tasks, choices.micro_batches};
  std::string out = "cuts along ";
  for (size_t a = 0; a < axes.count(); ++a) out += fmt::format("{}{}", a ? ", " : "", axes.name(a));
  out += fmt::format(" ({})\n", tasks.strategy);
  const auto line = [&](TensorId id) {
    const Tensor& t = graph.tensor(id);
    return fmt::format("{} {}{} {}", t.name, name_of(t.dtype), to_string(t.dims),
                       to_string(choices.layouts[static_cast<size_t>(id)]));
  };
  for (const Variable& v : graph.variables) out += fmt::format("  variable {}\n", line(v.tensor));
  for (const TensorId id : graph.inputs) out += fmt::format("  input {}\n", line(id));
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    out += fmt::format("  {} {}: {}\n", def(op.code).name, op.name, cuts_text(graph, axes, choices, i));
    for (const TensorId id : op.outputs) {
      if (id == kNone) continue;
      out += fmt::format("    {}", line(id));
      if (const auto to = choices.settled.find(id); to != choices.settled.end())
        out += fmt::format(", then {}", to_string(to->second));
      out += '\n';
    }
  }
  return out;
}

}  // namespace whale
