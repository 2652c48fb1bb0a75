#include "lower/program_builder.h"

#include <algorithm>

#include "base/error.h"
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

int32_t Lowering::mask_number(uint64_t mask) const {
  const auto at = std::find(masks.begin(), masks.end(), mask);
  WHALE_CHECK(at != masks.end(), "every way of cutting the batch is listed");
  return static_cast<int32_t>(at - masks.begin());
}

void Lowering::index() {
  const Graph& g = lg.graph;
  readers = readers_of(g);
  ops_of_mesh.resize(lg.tasks.meshes.size());
  early_input.resize(g.tensors.size());
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    const auto mesh = [&](int32_t stage) {
      return static_cast<size_t>(lg.tasks.mesh_of_stage[static_cast<size_t>(stage)]);
    };
    ops_of_mesh[mesh(op.stage)].push_back(static_cast<OpId>(i));
    if (op.code == OpCode::k_transfer && mesh(lg.stage(op.inputs[0])) != mesh(op.stage))
      ops_of_mesh[mesh(lg.stage(op.inputs[0]))].push_back(static_cast<OpId>(i));
    for (const TensorId id : op.inputs)
      if (id != kNone && op.region != Region::kEpilogue) early_input[static_cast<size_t>(view_root(g, id))] = 1;
  }
  kept.resize(g.tensors.size());
  for (const NamedTensor& f : lg.fetches) kept[static_cast<size_t>(f.tensor)] = 1;
  for (const Variable& v : g.variables)
    if (v.next != kNone) kept[static_cast<size_t>(v.next)] = 1;
  for (size_t i = 0; i < g.inputs.size(); ++i) input_number[g.inputs[i]] = static_cast<int32_t>(i);
  for (const auto& [form, input] : lg.input_forms) input_number[form] = input_number.at(input);
  for (const Variable& v : g.variables) {
    const auto it = options.variables.find(g.tensor(v.tensor).name);
    WHALE_CHECK(it != options.variables.end(), "every variable of an entry is one of the plan");
    variable_number[v.tensor] = it->second;
  }
}

ProgramBuilder::ProgramBuilder(const Lowering& lowering, Place place)
    : low_(lowering),
      lg_(lowering.lg),
      g_(lowering.lg.graph),
      place_(std::move(place)),
      timed_(lg_.micro_batches > 1),
      early_input_(lowering.early_input) {}

bool ProgramBuilder::on_this_mesh(int32_t stage) const {
  return lg_.tasks.mesh_of_stage[static_cast<size_t>(stage)] == place_.mesh;
}

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
  if (t.kind == TensorKind::kInput) b.kind = BufferKind::kInput, b.ref = low_.input_number.at(id);
  if (t.kind == TensorKind::kVariable) b.kind = BufferKind::kVariable, b.ref = low_.variable_number.at(id);
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
  feed.ref = low_.input_number.at(input);
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

// A replica without micro-batches adds nothing: its sums are the zeros that they start from, where these wait.
void ProgramBuilder::begin_sums() {
  const auto is = [&](TensorId sum, TensorId zero) {
    const auto from = buffers_.find({zero, -1});
    if (from == buffers_.end()) return;  // the body would bring them from the host's memory, and the sum back there
    const BufferId to = buffer(sum);
    draft_.program.buffers[static_cast<size_t>(to)].alias = from->second;
  };
  for (const Op& op : g_.ops) {
    if (!on_this_mesh(op.stage)) continue;
    if (op.code == OpCode::k_accumulate && !is_tree(op)) is(op.outputs[0], op.inputs[0]);
    if (op.code == OpCode::k_to_host && op.region == Region::kBody && attr_bool(op.attrs, "into"))  // where sums wait
      for (size_t k = 0; k < op.outputs.size(); ++k) is(op.outputs[k], op.inputs[op.outputs.size() + k]);
  }
}

int32_t ProgramBuilder::build_segment(Region region, const SegmentKey& key, const std::string& name) {
  region_ = region;
  key_ = key;
  fed_.clear();
  draft_.program.segments.push_back({name, {}});
  draft_.ops.emplace_back();
  draft_.regions.push_back(region);
  draft_.micro_batches.push_back(place_.micro_batch);
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
  const std::vector<OpId>& ops = low_.ops_of_mesh[static_cast<size_t>(place_.mesh)];
  for (const OpId id : ops) {
    const Op& op = g_.op(id);
    if (sends_here(op)) feed_for(op.inputs[0]);
    if (sends_here(op) || (op.code == OpCode::k_transfer && in_segment(op))) emit_transfer(op);
    if (!in_segment(op)) continue;
    if (op.code != OpCode::k_transfer) {
      for (const TensorId operand : op.inputs)
        if (operand != kNone) feed_for(operand);
      emit(op);
    }
    fetch_made_by(op, false);
  }
  for (const OpId id : ops) {
    const Op& op = g_.op(id);
    if (!on_this_mesh(op.stage)) continue;
    // A sum over micro-batches is made in the body and finished after it; what the prologue made waits there too.
    bool here = in_segment(op);
    if (timed_ && !op.outputs.empty() && !lg_.time_varies(op.outputs[0])) here = region == Region::kEpilogue;
    if (here) fetch_made_by(op, true);
  }
  if (region == Region::kBody && key.stage >= 0) messages_at_the_ends();
  return static_cast<int32_t>(draft_.program.segments.size()) - 1;
}

}  // namespace whale
