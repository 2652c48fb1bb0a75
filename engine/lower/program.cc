#include "lower/program.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "plan/groups.h"
#include "plan/lives.h"
#include "rewrite/copies.h"
#include "rewrite/offload.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

StepScalar step_scalar(const std::string& name) {
  if (name == "learning_rate") return StepScalar::kLearningRate;
  if (name == "updates") return StepScalar::kUpdates;
  if (name == "loss_scale") return StepScalar::kLossScale;
  throw internal("step scalar '{}' is unknown", name);
}

}  // namespace

Queue Lowering::queue_of_group(int32_t group) const { return queue_of(lg.tasks.meshes[0].axes[group].name); }

int32_t Lowering::mask_number(uint64_t mask) const {
  const auto at = std::find(masks.begin(), masks.end(), mask);
  WHALE_CHECK(at != masks.end(), "every way of cutting the batch is listed");
  return static_cast<int32_t>(at - masks.begin());
}

void Lowering::index() {
  const Graph& g = lg.graph;
  readers = readers_of(g);
  root = roots_of(g);
  ops_of_mesh.resize(lg.tasks.meshes.size());
  early_input.resize(g.tensors.size());
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    const auto mesh = [&](int32_t stage) { return static_cast<size_t>(lg.tasks.mesh_of_stage[stage]); };
    ops_of_mesh[mesh(op.stage)].push_back(static_cast<OpId>(i));
    if (op.code == OpCode::k_transfer && mesh(lg.stage(op.inputs[0])) != mesh(op.stage))
      ops_of_mesh[mesh(lg.stage(op.inputs[0]))].push_back(static_cast<OpId>(i));
    for (const TensorId id : op.inputs)
      if (id != kNone && op.region != Region::kEpilogue) early_input[root_of(id)] = 1;
  }
  kept.resize(g.tensors.size());
  for (const NamedTensor& f : lg.fetches) {
    kept[f.tensor] = 1;
    // What is there from the start leaves before anything changes it.
    const TensorId whole = root_of(f.tensor);
    if (g.tensor(whole).kind == TensorKind::kInput) early_input[whole] = 1;
  }
  for (const Variable& v : g.variables)
    if (v.next != kNone) kept[v.next] = 1;
  for (size_t i = 0; i < g.inputs.size(); ++i) input_number[g.inputs[i]] = static_cast<int32_t>(i);
  for (const auto& [form, input] : lg.input_forms) input_number[form] = input_number.at(input);
  for (const Variable& v : g.variables) {
    const auto it = options.variables.find(g.tensor(v.tensor).name);
    WHALE_CHECK(it != options.variables.end(), "every variable of an entry is one of the plan");
    variable_number[v.tensor] = it->second;
  }
  find_of_one_segment();
}

void Lowering::find_of_one_segment() {
  const Graph& g = lg.graph;
  of_one_segment.assign(g.tensors.size(), 0);
  if (!timed()) return;
  const auto kind = [&](const Op& op) { return schedule ? work_of(op) : WorkKind::kForward; };
  const auto beside = [&](const Op& a, const Op& b) {
    return b.region == Region::kBody && a.stage == b.stage && kind(a) == kind(b) && b.code != OpCode::k_accumulate;
  };
  for (const Op& op : g.ops) {
    if (op.region != Region::kBody || op.code == OpCode::k_accumulate) continue;
    for (const TensorId id : op.outputs)
      if (id != kNone && !lg.time_varies(id) && !kept[id])
        of_one_segment[id] = std::ranges::all_of(readers[id], [&](OpId r) { return beside(op, g.op(r)); });
  }
  // What is seen through a view lives as long as the view.
  for (size_t t = 0; t < g.tensors.size(); ++t)
    if (!of_one_segment[t]) of_one_segment[root[t]] = 0;
}

WorkKind Lowering::work_of(const Op& op) const {
  const auto number = static_cast<size_t>(&op - lg.graph.ops.data());
  return whale::work_of(op, weight_op[number] && schedule->split_backward);
}

