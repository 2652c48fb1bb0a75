#include "plan/program_builder.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "parallel/order.h"
#include "schedule/accumulation.h"

namespace whale {
namespace {

StepScalar step_scalar(const std::string& name) {
  if (name == "learning_rate") return StepScalar::kLearningRate;
  if (name == "updates") return StepScalar::kUpdates;
  if (name == "loss_scale") return StepScalar::kLossScale;
  throw internal("step scalar '{}' is unknown", name);
}

double identity_of(Combine combine) {
  if (combine == Combine::kMax) return -std::numeric_limits<double>::infinity();
  if (combine == Combine::kMin) return std::numeric_limits<double>::infinity();
  return 0;
}

}  // namespace

ProgramBuilder::ProgramBuilder(const LayoutGraph& graph, const BatchCut& cut, const LowerOptions& options,
                               int64_t device)
    : lg_(graph),
      g_(graph.graph),
      cut_(cut),
      options_(options),
      device_(static_cast<size_t>(device)),
      timed_(graph.axes[0].size > 1) {
  for (size_t i = 0; i < g_.inputs.size(); ++i) input_number_[g_.inputs[i]] = static_cast<int32_t>(i);
  for (const auto& [whole, input] : lg_.whole_inputs) input_number_[whole] = input_number_.at(input);
  for (const Variable& v : g_.variables) {
    const auto it = options.variables.find(g_.tensor(v.tensor).name);
    WHALE_CHECK(it != options.variables.end(), "every variable of an entry is one of the plan");
    variable_number_[v.tensor] = it->second;
  }
  early_input_.resize(g_.tensors.size());
  for (const Op& op : g_.ops)
    for (const TensorId id : op.inputs)
      if (id != kNone && op.region != Region::kEpilogue) early_input_[static_cast<size_t>(view_root(g_, id))] = 1;
}

Draft ProgramBuilder::build() {
  std::vector<int32_t> segment_of;  // per micro-batch
  const auto size_of_run = [&](size_t u) {
    return Variant{cut_.runs[u].size(), device_ < cut_.parts[u].size() ? cut_.parts[u][device_].size() : 0};
  };
  const std::vector<SegmentRun> rows = accumulation_schedule(timed_ ? lg_.axes[0].size : 1);
  if (timed_) build_segment(Region::kPrologue, -1, "prologue");
  for (const SegmentRun& row : rows) {
    if (row.region != Region::kBody) continue;
    const auto u = static_cast<size_t>(row.micro_batch);
    const Variant size = cut_.runs.empty() ? Variant{} : size_of_run(u);
    auto at = static_cast<size_t>(std::find(variants_.begin(), variants_.end(), size) - variants_.begin());
    if (at == variants_.size()) {
      variants_.push_back(size);
      micro_batch_ = static_cast<int32_t>(u);
      const std::string name = !timed_ ? "step" : at == 0 ? "body" : fmt::format("body/{}", size.both);
      build_segment(Region::kBody, static_cast<int>(at), name);
    }
    segment_of.push_back(static_cast<int32_t>(at + (timed_ ? 1 : 0)));
  }
  if (timed_) build_segment(Region::kEpilogue, -1, "epilogue");
  const auto last = static_cast<int32_t>(draft_.program.segments.size()) - 1;
  for (const SegmentRun& row : rows) {
    const int32_t segment = row.region == Region::kPrologue   ? 0
                            : row.region == Region::kEpilogue ? last
                                                              : segment_of[static_cast<size_t>(row.micro_batch)];
    draft_.program.schedule.push_back({segment, static_cast<int32_t>(row.micro_batch)});
  }
  for (const Variable& v : g_.variables)
    if (v.next != kNone && v.next != v.tensor) draft_.next.emplace_back(buffer(v.tensor), buffer(v.next));
  return std::move(draft_);
}

Dims ProgramBuilder::dims(TensorId id) const {
  LocalExtents extents;
  if (variant_ >= 0)
    extents = {variants_[static_cast<size_t>(variant_)].both, variants_[static_cast<size_t>(variant_)].run, 0};
  extents.share = device_ < cut_.whole.size() ? cut_.whole[device_].size() : 0;
  return local_dims(lg_, id, extents);
}

bool ProgramBuilder::empty(TensorId id) const {
  const Dims d = dims(id);
  return std::find(d.begin(), d.end(), 0) != d.end();
}

// The buffer of a tensor; tensors that differ from micro-batch to micro-batch have one per variant of the body.
BufferId ProgramBuilder::buffer(TensorId id) {
  const bool varies = timed_ && lg_.time_varies(id);
  const std::pair<TensorId, int> key{id, varies ? variant_ : -1};
  if (const auto it = buffers_.find(key); it != buffers_.end()) return it->second;
  const Tensor& t = g_.tensor(id);
  Buffer b;
  b.name = t.name;
  b.dtype = t.dtype;
  b.dims = dims(id);
  b.bytes = element_count(b.dims) * size_of(b.dtype);
  if (t.kind == TensorKind::kInput) b.kind = BufferKind::kInput, b.ref = input_number_.at(id);
  if (t.kind == TensorKind::kVariable) b.kind = BufferKind::kVariable, b.ref = variable_number_.at(id);
  if (t.kind == TensorKind::kStep) b.kind = BufferKind::kStep, b.ref = static_cast<int32_t>(step_scalar(t.name));
  if (t.kind == TensorKind::kValue && t.producer != kNone && is_view(g_.op(t.producer).code)) {
    b.alias = buffer(view_root(g_, id));
    b.kind = draft_.program.buffers[static_cast<size_t>(b.alias)].kind;
    b.ref = draft_.program.buffers[static_cast<size_t>(b.alias)].ref;
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

bool ProgramBuilder::in_segment(const Op& op) const { return !timed_ || op.region == region_; }

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
  feed.whole_batch = timed_ && !lg_.time_varies(input);
  feed.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(feed.out[0])].bytes);
  add(std::move(feed), nullptr);
}

