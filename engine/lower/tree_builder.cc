// Sums over micro-batches as fixed trees (exact mode): what is made in the body is added after each micro-batch as far
// as the tree allows; replicas put their nodes together after the body.
#include <algorithm>

#include "base/error.h"
#include "rewrite/order.h"
#include "lower/program_builder.h"

namespace whale {

// The sums whose values this segment makes.
std::vector<const Op*> ProgramBuilder::trees(const SegmentKey& key) const {
  std::vector<const Op*> out;
  for (const OpId i : low_.ops_of_mesh[static_cast<size_t>(place_.mesh)]) {
    const Op& op = g_.op(i);
    if (!is_tree(op) || !on_this_mesh(op.stage)) continue;
    const OpId maker = g_.tensor(view_root(g_, op.inputs[0])).producer;
    const WorkKind kind = maker == kNone ? WorkKind::kForward : low_.schedule ? work_of(g_.op(maker)) : WorkKind{};
    if (key.stage < 0 || (op.stage == key.stage && kind == key.kind)) out.push_back(&op);
  }
  return out;
}

// Every value as one row, so that sums of all shapes are alike.
BufferId ProgramBuilder::flat(const std::string& name, DType dtype, int64_t rows, int64_t elements, BufferId alias) {
  Buffer b;
  b.name = name;
  b.dtype = dtype;
  b.dims = {rows, elements};
  b.bytes = rows * elements * size_of(dtype);
  if (alias != kNone) {
    while (draft_.program.buffers[static_cast<size_t>(alias)].alias != kNone)
      alias = draft_.program.buffers[static_cast<size_t>(alias)].alias;
    b.alias = alias;
    b.kind = draft_.program.buffers[static_cast<size_t>(alias)].kind;
    b.ref = draft_.program.buffers[static_cast<size_t>(alias)].ref;
  }
  draft_.program.buffers.push_back(std::move(b));
  return static_cast<BufferId>(draft_.program.buffers.size()) - 1;
}

void ProgramBuilder::plan_trees(const SegmentKey& key, const std::vector<int64_t>& order) {
  if (!lg_.exact) return;
  TreeUse& use = trees_[{key.stage, key.kind}];
  use = {plan_tree(lg_.micro_batches, order), 0};
  for (const Op* op : trees(key)) {
    const Tensor& t = g_.tensor(op->outputs[0]);
    std::vector<BufferId>& sums = sums_[op];
    for (int32_t s = 0; s < use.plan.slots; ++s) {
      sums.push_back(flat(fmt::format("{}.{}", t.name, s), t.dtype, 1, element_count(dims(op->outputs[0]))));
      if (offloaded(*op)) draft_.program.buffers[static_cast<size_t>(sums.back())].memory = Memory::kHost;
    }
  }
}

bool ProgramBuilder::offloaded(const Op& op) const {
  return std::ranges::any_of(low_.readers[static_cast<size_t>(op.outputs[0])], [&](OpId i) {
    return g_.op(i).code == OpCode::k_to_host && g_.op(i).inputs[0] == op.outputs[0];
  });
}

void ProgramBuilder::move(const Op& op, OpCode code, BufferId from, BufferId to) {
  const Buffer& b = draft_.program.buffers[static_cast<size_t>(from)];
  Instruction i;
  i.kind = InstructionKind::kMove;
  if (low_.options.overlap) i.stream = Stream::kCopy;
  i.op = code;
  i.name = fmt::format("{}.{}", op.name, def(code).name);
  i.in = {from};
  i.out = {to};
  i.phase = op.phase;
  i.scope = op.scope;
  i.bytes = 2.0 * static_cast<double>(b.bytes);
  add(std::move(i), nullptr);
}

BufferId ProgramBuilder::here(const Op& op, BufferId sum) {
  const Buffer b = draft_.program.buffers[static_cast<size_t>(sum)];
  const BufferId copy = flat(b.name + ".fetched", b.dtype, b.dims[0], b.dims[1]);
  move(op, OpCode::k_to_device, sum, copy);
  return copy;
}

void ProgramBuilder::put_away(const Op& op, BufferId value, BufferId sum) { move(op, OpCode::k_to_host, value, sum); }

void ProgramBuilder::merge_row(const SegmentKey& key, int32_t base, const ScheduleRow& row) {
  merged_.reset();
  if (!lg_.exact) return;
  TreeUse& use = trees_.at({key.stage, key.kind});
  const std::vector<TreeStep>& steps = use.plan.steps[use.next++];
  const std::vector<const Op*> ops = trees(key);
  if (ops.empty()) return;
  const auto [at, fresh] = merges_.try_emplace({key, steps}, static_cast<int32_t>(draft_.program.segments.size()));
  if (fresh) {
    std::string name = draft_.program.segments[static_cast<size_t>(base)].name + ".sum";
    for (const TreeStep& s : steps) name += fmt::format(".{}", s.to);
    draft_.program.segments.push_back({std::move(name), {}});
    draft_.ops.emplace_back();
    draft_.regions.push_back(Region::kBody);
    follows_[at->second] = base;
    key_ = key;
    for (const Op* op : ops) {
      const Tensor& t = g_.tensor(op->outputs[0]);
      const int64_t n = element_count(dims(op->outputs[0]));
      if (n == 0) continue;
      const BufferId leaf = flat(t.name + ".leaf", t.dtype, 1, n, buffer(op->inputs[0]));
      const bool away = offloaded(*op);
      BufferId last = leaf;  // of sums that are kept away: where the value is
      for (const TreeStep& s : steps) {
        const BufferId sum = sums_.at(op)[static_cast<size_t>(s.to)];
        if (away && s.copies) continue;
        const BufferId from = away || s.from < 0 ? last : sums_.at(op)[static_cast<size_t>(s.from)],
                       to = away ? here(*op, sum) : sum;
        if (away) last = to;
        Instruction i;
        i.op = s.copies ? OpCode::k_stop_gradient : OpCode::k_accumulate;
        if (!s.copies) i.attrs = op->attrs;
        i.name = op->name;
        if (!s.copies) i.in = {to};
        i.in.push_back(from);
        i.out = {to};
        i.phase = op->phase;
        i.scope = op->scope;
        i.bytes = (s.copies ? 2.0 : 3.0) * static_cast<double>(n * size_of(t.dtype));
        i.flops = s.copies ? 0 : static_cast<double>(n);
        add(std::move(i), nullptr);
      }
      if (away && !steps.empty()) put_away(*op, last, sums_.at(op)[static_cast<size_t>(steps.back().to)]);
    }
  }
  merged_ = row;
  merged_->segment = at->second;
  merged_->whole = true;  // nothing here follows the samples
}

// Of all devices that differ from this one along axes from `axis` on, in their order.
std::vector<TreeNode> ProgramBuilder::nodes_under(const Place& place, size_t axis) const {
  while (axis < lg_.axes() && !lg_.by_micro_batch(axis)) ++axis;
  if (axis == lg_.axes()) return tree_nodes(lg_.micro_batches, low_.local.micro_batches(place));
  std::vector<TreeNode> all;
  Place other = place;
  const Mesh& mesh = lg_.tasks.meshes[static_cast<size_t>(place.mesh)];
  for (int64_t k = 0; k < mesh.axes[axis - 1].size; ++k) {
    other.coordinates[axis - 1] = k;
    const std::vector<TreeNode> more = nodes_under(other, axis + 1);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

// This device's nodes as the rows of one buffer, then those of all replicas.
BufferId ProgramBuilder::gather_nodes(const Op& op, std::vector<TreeNode>& rows) {
  const TensorId y = op.outputs[0];
  const Tensor& t = g_.tensor(y);
  const int64_t n = element_count(dims(y));
  const OpId maker = g_.tensor(view_root(g_, op.inputs[0])).producer;
  const SegmentKey key{low_.schedule ? op.stage : -1,
                       !low_.schedule || maker == kNone ? WorkKind{} : work_of(g_.op(maker)), -1};
  const TreePlan& plan = trees_.at({key.stage, key.kind}).plan;
  rows = plan.nodes;
  std::vector<BufferId> mine;
  for (const int32_t s : plan.slot_of) {
    const BufferId sum = sums_.at(&op)[static_cast<size_t>(s)];
    mine.push_back(offloaded(op) ? here(op, sum) : sum);
  }
  BufferId all = mine.empty() ? kNone : mine[0];
  Instruction i;
  i.name = op.name;
  i.phase = op.phase;
  i.scope = op.scope;
  if (mine.size() != 1) {
    all = flat(t.name + ".nodes", t.dtype, static_cast<int64_t>(mine.size()), n);
    if (mine.size() > 1) {
      Instruction join = i;
      join.op = OpCode::k_concat;
      join.in = mine;
      join.out = {all};
      join.attrs = {{"axis", int64_t{0}}};
      join.bytes = 2.0 * static_cast<double>(static_cast<int64_t>(mine.size()) * n * size_of(t.dtype));
      add(std::move(join), nullptr);
    }
  }
  const Mesh& mesh = lg_.tasks.meshes[static_cast<size_t>(place_.mesh)];
  for (size_t a = lg_.axes(); a-- > 1;) {
    if (!lg_.by_micro_batch(a) || mesh.axes[a - 1].size == 1) continue;
    std::vector<int64_t> cuts;
    Place other = place_;
    int64_t at = 0;
    for (int64_t k = 0; k < mesh.axes[a - 1].size; ++k) {
      other.coordinates[a - 1] = k;
      const auto count = static_cast<int64_t>(nodes_under(other, a + 1).size());
      cuts.insert(cuts.end(), {at, at + count});
      at += count;
    }
    rows = nodes_under(place_, a);
    Instruction gather = i;
    gather.kind = InstructionKind::kCollective;
    gather.stream = low_.options.overlap ? Stream::kCommunication : Stream::kCompute;
    gather.op = OpCode::k_all_gather;
    gather.in = {all};
    gather.out = {all = flat(t.name + ".nodes", t.dtype, at, n)};
    gather.ref = static_cast<int32_t>(a) - 1;
    gather.attrs = {
        {"group", static_cast<int64_t>(a) - 1}, {"digit", std::vector<int64_t>{0, 1, 1}}, {"cuts", std::move(cuts)}};
    gather.bytes = static_cast<double>(at * n * size_of(t.dtype));
    add(std::move(gather), nullptr);
  }
  return all;
}

void ProgramBuilder::finish_trees() {
  if (!lg_.exact) return;
  struct Waiting {
    const Op* op;
    BufferId rows;
    std::vector<TreeNode> nodes;
  };
  const auto finish = [&](const Waiting& w) {
    const TensorId y = w.op->outputs[0];
    const Tensor& t = g_.tensor(y);
    const int64_t n = element_count(dims(y));
    BufferId root = w.rows;
    const TreeMerge merge = merge_tree(lg_.micro_batches, w.nodes);
    if (w.nodes.size() > 1) {
      std::vector<BufferId> row;
      for (size_t k = 0; k < w.nodes.size(); ++k) {
        row.push_back(flat(fmt::format("{}.row{}", t.name, k), t.dtype, 1, n));
        Instruction i;
        i.op = OpCode::k_local_slice;
        i.name = w.op->name;
        i.in = {w.rows};
        i.out = {row.back()};
        i.attrs = {{"digit", std::vector<int64_t>{0, 1, 1}},
                   {"begin", static_cast<int64_t>(k)},
                   {"end", static_cast<int64_t>(k) + 1}};
        i.phase = w.op->phase;
        i.scope = w.op->scope;
        i.bytes = 2.0 * static_cast<double>(n * size_of(t.dtype));
        add(std::move(i), nullptr);
      }
      for (const auto& [to, from] : merge.additions) {
        Instruction i;
        i.op = OpCode::k_accumulate;
        i.attrs = w.op->attrs;
        i.name = w.op->name;
        i.in = {row[static_cast<size_t>(to)], row[static_cast<size_t>(from)]};
        i.out = {row[static_cast<size_t>(to)]};
        i.phase = w.op->phase;
        i.scope = w.op->scope;
        i.flops = static_cast<double>(n);
        i.bytes = 3.0 * static_cast<double>(n * size_of(t.dtype));
        add(std::move(i), nullptr);
      }
      root = row[static_cast<size_t>(merge.root)];
    }
    const BufferId view = flat(t.name, t.dtype, 1, n, root);
    draft_.program.buffers[static_cast<size_t>(view)].dims = dims(y);
    buffers_[{y, -1}] = view;
    for (const OpId i : low_.readers[static_cast<size_t>(y)]) {  // at once, not when all sums are there
      const Op& op = g_.op(i);
      if (op.code == OpCode::k_to_host && op.inputs[0] == y) emit(op), emitted_.insert(&op);
    }
  };
  // A gather goes on beside the additions of the one before.
  std::optional<Waiting> before;
  for (const OpId i : low_.ops_of_mesh[static_cast<size_t>(place_.mesh)]) {
    const Op& op = g_.op(i);
    if (!is_tree(op) || !on_this_mesh(op.stage)) continue;
    Waiting now{&op, kNone, {}};
    now.rows = gather_nodes(op, now.nodes);
    if (before) finish(*before);
    before = std::move(now);
  }
  if (before) finish(*before);
}

}  // namespace whale
