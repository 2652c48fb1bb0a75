#include "plan/program_builder.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <numeric>

#include "base/error.h"
#include "parallel/copies.h"
#include "parallel/offload.h"
#include "parallel/order.h"
#include "plan/accumulation.h"
#include "schedule/verify.h"

namespace whale {
namespace {

StepScalar step_scalar(const std::string& name) {
  if (name == "learning_rate") return StepScalar::kLearningRate;
  if (name == "updates") return StepScalar::kUpdates;
  if (name == "loss_scale") return StepScalar::kLossScale;
  throw internal("step scalar '{}' is unknown", name);
}

double identity_of(Combine combine) {
  if (combine == Combine::kMax || combine == Combine::kLogSumExp) return -std::numeric_limits<double>::infinity();
  if (combine == Combine::kMin) return std::numeric_limits<double>::infinity();
  return 0;
}

}  // namespace

int32_t Lowering::mask_number(uint64_t mask) const {
  const auto at = std::find(masks.begin(), masks.end(), mask);
  WHALE_CHECK(at != masks.end(), "every way of cutting the batch is listed");
  return static_cast<int32_t>(at - masks.begin());
}

ProgramBuilder::ProgramBuilder(const Lowering& lowering, Place place)
    : low_(lowering), lg_(lowering.lg), g_(lowering.lg.graph), place_(std::move(place)), timed_(lg_.micro_batches > 1) {
  for (size_t i = 0; i < g_.inputs.size(); ++i) input_number_[g_.inputs[i]] = static_cast<int32_t>(i);
  for (const auto& [form, input] : lg_.input_forms) input_number_[form] = input_number_.at(input);
  for (const Variable& v : g_.variables) {
    const auto it = low_.options.variables.find(g_.tensor(v.tensor).name);
    WHALE_CHECK(it != low_.options.variables.end(), "every variable of an entry is one of the plan");
    variable_number_[v.tensor] = it->second;
  }
  early_input_.resize(g_.tensors.size());
  for (const Op& op : g_.ops)
    for (const TensorId id : op.inputs)
      if (id != kNone && op.region != Region::kEpilogue) early_input_[static_cast<size_t>(view_root(g_, id))] = 1;
}

bool ProgramBuilder::on_this_mesh(int32_t stage) const {
  return lg_.tasks.mesh_of_stage[static_cast<size_t>(stage)] == place_.mesh;
}

// ---- segments and the order in which they run -------------------------------------------------------------------
Draft ProgramBuilder::build() {
  if (low_.schedule)
    schedule_pipeline();
  else
    schedule_accumulation();
  for (const Variable& v : g_.variables)
    if (v.next != kNone && v.next != v.tensor && on_this_mesh(lg_.stage(v.tensor)))
      draft_.next.emplace_back(buffer(v.tensor), buffer(v.next));
  return std::move(draft_);
}

void ProgramBuilder::schedule_accumulation() {
  std::map<int32_t, int32_t> segment_of;  // by the first micro-batch of a size
  const std::vector<SegmentRun> rows = accumulation_schedule(lg_.micro_batches);
  const Interval mine = low_.local.micro_batches(place_);
  if (timed_) build_segment(Region::kPrologue, {}, "prologue");
  if (timed_) {
    std::vector<int64_t> order(static_cast<size_t>(mine.size()));
    std::iota(order.begin(), order.end(), mine.begin);
    plan_trees({}, order);
  }
  std::vector<ScheduleRow> body;
  for (const SegmentRun& row : rows) {
    if (row.region != Region::kBody || row.micro_batch < mine.begin || row.micro_batch >= mine.end) continue;
    const auto u = static_cast<int32_t>(row.micro_batch);
    const int32_t first = low_.size_class[static_cast<size_t>(u)];
    const auto [at, fresh] = segment_of.try_emplace(first, 0);
    if (fresh) {
      place_.micro_batch = first;
      const std::string name = !timed_                  ? "step"
                               : segment_of.size() == 1 ? "body"
                                                        : fmt::format("body/{}", low_.local.samples(1, place_).size());
      at->second = build_segment(Region::kBody, {-1, {}, first}, name);
    }
    body.push_back({.segment = at->second, .micro_batch = u});
    if (timed_) merge_row({-1, {}, first}, at->second, body.back());
    if (merged_) body.push_back(*merged_);
  }
  auto& schedule = draft_.program.schedule;
  if (timed_) schedule.push_back({.segment = 0, .whole = true});
  schedule.insert(schedule.end(), body.begin(), body.end());
  if (timed_) schedule.push_back({.segment = build_segment(Region::kEpilogue, {}, "epilogue"), .whole = true});
}

void ProgramBuilder::schedule_pipeline() {
  const Interval mine = low_.local.micro_batches(place_);
  const PipelineSchedule& pipeline = low_.schedules.at(mine.size());
  constexpr const char* kNames[] = {"forward", "backward", "weight"};
  build_segment(Region::kPrologue, {}, "prologue");
  std::map<SegmentKey, int32_t> segments;
  std::vector<ScheduleRow> body;
  // In the order of the model, so that a value's buffer is known before it is read.
  const auto& order = pipeline.devices[static_cast<size_t>(place_.mesh)];
  for (size_t kind = 0; kind < 3; ++kind)
    for (int32_t stage = 0; stage < static_cast<int32_t>(lg_.tasks.stages()); ++stage) {
      if (!on_this_mesh(stage)) continue;
      for (int64_t u = mine.begin; u < mine.end; ++u) {
        const int32_t first = low_.size_class[static_cast<size_t>(u)];
        const SegmentKey key{stage, static_cast<WorkKind>(kind), first};
        if (segments.contains(key) || (kind == 2 && !pipeline.split_backward)) continue;
        place_.micro_batch = first;
        std::string name = fmt::format("{}.{}", kNames[kind], stage);
        if (first != low_.size_class[0]) name += fmt::format("/{}", low_.local.samples(1, place_).size());
        segments[key] = build_segment(Region::kBody, key, name);
      }
      std::vector<int64_t> done;
      for (const WorkItem& item : order)
        if (item.kind == static_cast<WorkKind>(kind) && virtual_stage(pipeline, place_.mesh, item.chunk) == stage)
          done.push_back(mine.begin + item.micro_batch);
      plan_trees({stage, static_cast<WorkKind>(kind), -1}, done);
    }
  // How many micro-batches are alive at once: slots go round. Values that pass from one chunk of this device to another
  // live until the last chunk is done with the micro-batch.
  bool between_chunks = false;
  for (const Op& op : g_.ops)
    for (const TensorId id : op.inputs)
      between_chunks |= id != kNone && op.code != OpCode::k_transfer && on_this_mesh(op.stage) &&
                        lg_.stage(id) != op.stage && lg_.time_varies(id) && g_.tensor(id).kind == TensorKind::kValue;
  const auto chunk_of = [&](const WorkItem& item) { return between_chunks ? 0 : item.chunk; };
  int64_t slots = 1;
  std::map<std::pair<int, int>, int> left;  // (chunk, u) -> items to come
  for (const WorkItem& item : order) ++left[{chunk_of(item), item.micro_batch}];
  std::map<std::pair<int, int>, int> alive = {};
  std::vector<int> started;
  for (const WorkItem& item : order) {
    const std::pair<int, int> at{chunk_of(item), item.micro_batch};
    alive[at] = 1;
    int lowest = item.micro_batch, highest = item.micro_batch;
    for (const auto& [key, live] : alive)
      if (live) lowest = std::min(lowest, key.second), highest = std::max(highest, key.second);
    slots = std::max<int64_t>(slots, highest - lowest + 1);
    if (--left[at] == 0) alive.erase(at);
  }
  for (const WorkItem& item : order) {
    const auto u = static_cast<int32_t>(mine.begin) + item.micro_batch;
    const SegmentKey key{virtual_stage(pipeline, place_.mesh, item.chunk), item.kind,
                         low_.size_class[static_cast<size_t>(u)]};
    body.push_back(
        {.segment = segments.at(key), .micro_batch = u, .slot = static_cast<int32_t>(item.micro_batch % slots)});
    merge_row(key, body.back().segment, body.back());
    if (merged_) body.push_back(*merged_);
  }
  auto& schedule = draft_.program.schedule;
  schedule.push_back({.segment = 0, .whole = true});
  schedule.insert(schedule.end(), body.begin(), body.end());
  schedule.push_back({.segment = build_segment(Region::kEpilogue, {}, "epilogue"), .whole = true});
  assign_slots(slots);
}

// Values that one segment of the body hands to another have a slot for every micro-batch that is alive.
void ProgramBuilder::assign_slots(int64_t slots) {
  Program& p = draft_.program;
  std::vector<int32_t> seen(p.buffers.size(), -1);
  std::vector<char> crosses(p.buffers.size());
  const auto root = [&](BufferId b) {
    while (p.buffers[static_cast<size_t>(b)].alias != kNone) b = p.buffers[static_cast<size_t>(b)].alias;
    return static_cast<size_t>(b);
  };
  for (size_t s = 0; s < p.segments.size(); ++s) {
    if (draft_.regions[s] != Region::kBody) continue;
    const auto follows = follows_.find(static_cast<int32_t>(s));
    const int32_t base = follows == follows_.end() ? static_cast<int32_t>(s) : follows->second;
    for (const Instruction& i : p.segments[s].instructions)
      for (const auto* list : {&i.in, &i.out})
        for (const BufferId b : *list) {
          if (b == kNone) continue;
          int32_t& first = seen[root(b)];
          if (first >= 0 && first != base) crosses[root(b)] = 1;
          first = base;
        }
  }
  std::vector<char> varies(p.buffers.size());
  for (const auto& [key, b] : buffers_)
    if (key.second >= 0 && g_.tensor(key.first).kind == TensorKind::kValue) varies[root(b)] = 1;
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (crosses[b] && varies[b] && p.buffers[b].kind == BufferKind::kArena)
      p.buffers[b].slots = static_cast<int32_t>(slots);
  for (Buffer& b : p.buffers)
    if (b.alias != kNone) b.slots = p.buffers[root(b.alias)].slots;
}

bool ProgramBuilder::empty(TensorId id) const {
  const Dims d = dims(id);
  return std::find(d.begin(), d.end(), 0) != d.end();
}

// Bytes behind the start of what the view shows.
int64_t ProgramBuilder::begin_of_view(TensorId id) const {
  int64_t at = 0;
  for (; g_.tensor(id).producer != kNone && is_view(g_.op(g_.tensor(id).producer).code);) {
    const Op& op = g_.op(g_.tensor(id).producer);
    if (op.code == OpCode::k_part_view) {
      const Attrs attrs = low_.local.attrs(op, place_);
      const int64_t parts = attr_int(attrs, "end") - attr_int(attrs, "begin");
      const int64_t bytes = element_count(dims(id)) * size_of(g_.tensor(id).dtype);
      at += parts == 0 ? 0 : bytes / parts * attr_int(attrs, "begin");
    }
    id = op.inputs[0];
  }
  return at;
}

// The buffer of a tensor; tensors that differ from micro-batch to micro-batch have one per size of micro-batch.
BufferId ProgramBuilder::buffer(TensorId id) {
  const bool varies = timed_ && lg_.time_varies(id);
  const std::pair<TensorId, int32_t> key{id, varies ? key_.variant : -1};
  if (const auto it = buffers_.find(key); it != buffers_.end()) return it->second;
  const Tensor& t = g_.tensor(id);
  Buffer b;
  b.name = t.name;
  b.dtype = t.dtype;
  b.dims = dims(id);
  b.bytes = element_count(b.dims) * size_of(b.dtype);
  if (t.kind == TensorKind::kInput) b.kind = BufferKind::kInput, b.ref = input_number_.at(id);
  if (t.kind == TensorKind::kVariable) b.kind = BufferKind::kVariable, b.ref = variable_number_.at(id);
  if (in_host(lg_, id)) b.memory = Memory::kHost;
  if (t.kind == TensorKind::kStep) b.kind = BufferKind::kStep, b.ref = static_cast<int32_t>(step_scalar(t.name));
  if (t.kind == TensorKind::kValue && t.producer != kNone && is_view(g_.op(t.producer).code)) {
    b.alias = buffer(view_root(g_, id));
    b.at = begin_of_view(id);
    b.kind = draft_.program.buffers[static_cast<size_t>(b.alias)].kind;
    b.ref = draft_.program.buffers[static_cast<size_t>(b.alias)].ref;
    b.memory = draft_.program.buffers[static_cast<size_t>(b.alias)].memory;
  }
  const auto number = static_cast<BufferId>(draft_.program.buffers.size());
  draft_.program.buffers.push_back(std::move(b));
  return buffers_[key] = number;
}

Instruction& ProgramBuilder::add(Instruction instruction, const Op* op) {
  draft_.program.segments.back().instructions.push_back(std::move(instruction));
  draft_.ops.back().push_back(op);
  return draft_.program.segments.back().instructions.back();
}

WorkKind ProgramBuilder::work_of(const Op& op) const {
  const auto number = static_cast<size_t>(&op - g_.ops.data());
  return whale::work_of(op, low_.weight_op[number] && low_.schedule->split_backward);
}

bool ProgramBuilder::in_segment(const Op& op) const {
  if (!on_this_mesh(op.stage)) return false;
  if (!timed_) return true;
  if (op.region != region_) return false;
  return region_ != Region::kBody || key_.stage < 0 || (op.stage == key_.stage && work_of(op) == key_.kind);
}

// The sending half of a transfer stands with what makes its operand.
bool ProgramBuilder::sends_here(const Op& op) const {
  if (op.code != OpCode::k_transfer) return false;
  const int32_t from = lg_.stage(op.inputs[0]);
  if (!on_this_mesh(from)) return false;
  if (!timed_) return true;
  if (op.region != region_) return false;
  return region_ != Region::kBody || key_.stage < 0 || (from == key_.stage && work_of(op) == key_.kind);
}

// Inputs that differ per micro-batch are fed where they are read; others once, in the first segment that reads them.
bool ProgramBuilder::fed_here(TensorId input) const {
  if (!timed_ || lg_.time_varies(input)) return true;
  return early_input_[static_cast<size_t>(input)] ? region_ == Region::kPrologue : region_ == Region::kEpilogue;
}

void ProgramBuilder::feed_for(TensorId id) {
  const TensorId input = view_root(g_, id);
  if (g_.tensor(input).kind != TensorKind::kInput || !fed_here(input) || fed_[input]) return;
  fed_[input] = true;
  if (empty(input)) return;
  Instruction feed;
  feed.kind = InstructionKind::kFeed;
  feed.name = "feed." + g_.tensor(input).name;
  feed.out = {buffer(input)};
  feed.ref = input_number_.at(input);
  feed.samples = low_.mask_number(low_.local.sample_mask(input));
  feed.whole_batch = timed_ && !lg_.time_varies(input);
  feed.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(feed.out[0])].bytes);
  add(std::move(feed), nullptr);
}