void ProgramBuilder::fetch(size_t output) {
  const NamedTensor& f = lg_.fetches[output];
  if (empty(f.tensor)) return;
  feed_for(f.tensor);
  Instruction fetch;
  fetch.kind = InstructionKind::kFetch;
  fetch.name = "fetch." + f.name;
  fetch.in = {buffer(f.tensor)};
  fetch.ref = static_cast<int32_t>(output);
  fetch.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(fetch.in[0])].bytes);
  add(std::move(fetch), nullptr);
}

// Values leave as soon as they are made; those that come from other devices leave at the end, when nothing waits behind
// them.
void ProgramBuilder::fetch_made_by(const Op& op, bool at_end) {
  for (size_t f = 0; f < lg_.fetches.size(); ++f) {
    const TensorId root = view_root(g_, lg_.fetches[f].tensor);
    if (g_.tensor(root).kind != TensorKind::kValue ||
        std::find(op.outputs.begin(), op.outputs.end(), root) == op.outputs.end())
      continue;
    const bool soon = timed_ ? lg_.time_varies(root) : !has_flag(op.code, kCollective);
    if (soon != at_end) fetch(f);
  }
}

void ProgramBuilder::build_segment(Region region, int variant, const std::string& name) {
  region_ = region;
  variant_ = variant;
  fed_.clear();
  draft_.program.segments.push_back({name, {}});
  draft_.ops.emplace_back();
  draft_.regions.push_back(region);
  for (size_t f = 0; f < lg_.fetches.size(); ++f) {  // of what is there from the start, before anything changes it
    const TensorId root = view_root(g_, lg_.fetches[f].tensor);
    if (g_.tensor(root).kind == TensorKind::kValue) continue;
    const bool varies = timed_ && lg_.time_varies(root);
    if (!timed_ || (varies ? region == Region::kBody : region == Region::kPrologue)) {
      if (timed_ && !varies) early_input_[static_cast<size_t>(root)] = 1;
      fetch(f);
    }
  }
  if (timed_ && region == Region::kPrologue)  // what the body reads whole must be there
    for (size_t t = 0; t < g_.tensors.size(); ++t)
      if (g_.tensors[t].kind == TensorKind::kInput && early_input_[t] && !lg_.time_varies(static_cast<TensorId>(t)))
        feed_for(static_cast<TensorId>(t));
  for (const Op& op : g_.ops) {
    if (!in_segment(op)) continue;
    for (const TensorId id : op.inputs)
      if (id != kNone) feed_for(id);
    emit(op);
    fetch_made_by(op, false);
  }
  for (const Op& op : g_.ops) {
    // A sum over micro-batches is made in the body and finished after it; what the prologue made waits there too.
    bool here = in_segment(op);
    if (timed_ && !op.outputs.empty() && !lg_.time_varies(op.outputs[0])) here = region == Region::kEpilogue;
    if (here) fetch_made_by(op, true);
  }
}

