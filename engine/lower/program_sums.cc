// Sums over micro-batches as fixed trees (exact mode): what is made in the body is added after each micro-batch as far
// as the tree allows; replicas put their nodes together after the body.
#include <algorithm>
#include <optional>

#include "lower/program.h"
#include "plan/lives.h"

namespace whale {
namespace {

// Part of making `tree`; it moves as many bytes as `passes` over the result.
Instruction instruction_for(const Op& tree, Work work, BufferIds in, const Draft& draft, BufferId out, double passes) {
  Instruction i;
  i.work = std::move(work);
  i.name = tree.name;
  i.in = std::move(in);
  i.out = {out};
  i.phase = tree.phase;
  i.scope = tree.scope;
  i.bytes = passes * static_cast<double>(draft.program.buffers[out].bytes);
  return i;
}

// to += from
void add_up(Draft& draft, const Op& tree, BufferId to, BufferId from) {
  Instruction i =
      instruction_for(tree, work::Kernel{.op = OpCode::k_accumulate, .attrs = tree.attrs}, {to, from}, draft, to, 3);
  i.flops = static_cast<double>(element_count(draft.buffer(to).dims));
  draft.add(std::move(i), nullptr);
}

// Every value as one row, so that sums of all shapes are alike.
BufferId add_rows(Draft& draft, const std::string& name, DType dtype, int64_t rows, int64_t elements,
                  BufferId alias = kNone) {
  Buffer b;
  b.name = name;
  b.dtype = dtype;
  b.dims = {rows, elements};
  b.bytes = rows * elements * size_of(dtype);
  if (alias != kNone) {
    b.alias = storage_of(draft.program, alias);
    b.kind = draft.buffer(b.alias).kind;
    b.ref = draft.buffer(b.alias).ref;
  }
  return draft.add(std::move(b));
}

// Sums that wait in the host's memory: a copy on the device, and back.
bool offloaded(const Site& at, const Op& tree) {
  return std::ranges::any_of(at.low.readers[tree.outputs[0]], [&](OpId i) {
    return at.graph().op(i).code == OpCode::k_to_host && at.graph().op(i).inputs[0] == tree.outputs[0];
  });
}

void copy(Draft& draft, const Site& at, const Op& tree, Memory memory, BufferId from, BufferId to) {
  Instruction i = instruction_for(tree, work::Copy{memory}, {from}, draft, to, 2);
  if (at.low.options.overlap) i.queue = memory == Memory::kHost ? Queue::kCopyOut : Queue::kCopyIn;
  i.name += fmt::format(".{}", i.verb());
  draft.add(std::move(i), nullptr);
}

BufferId on_device(Draft& draft, const Site& at, const Op& tree, BufferId sum) {
  const Buffer b = draft.buffer(sum);
  const BufferId fetched = add_rows(draft, b.name + ".fetched", b.dtype, b.dims[0], b.dims[1]);
  copy(draft, at, tree, Memory::kDevice, sum, fetched);
  return fetched;
}

// Of all devices that differ from this one along axes from `axis` on, in their order.
std::vector<TreeNode> nodes_under(const Lowering& low, const Place& place, size_t axis) {
  while (axis < low.lg.axes() && !low.lg.by_micro_batch(axis)) ++axis;
  if (axis == low.lg.axes()) return tree_nodes(low.lg.micro_batches, low.local.micro_batches(place));
  std::vector<TreeNode> all;
  Place other = place;
  const Mesh& mesh = low.lg.tasks.meshes[place.mesh];
  for (int64_t k = 0; k < mesh.axes[axis - 1].size; ++k) {
    other.coordinates[axis - 1] = k;
    const std::vector<TreeNode> more = nodes_under(low, other, axis + 1);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

// All nodes of a tree as rows of one buffer.
struct Gathered {
  const Op* tree;
  BufferId rows;
  std::vector<TreeNode> nodes;
};

// This device's nodes, then those of all replicas.
Gathered gather(Draft& draft, const Site& at, const Op& tree, const TreePlan& plan) {
  const Lowering& low = at.low;
  const Tensor& t = at.graph().tensor(tree.outputs[0]);
  const int64_t n = element_count(at.dims(tree.outputs[0]));
  const bool away = offloaded(at, tree);
  BufferIds mine;
  for (const int32_t s : plan.place_of) {
    const BufferId sum = draft.sums.at(&tree)[s];
    mine.push_back(away ? on_device(draft, at, tree, sum) : sum);
  }
  Gathered all{&tree, mine.empty() ? kNone : mine[0], plan.nodes};
  if (mine.size() != 1) all.rows = add_rows(draft, t.name + ".nodes", t.dtype, std::ssize(mine), n);
  if (mine.size() > 1) {
    const work::Kernel join{.op = OpCode::k_concat, .attrs = {{"axis", int64_t{0}}}};
    draft.add(instruction_for(tree, join, std::move(mine), draft, all.rows, 2), nullptr);
  }
  const Mesh& mesh = low.lg.tasks.meshes[at.place.mesh];
  for (size_t a = low.lg.axes(); a-- > 1;) {
    if (!low.lg.by_micro_batch(a) || mesh.axes[a - 1].size == 1) continue;
    std::vector<Interval> cuts;
    Place other = at.place;
    int64_t end = 0;
    for (int64_t k = 0; k < mesh.axes[a - 1].size; ++k) {
      other.coordinates[a - 1] = k;
      const int64_t count = std::ssize(nodes_under(low, other, a + 1));
      cuts.push_back({end, end + count});
      end += count;
    }
    all.nodes = nodes_under(low, at.place, a);
    const BufferId whole = add_rows(draft, t.name + ".nodes", t.dtype, end, n);
    work::Collective c{.op = OpCode::k_all_gather, .group = static_cast<int32_t>(a) - 1};
    c.cuts.push_back({{0, 1, 1}, std::move(cuts)});
    const int32_t group = c.group;
    Instruction i = instruction_for(tree, std::move(c), {all.rows}, draft, whole, 1);
    all.rows = whole;
    if (low.options.overlap) i.queue = low.queue_of_group(group);
    draft.add(std::move(i), nullptr);
  }
  return all;
}

// The sum of the rows, and the copies of it that wait in the host's memory.
void finish(Draft& draft, const Site& at, const Gathered& all) {
  const Op& tree = *all.tree;
  const TensorId y = tree.outputs[0];
  const Tensor& t = at.graph().tensor(y);
  const int64_t n = element_count(at.dims(y));
  BufferId root = all.rows;
  const TreeMerge merge = merge_tree(at.lg().micro_batches, all.nodes);
  if (all.nodes.size() > 1) {
    BufferIds row;
    for (size_t k = 0; k < all.nodes.size(); ++k) {
      row.push_back(add_rows(draft, fmt::format("{}.row{}", t.name, k), t.dtype, 1, n));
      const work::Kernel slice{
          .op = OpCode::k_local_slice,
          .attrs = {
              {"sub_axis", Ints{0, 1, 1}}, {"begin", static_cast<int64_t>(k)}, {"end", static_cast<int64_t>(k) + 1}}};
      draft.add(instruction_for(tree, slice, {all.rows}, draft, row.back(), 2), nullptr);
    }
    for (const auto& [to, from] : merge.additions) add_up(draft, tree, row[to], row[from]);
    root = row[merge.root];
  }
  const BufferId view = add_rows(draft, t.name, t.dtype, 1, n, root);
  draft.buffer(view).dims = at.dims(y);
  draft.buffers.set(y, -1, view);
  for (const OpId i : at.low.readers[y])  // at once, not when all sums are there
    if (stores_sum(at.low, at.graph().op(i))) emit(draft, at, at.graph().op(i));
}

}  // namespace

bool stores_sum(const Lowering& low, const Op& op) {
  if (op.code != OpCode::k_to_host) return false;
  const OpId producer = low.lg.graph.tensor(op.inputs[0]).producer;
  return producer != kNone && low.is_tree(low.lg.graph.op(producer));
}

void place_sums(Draft& draft, const Site& at, const SegmentKey& maker, int32_t places) {
  for (const Op* tree : at.low.trees(at.place.mesh, maker)) {
    const Tensor& t = at.graph().tensor(tree->outputs[0]);
    BufferIds& sums = draft.sums[tree];
    for (int32_t s = 0; s < places; ++s) {
      sums.push_back(
          add_rows(draft, fmt::format("{}.{}", t.name, s), t.dtype, 1, element_count(at.dims(tree->outputs[0]))));
      if (offloaded(at, *tree)) draft.buffer(sums.back()).memory = Memory::kHost;
    }
  }
}

void add_to_sums(Draft& draft, const Site& at, const std::vector<TreeStep>& steps) {
  for (const Op* tree : at.low.trees(at.place.mesh, {at.key.stage, at.key.kind, -1})) {
    const Tensor& t = at.graph().tensor(tree->outputs[0]);
    const int64_t n = element_count(at.dims(tree->outputs[0]));
    if (n == 0) continue;
    const BufferId leaf = add_rows(draft, t.name + ".leaf", t.dtype, 1, n, buffer_of(draft, at, tree->inputs[0]));
    const bool away = offloaded(at, *tree);
    const auto sum = [&](int32_t n) { return draft.sums.at(tree)[n]; };
    BufferId last = leaf;  // of sums that are kept away: where the value is
    for (const TreeStep& s : steps) {
      if (away && s.copies) continue;
      const BufferId from = away || s.from < 0 ? last : sum(s.from);
      const BufferId to = away ? last = on_device(draft, at, *tree, sum(s.to)) : sum(s.to);
      if (s.copies)
        draft.add(instruction_for(*tree, work::Kernel{.op = OpCode::k_stop_gradient}, {from}, draft, to, 2), nullptr);
      else
        add_up(draft, *tree, to, from);
    }
    if (away && !steps.empty()) copy(draft, at, *tree, Memory::kHost, last, sum(steps.back().to));
  }
}

void finish_sums(Draft& draft, const Site& at, const std::map<SegmentKey, TreeUse>& trees) {
  // A gather goes on beside the additions of the one before.
  std::optional<Gathered> before;
  for (const OpId i : at.ops()) {
    const Op& op = at.graph().op(i);
    if (!at.low.is_tree(op)) continue;
    Gathered now = gather(draft, at, op, trees.at(at.low.maker_of(op)).plan);
    if (before) finish(draft, at, *before);
    before = std::move(now);
  }
  if (before) finish(draft, at, *before);
}

}  // namespace whale