void ProgramBuilder::fetch(size_t output) {
  const NamedTensor& f = lg_.fetches[output];
  if (!on_this_mesh(lg_.stage(f.tensor)) || empty(f.tensor)) return;
  feed_for(f.tensor);
  Instruction fetch;
  fetch.kind = InstructionKind::kFetch;
  fetch.name = "fetch." + f.name;
  fetch.in = {buffer(f.tensor)};
  for (size_t k = output + 1; k-- > 0;)  // several tensors of one name are one output
    if (lg_.fetches[k].name == f.name) fetch.ref = static_cast<int32_t>(k);
  fetch.samples = low_.mask_number(low_.local.sample_mask(f.tensor));
  fetch.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(fetch.in[0])].bytes);
  add(std::move(fetch), nullptr);
}

// Values leave as soon as they are made; those that come from other devices leave at the end, when nothing waits behind
// them. So does the loss, which is looked at before the first update and when the step has ended: its place is its own.
void ProgramBuilder::fetch_made_by(const Op& op, bool at_end) {
  for (size_t f = 0; f < lg_.fetches.size(); ++f) {
    const TensorId root = view_root(g_, lg_.fetches[f].tensor);
    if (g_.tensor(root).kind != TensorKind::kValue ||
        std::find(op.outputs.begin(), op.outputs.end(), root) == op.outputs.end())
      continue;
    const bool soon = timed_ ? lg_.time_varies(root) : !has_flag(op.code, kCollective) && lg_.fetches[f].name != "loss";
    if (soon != at_end) fetch(f);
  }
}