void ProgramBuilder::bridge_attrs(const Op& op, Attrs& attrs) const {
  if (op.code != OpCode::k_all_gather && op.code != OpCode::k_local_slice) return;
  const bool varies = lg_.time_varies(op.inputs[0]) || !timed_;
  const auto u = static_cast<size_t>(micro_batch_);
  const std::vector<Interval>& parts = varies ? cut_.parts[u] : cut_.whole;
  const int64_t origin = varies ? cut_.runs[u].begin : 0;
  if (op.code == OpCode::k_local_slice) {
    attrs["begin"] = parts[device_].begin - origin;
    attrs["end"] = parts[device_].end - origin;
    return;
  }
  std::vector<int64_t> cuts;
  for (const Interval& part : parts) cuts.insert(cuts.end(), {part.begin - origin, part.end - origin});
  attrs["cuts"] = std::move(cuts);
}

// The neutral value in the place of a partial result of no samples.
void ProgramBuilder::emit_identity(const Op& op, size_t output) {
  const TensorId id = op.outputs[output];
  Combine combine = Combine::kSum;
  for (size_t a = 0; a < lg_.axes.size(); ++a)
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

void ProgramBuilder::emit(const Op& op) {
  if (is_view(op.code)) return;
  const bool collective = has_flag(op.code, kCollective);
  bool none_out = true, none_in = false;
  for (const TensorId id : op.outputs) none_out &= empty(id);
  for (const TensorId id : op.inputs)
    if (id != kNone && empty(id))
      for (size_t a = 0; a < lg_.axes.size(); ++a) none_in |= lg_.at(id, a).placement == Placement::kShard;
  if (none_out && !collective) return;  // no samples, nothing to do
  if (none_in && !collective) {
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (!empty(op.outputs[o])) emit_identity(op, o);
    return;
  }
  std::vector<Dims> in, out;
  Instruction i;
  for (const TensorId id : op.inputs) {
    in.push_back(id == kNone ? Dims{} : dims(id));
    i.in.push_back(id == kNone ? kNone : buffer(id));
  }
  for (const TensorId id : op.outputs) {
    out.push_back(dims(id));
    i.out.push_back(buffer(id));
  }
  i.kind = collective ? InstructionKind::kCollective : InstructionKind::kKernel;
  i.stream = collective && options_.overlap ? Stream::kCommunication : Stream::kCompute;
  i.op = op.code;
  i.name = op.name;
  i.attrs = local_attrs(g_, op, in, out);
  bridge_attrs(op, i.attrs);
  i.box = box_of(lg_, op);
  i.key = op.key;
  if (collective) i.ref = static_cast<int32_t>(attr_int(op.attrs, "group"));
  i.phase = op.phase;
  i.scope = op.scope;
  const OpCost cost = local_cost(g_, op, i.attrs, in, out);
  i.flops = cost.flops;
  i.bytes = cost.bytes;
  add(std::move(i), &op);
}

}  // namespace whale
