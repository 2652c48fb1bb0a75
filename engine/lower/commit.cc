// The place of a step's commit: variables are written behind it, and the loss is known before it where that can be.
#include <algorithm>

#include "base/error.h"
#include "lower/storage.h"
#include "plan/lives.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

const work::Fetch* fetch_of(const Instruction& i, int32_t output) {
  const auto* fetch = i.as<work::Fetch>();
  return fetch != nullptr && fetch->output == output ? fetch : nullptr;
}

// Whose storage the loss is in; kNone: this device has none.
BufferId loss_of(const Program& p, int32_t output) {
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      if (fetch_of(i, output)) return storage_of(p, i.in[0]);
  return kNone;
}

bool makes(const Program& p, const Instruction& i, BufferId storage) {
  return std::any_of(i.out.begin(), i.out.end(), [&](BufferId b) { return b != kNone && storage_of(p, b) == storage; });
}

// Also where this device has no variable of those that a step changes.
bool trains(const Graph& graph) {
  return std::ranges::any_of(graph.variables, [](const Variable& v) { return v.next != kNone && v.next != v.tensor; });
}

Instruction instruction(Work work, const char* name, Queue queue, BufferIds in) {
  Instruction i;
  i.work = work;
  i.name = name;
  i.queue = queue;
  i.in = std::move(in);
  i.phase = Phase::kUpdate;
  return i;
}

}  // namespace

bool updates(const Draft& draft, const Graph& graph, size_t segment, size_t index) {
  const Instruction& i = draft.program.segments[segment].instructions[index];
  if (writes_variable(draft.program, i)) return true;
  const Op* op = draft.ops[segment][index];
  if (!op || i.in.size() != op->inputs.size()) return false;
  const std::vector<Alias> aliases = aliases_of(graph, *op);
  return std::ranges::any_of(aliases, [&](const Alias& a) {
    const auto x = static_cast<size_t>(a.input);
    return a.must && x < i.in.size() && i.in[x] != kNone &&
           draft.program.buffers[storage_of(draft.program, i.in[x])].kind == BufferKind::kVariable;
  });
}

void place_commit(Draft& draft, const Graph& graph, int32_t loss_output) {
  Program& p = draft.program;
  std::vector<Instruction>& last = p.segments.back().instructions;
  // The first instruction of a segment that writes; its size: there is none.
  const auto first_in = [&](size_t s) {
    size_t k = 0;
    while (k < p.segments[s].instructions.size() && !updates(draft, graph, s, k)) ++k;
    return k;
  };
  for (size_t s = 0; s + 1 < p.segments.size(); ++s)
    WHALE_CHECK(first_in(s) == p.segments[s].instructions.size(), "variables are written at the end of a step");
  const auto insert = [&](size_t at, Instruction i) {
    last.insert(last.begin() + static_cast<std::ptrdiff_t>(at), std::move(i));
    draft.ops.back().insert(draft.ops.back().begin() + static_cast<std::ptrdiff_t>(at), nullptr);
  };
  const size_t first = first_in(p.segments.size() - 1);
  if (first < last.size()) insert(first, instruction(work::Commit{}, "commit", Queue::kCompute, {}));
  const BufferId loss = loss_of(p, loss_output);
  if (loss == kNone || !trains(graph)) return;
  const auto made = std::find_if(last.rbegin(), last.rend(), [&](const Instruction& i) { return makes(p, i, loss); });
  const auto behind = static_cast<size_t>(last.rend() - made);
  const Queue queue = made == last.rend() ? Queue::kCompute : made->queue;
  WHALE_CHECK(behind <= first, "the loss is made before anything is written");
  insert(behind, instruction(work::Vote{}, "vote", queue, {loss}));
}

}  // namespace whale