// A replica without micro-batches adds nothing: its sums are the zeros that they start from.
void ProgramBuilder::begin_sums() {
  for (const Op& op : g_.ops)
    if (op.code == OpCode::k_accumulate && !is_tree(op) && on_this_mesh(op.stage)) {
      const BufferId zero = buffer(op.inputs[0]), sum = buffer(op.outputs[0]);
      draft_.program.buffers[static_cast<size_t>(sum)].alias = zero;
    }
}

int32_t ProgramBuilder::build_segment(Region region, const SegmentKey& key, const std::string& name) {
  region_ = region;
  key_ = key;
  fed_.clear();
  draft_.program.segments.push_back({name, {}});
  draft_.ops.emplace_back();
  draft_.regions.push_back(region);
  for (size_t f = 0; f < lg_.fetches.size(); ++f) {  // of what is there from the start, before anything changes it
    const TensorId root = view_root(g_, lg_.fetches[f].tensor);
    if (g_.tensor(root).kind == TensorKind::kValue || !on_this_mesh(lg_.stage(root))) continue;
    const bool varies = timed_ && lg_.time_varies(root);
    const bool here = varies ? region == Region::kBody && key.kind == WorkKind::kForward &&
                                   (key.stage < 0 || key.stage == lg_.stage(root))
                             : region == Region::kPrologue;
    if (!timed_ || here) {
      if (timed_ && !varies) early_input_[static_cast<size_t>(root)] = 1;
      fetch(f);
    }
  }
  if (timed_ && region == Region::kPrologue)  // what the body reads whole must be there
    for (size_t t = 0; t < g_.tensors.size(); ++t)
      if (g_.tensors[t].kind == TensorKind::kInput && early_input_[t] && !lg_.time_varies(static_cast<TensorId>(t)) &&
          on_this_mesh(lg_.stages[t]))
        feed_for(static_cast<TensorId>(t));
  if (region == Region::kEpilogue) finish_trees();
  if (region == Region::kEpilogue && low_.local.micro_batches(place_).size() == 0) begin_sums();
  for (const Op& op : g_.ops) {
    if (sends_here(op)) feed_for(op.inputs[0]);
    if (sends_here(op) || (op.code == OpCode::k_transfer && in_segment(op))) emit_transfer(op);
    if (!in_segment(op)) continue;
    if (op.code != OpCode::k_transfer) {
      for (const TensorId id : op.inputs)
        if (id != kNone) feed_for(id);
      emit(op);
    }
    fetch_made_by(op, false);
  }
  for (const Op& op : g_.ops) {
    if (!on_this_mesh(op.stage)) continue;
    // A sum over micro-batches is made in the body and finished after it; what the prologue made waits there too.
    bool here = in_segment(op);
    if (timed_ && !op.outputs.empty() && !lg_.time_varies(op.outputs[0])) here = region == Region::kEpilogue;
    if (here) fetch_made_by(op, true);
  }
  if (region == Region::kBody && key.stage >= 0) messages_at_the_ends();
  return static_cast<int32_t>(draft_.program.segments.size()) - 1;
}