SegmentKey Lowering::maker_of(const Op& tree) const {
  if (!schedule) return {};
  const OpId maker = lg.graph.tensor(root_of(tree.inputs[0])).producer;
  return {tree.stage, maker == kNone ? WorkKind::kForward : work_of(lg.graph.op(maker)), -1};
}

std::vector<const Op*> Lowering::trees(int32_t mesh, const SegmentKey& maker) const {
  std::vector<const Op*> out;
  for (const OpId i : ops_of_mesh[mesh])
    if (const Op& op = lg.graph.op(i); is_tree(op) && maker_of(op) == maker) out.push_back(&op);
  return out;
}

bool Site::has(const Op& op, int32_t stage) const {
  if (!here(stage)) return false;
  if (!low.timed()) return true;
  if (op.region != region) return false;
  return region != Region::kBody || key.stage < 0 || (stage == key.stage && low.work_of(op) == key.kind);
}

BufferId Draft::add(Buffer b) {
  program.buffers.push_back(std::move(b));
  return static_cast<BufferId>(program.buffers.size()) - 1;
}

void Draft::add(Instruction instruction, const Op* op) {
  program.segments.back().instructions.push_back(std::move(instruction));
  ops.back().push_back(op);
}

int64_t begin_of_view(const Lowering& low, const Place& place, TensorId id) {
  const Graph& g = low.lg.graph;
  int64_t begin = 0;
  for (; g.tensor(id).producer != kNone && is_view(g.op(g.tensor(id).producer).code);) {
    const Op& op = g.op(g.tensor(id).producer);
    if (op.code == OpCode::k_part_view) {
      const Interval part = low.local.sliced_part(op, place);
      const int64_t bytes = low.local.elements(id, place) * size_of(g.tensor(id).dtype);
      begin += part.size() == 0 ? 0 : bytes / part.size() * part.begin;
    }
    id = op.inputs[0];
  }
  return begin;
}

BufferId buffer_of(Draft& draft, const Site& at, TensorId id) {
  const ShardedGraph& lg = at.lg();
  const bool varies = at.low.timed() && (lg.time_varies(id) || at.low.of_one_segment[id]);
  const int32_t variant = varies ? at.key.variant : -1;
  if (const BufferId known = draft.buffers.of(id, variant); known != kNone) return known;
  const Tensor& t = lg.graph.tensor(id);
  Buffer b;
  b.name = t.name;
  b.dtype = t.dtype;
  b.dims = at.dims(id);
  b.bytes = element_count(b.dims) * size_of(b.dtype);
  if (t.kind == TensorKind::kInput) b.kind = BufferKind::kInput, b.ref = at.low.input_number.at(id);
  if (t.kind == TensorKind::kVariable) b.kind = BufferKind::kVariable, b.ref = at.low.variable_number.at(id);
  if (in_host(lg, id)) b.memory = Memory::kHost;
  if (t.kind == TensorKind::kStep) b.kind = BufferKind::kStep, b.ref = static_cast<int32_t>(step_scalar(t.name));
  if (t.kind == TensorKind::kValue && t.producer != kNone && is_view(lg.graph.op(t.producer).code)) {
    b.alias = buffer_of(draft, at, at.low.root_of(id));
    b.at = begin_of_view(at.low, at.place, id);
    const Buffer& whole = draft.buffer(b.alias);
    b.kind = whole.kind;
    b.ref = whole.ref;
    b.memory = whole.memory;
  }
  const BufferId in = b.alias, made = draft.add(std::move(b));
  if (in != kNone) draft.lies_in[made] = in;
  draft.buffers.set(id, variant, made);
  return made;
}