// An item of the schedule takes its messages before it works and gives its own away after: what the verification of
// schedules assumes. What the item goes on to change in place (parts of a sum) is given away before that.
void ProgramBuilder::messages_at_the_ends() {
  std::vector<Instruction>& list = draft_.program.segments.back().instructions;
  std::vector<const Op*>& ops = draft_.ops.back();
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto storage = [&](BufferId b) {
    const Buffer& buffer = draft_.program.buffers[static_cast<size_t>(b)];
    return buffer.alias == kNone ? b : buffer.alias;
  };
  const auto changed_after = [&](size_t send) {
    for (size_t k = send + 1; k < list.size(); ++k) {
      if (!ops[k]) continue;
      for (const Alias& a : aliases_of(view_of(g_, *ops[k])))
        if (a.must && static_cast<size_t>(a.input) < list[k].in.size() &&
            list[k].in[static_cast<size_t>(a.input)] != kNone &&
            storage(list[k].in[static_cast<size_t>(a.input)]) == storage(list[send].in[0]))
          return true;
    }
    return false;
  };
  const auto when = [&](size_t i) {
    const bool message = list[i].kind == InstructionKind::kReceive || list[i].kind == InstructionKind::kSend;
    if (message && low_.inside.contains(list[i].ref)) return 1;
    if (list[i].kind == InstructionKind::kSend && changed_after(i)) return 1;
    return list[i].kind == InstructionKind::kReceive ? 0 : list[i].kind == InstructionKind::kSend ? 2 : 1;
  };
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return when(a) < when(b); });
  std::vector<Instruction> sorted;
  std::vector<const Op*> sorted_ops;
  for (const size_t i : order) sorted.push_back(std::move(list[i])), sorted_ops.push_back(ops[i]);
  list = std::move(sorted);
  ops = std::move(sorted_ops);
}

// The neutral value in the place of a partial result of no samples.
void ProgramBuilder::emit_identity(const Op& op, size_t output) {
  const TensorId id = op.outputs[output];
  Combine combine = Combine::kSum;
  for (size_t a = 0; a < lg_.axes(); ++a)
    if (lg_.at(id, a).placement == Placement::kPartial) combine = lg_.at(id, a).combine;
  Instruction fill;
  fill.op = OpCode::k_fill;
  fill.name = op.name + ".none";
  fill.attrs = {
      {"shape", dims(id)}, {"value", identity_of(combine)}, {"dtype", std::string(name_of(g_.tensor(id).dtype))}};
  fill.out = {buffer(id)};
  fill.phase = op.phase;
  fill.scope = op.scope;
  fill.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(fill.out[0])].bytes);
  add(std::move(fill), nullptr);
}

void ProgramBuilder::emit_transfer(const Op& op) {
  const auto link = low_.link_of.find({&op, timed_ && op.region == Region::kBody ? key_.variant : 0});
  if (link == low_.link_of.end()) return;
  const auto half = [&](InstructionKind kind, TensorId id) {
    if (empty(id)) return;
    Instruction i;
    i.kind = kind;
    i.op = op.code;
    i.name = (kind == InstructionKind::kSend ? "send." : "receive.") + op.name;
    (kind == InstructionKind::kSend ? i.in : i.out) = {buffer(id)};
    i.ref = link->second;
    i.phase = op.phase;
    i.scope = op.scope;
    i.bytes = static_cast<double>(element_count(dims(id)) * size_of(g_.tensor(id).dtype));
    if (const auto inside = low_.inside.find(link->second); inside != low_.inside.end())
      i.bytes = static_cast<double>(inside->second * size_of(g_.tensor(id).dtype));
    add(std::move(i), nullptr);
  };
  if (sends_here(op)) half(InstructionKind::kSend, op.inputs[0]);
  if (in_segment(op)) half(InstructionKind::kReceive, op.outputs[0]);
}