namespace {

// Inputs that differ per micro-batch are fed where they are read; others once, in the first segment that reads them.
void feed_for(Draft& draft, const Site& at, TensorId id) {
  const TensorId input = at.low.root_of(id);
  if (at.graph().tensor(input).kind != TensorKind::kInput) return;
  const bool whole = at.low.timed() && !at.lg().time_varies(input);
  const Region first = at.low.early_input[input] ? Region::kPrologue : Region::kEpilogue;
  if ((whole && at.region != first) || !draft.fed.insert(input).second || at.empty(input)) return;
  Instruction feed;
  feed.name = "feed." + at.graph().tensor(input).name;
  feed.out = {buffer_of(draft, at, input)};
  feed.work = work::Feed{.input = at.low.input_number.at(input),
                         .samples = at.low.mask_number(at.low.local.sample_mask(input)),
                         .whole_batch = whole};
  feed.bytes = static_cast<double>(draft.buffer(feed.out[0]).bytes);
  draft.add(std::move(feed), nullptr);
}

void fetch(Draft& draft, const Site& at, size_t output) {
  const auto& fetches = at.lg().fetches;
  const NamedTensor& f = fetches[output];
  if (!at.here(at.lg().stage(f.tensor)) || at.empty(f.tensor)) return;
  feed_for(draft, at, f.tensor);
  Instruction fetch;
  work::Fetch to{.samples = at.low.mask_number(at.low.local.sample_mask(f.tensor))};
  fetch.name = "fetch." + f.name;
  fetch.in = {buffer_of(draft, at, f.tensor)};
  for (size_t k = output + 1; k-- > 0;)  // several tensors of one name are one output
    if (fetches[k].name == f.name) to.output = static_cast<int32_t>(k);
  fetch.work = to;
  fetch.bytes = static_cast<double>(draft.buffer(fetch.in[0]).bytes);
  draft.add(std::move(fetch), nullptr);
}

// What is there from the start, before anything changes it; and what the body reads whole must be there.
void begin(Draft& draft, const Site& at) {
  const ShardedGraph& lg = at.lg();
  const bool timed = at.low.timed();
  for (size_t f = 0; f < lg.fetches.size(); ++f) {
    const TensorId root = at.low.root_of(lg.fetches[f].tensor);
    if (lg.graph.tensor(root).kind == TensorKind::kValue || !at.here(lg.stage(root))) continue;
    const bool here = lg.time_varies(root) ? at.region == Region::kBody && at.key.kind == WorkKind::kForward &&
                                                 (at.key.stage < 0 || at.key.stage == lg.stage(root))
                                           : at.region == Region::kPrologue;
    if (!timed || here) fetch(draft, at, f);
  }
  if (!timed || at.region != Region::kPrologue) return;
  for (size_t t = 0; t < lg.graph.tensors.size(); ++t)
    if (const auto id = static_cast<TensorId>(t); lg.graph.tensors[t].kind == TensorKind::kInput &&
                                                  at.low.early_input[t] && !lg.time_varies(id) && at.here(lg.stage(id)))
      feed_for(draft, at, id);
}

// Values leave as soon as they are made; those that come from other devices leave at the end, when nothing waits behind
// them. So does the loss, which is looked at before the first update and when the step has ended: its place is its own.
void fetch_made_by(Draft& draft, const Site& at, const Op& op, bool at_end) {
  const ShardedGraph& lg = at.lg();
  for (size_t f = 0; f < lg.fetches.size(); ++f) {
    const TensorId root = at.low.root_of(lg.fetches[f].tensor);
    if (lg.graph.tensor(root).kind != TensorKind::kValue ||
        std::find(op.outputs.begin(), op.outputs.end(), root) == op.outputs.end())
      continue;
    const bool soon =
        at.low.timed() ? lg.time_varies(root) : !has_flag(op.code, kCollective) && lg.fetches[f].name != "loss";
    if (soon != at_end) fetch(draft, at, f);
  }
}

// A replica without micro-batches adds nothing: its sums are the zeros that they start from, where these wait.
void begin_sums(Draft& draft, const Site& at) {
  const auto is = [&](TensorId sum, TensorId zero) {
    const BufferId from = draft.buffers.of(zero, -1);
    // Without them the body would bring them from the host's memory, and the sum back there.
    if (from == kNone) return;
    const BufferId to = buffer_of(draft, at, sum);
    draft.buffer(to).alias = draft.lies_in[to] = from;
  };
  for (const Op& op : at.graph().ops) {
    if (!at.here(op.stage)) continue;
    if (op.code == OpCode::k_accumulate && !at.low.is_tree(op)) is(op.outputs[0], op.inputs[0]);
    if (op.code == OpCode::k_to_host && op.region == Region::kBody && attr_bool(op.attrs, "into"))  // where sums wait
      for (size_t k = 0; k < op.outputs.size(); ++k) is(op.outputs[k], op.inputs[op.outputs.size() + k]);
  }
}

// An item of the schedule takes its messages before it works and gives its own away after: what the verification of
// schedules assumes. What the item goes on to change in place (parts of a sum) is given away before that.
void messages_at_the_ends(Draft& draft, const Site& at) {
  std::vector<Instruction>& list = draft.program.segments.back().instructions;
  std::vector<const Op*>& ops = draft.ops.back();
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto changed_after = [&](size_t send) {
    for (size_t k = send + 1; k < list.size(); ++k) {
      if (!ops[k]) continue;
      for (const Alias& a : aliases_of(at.graph(), *ops[k]))
        if (a.must && static_cast<size_t>(a.input) < list[k].in.size() && list[k].in[a.input] != kNone &&
            storage_of(draft.program, list[k].in[a.input]) == storage_of(draft.program, list[send].in[0]))
          return true;
    }
    return false;
  };
  const auto when = [&](size_t i) {
    const bool sends = list[i].kind() == InstructionKind::kSend;
    if (list[i].link() == kNone || at.low.inside.contains(list[i].link()) || (sends && changed_after(i))) return 1;
    return sends ? 2 : 0;
  };
  std::vector<int> at_end(list.size());
  for (size_t i = 0; i < list.size(); ++i) at_end[i] = when(i);
  std::ranges::stable_sort(order, {}, [&](size_t i) { return at_end[i]; });
  std::vector<Instruction> sorted;
  std::vector<const Op*> sorted_ops;
  for (const size_t i : order) sorted.push_back(std::move(list[i])), sorted_ops.push_back(ops[i]);
  list = std::move(sorted);
  ops = std::move(sorted_ops);
}

// Whoever makes what is fetched, in order.
std::vector<OpId> makers_of_fetches(const Lowering& low) {
  std::vector<OpId> out;
  for (const NamedTensor& f : low.lg.fetches) out.push_back(low.lg.graph.tensor(low.root_of(f.tensor)).producer);
  std::ranges::sort(out);
  return out;
}

void write_segment(Draft& draft, const Site& at, const ProgramOrder& order) {
  const std::vector<OpId> makers = makers_of_fetches(at.low);
  const auto makes_fetches = [&](OpId id) { return std::ranges::binary_search(makers, id); };
  begin(draft, at);
  const bool last = at.region == Region::kEpilogue;
  if (last) finish_sums(draft, at, order.trees);
  if (last && at.low.local.micro_batches(at.place).size() == 0) begin_sums(draft, at);
  for (const OpId id : at.ops()) {
    const Op& op = at.graph().op(id);
    const bool runs = at.runs(op), sends = at.sends(op);
    if (sends) feed_for(draft, at, op.inputs[0]);
    if (sends || (runs && op.code == OpCode::k_transfer)) emit_transfer(draft, at, op);
    if (!runs) continue;
    if (op.code != OpCode::k_transfer) {
      for (const TensorId operand : op.inputs)
        if (operand != kNone) feed_for(draft, at, operand);
      if (!is_view(op.code) && !at.low.is_tree(op) && !stores_sum(at.low, op)) emit(draft, at, op);
    }
    if (makes_fetches(id)) fetch_made_by(draft, at, op, false);
  }
  for (const OpId id : at.ops()) {
    const Op& op = at.graph().op(id);
    if (!makes_fetches(id) || !at.here(op.stage)) continue;
    // A sum over micro-batches is made in the body and finished after it; what the prologue made waits there too.
    bool here = at.runs(op);
    if (at.low.timed() && !op.outputs.empty() && !at.lg().time_varies(op.outputs[0])) here = last;
    if (here) fetch_made_by(draft, at, op, true);
  }
  if (at.region == Region::kBody && at.key.stage >= 0) messages_at_the_ends(draft, at);
}

// Values that one segment of the body hands to another have a version for every micro-batch of their virtual stage that
// is alive; those that another virtual stage of the device reads, of all of its stages.
void assign_versions(Draft& draft, const Graph& graph, const ProgramOrder& order) {
  Program& p = draft.program;
  std::vector<int32_t> seen(p.buffers.size(), -1);
  std::vector<char> crosses(p.buffers.size());
  std::vector<int32_t> versions(p.buffers.size(), 1);
  const auto root = [&](BufferId b) { return static_cast<size_t>(storage_of(p, b)); };
  for (size_t s = 0; s < p.segments.size(); ++s) {
    if (order.segments[s].region != Region::kBody) continue;
    const int32_t base = order.segments[s].adds == kNone ? static_cast<int32_t>(s) : order.segments[s].adds;
    for (const Instruction& i : p.segments[s].instructions)
      for (const auto* list : {&i.in, &i.out})
        for (const BufferId b : *list) {
          if (b == kNone) continue;
          int32_t& first = seen[root(b)];
          if (first >= 0 && first != base) crosses[root(b)] = 1;
          if (first >= 0 && order.segments[first].key.stage != order.segments[base].key.stage)
            versions[root(b)] = std::max(versions[root(b)], static_cast<int32_t>(order.of_all_stages));
          first = base;
          if (const auto n = order.versions.find(base); n != order.versions.end())
            versions[root(b)] = std::max(versions[root(b)], static_cast<int32_t>(n->second));
        }
  }
  std::vector<char> varies(p.buffers.size());
  draft.buffers.each([&](TensorId id, int32_t variant, BufferId b) {
    if (variant >= 0 && graph.tensor(id).kind == TensorKind::kValue) varies[root(b)] = 1;
  });
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (crosses[b] && varies[b] && p.buffers[b].kind == BufferKind::kArena) p.buffers[b].versions = versions[b];
  for (Buffer& b : p.buffers)
    if (b.alias != kNone) b.versions = p.buffers[root(b.alias)].versions;
}

}  // namespace