// An operand of which this device has no part. Of a list (norms, grouped updates) other members may have one.
bool ProgramBuilder::reads_nothing(const Op& op) const {
  const auto& ports = def(op.code).inputs;
  const bool list = !ports.empty() && ports.back().kind == PortKind::kVariadic;
  const auto cut = [&](TensorId id) {
    for (size_t a = 0; a < lg_.axes(); ++a)
      if (lg_.at(id, a).placement == Placement::kShard) return true;
    return false;
  };
  bool some = false, all = true;
  for (size_t i = list ? ports.size() - 1 : 0; i < op.inputs.size(); ++i) {
    const TensorId id = op.inputs[i];
    const bool none = id != kNone && empty(id) && cut(id);
    some |= none, all &= none;
  }
  return list ? some && all : some;
}

// A collective of whose operands the whole group has nothing (a micro-batch without samples).
bool ProgramBuilder::nobody_has_any(const Op& op, const Instruction& i) const {
  if (op.code == OpCode::k_reduce_scatter)
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return empty(id); });
  if (op.code != OpCode::k_all_gather && op.code != OpCode::k_all_to_all) return false;
  const auto& digits = attr_ints(i.attrs, "digit");
  for (size_t k = 0; k < op.inputs.size(); ++k) {
    Dims whole = dims(op.inputs[k]);
    whole[static_cast<size_t>(digits[3 * k])] = digits[3 * k + 1] * digits[3 * k + 2];
    if (element_count(whole) > 0) return false;
  }
  return true;
}

void ProgramBuilder::emit(const Op& op) {
  if (is_view(op.code) || is_tree(op) || emitted_.contains(&op)) return;
  const bool collective = has_flag(op.code, kCollective), moves = has_flag(op.code, kMemoryCopy);
  bool none_out = true;
  for (const TensorId id : op.outputs) none_out &= id == kNone || empty(id);
  const bool none_in = reads_nothing(op);
  if (none_out && !collective) return;  // no samples, nothing to do
  // Merged updates go on with those of their parameters that this device has a part of.
  if (none_in && !collective && !has_flag(op.code, kUpdateOp) && !moves) {
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (op.outputs[o] != kNone && !empty(op.outputs[o])) emit_identity(op, o);
    return;
  }
  Instruction i;
  for (const TensorId id : op.inputs) i.in.push_back(id == kNone ? kNone : buffer(id));
  for (const TensorId id : op.outputs) i.out.push_back(buffer(id));
  i.kind = collective ? InstructionKind::kCollective : moves ? InstructionKind::kMove : InstructionKind::kKernel;
  if (low_.options.overlap) i.stream = collective ? Stream::kCommunication : moves ? Stream::kCopy : Stream::kCompute;
  i.op = op.code;
  i.name = op.name;
  i.attrs = low_.local.attrs(op, place_);
  if (collective && nobody_has_any(op, i)) return;
  i.box = low_.local.box(op, place_);
  if (const TensorId boxed = low_.local.box_tensor(op); boxed != kNone)
    i.samples = low_.mask_number(low_.local.sample_mask(boxed));
  i.key = op.key;
  if (collective) i.ref = static_cast<int32_t>(attr_int(op.attrs, "group"));
  i.phase = op.phase;
  i.scope = op.scope;
  const OpCost cost = low_.local.cost(op, i.attrs, place_);
  i.flops = cost.flops;
  i.bytes = cost.bytes;
  add(std::move(i), &op);
}

}  // namespace whale