void number_versions(Program& p) {
  const std::vector<int32_t> periods = periods_of(p);
  for (ScheduleRow& row : p.schedule)
    if (const int32_t period = periods[row.segment]; period > 1) row.version %= period;
}

Draft draft_program(const Lowering& low, const Place& place) {
  const ProgramOrder order = order_of(low, place);
  Draft draft(low.lg.graph.tensors.size());
  draft.program.schedule = order.rows;
  Site at{.low = low, .place = place, .key = {}};
  for (size_t s = 0; s < order.segments.size(); ++s) {
    const SegmentPlan& segment = order.segments[s];
    at.region = segment.region;
    at.key = segment.key;
    at.place.micro_batch = std::max(segment.key.variant, 0);
    draft.program.segments.push_back({segment.name, {}});
    draft.ops.emplace_back();
    draft.regions.push_back(segment.region);
    draft.micro_batches.push_back(at.place.micro_batch);
    draft.fed.clear();
    if (segment.adds == kNone)
      write_segment(draft, at, order);
    else
      add_to_sums(draft, at, segment.steps);
    for (const auto& [maker, tree] : order.trees)
      if (tree.behind == s) place_sums(draft, at, maker, tree.plan.places);
  }
  if (!order.versions.empty()) assign_versions(draft, low.lg.graph, order);
  for (const Variable& v : low.lg.graph.variables)
    if (v.next != kNone && v.next != v.tensor && at.here(low.lg.stage(v.tensor)))
      draft.next.emplace_back(buffer_of(draft, at, v.tensor), buffer_of(draft, at, v.next));
  return draft;
}

}  // namespace whale
