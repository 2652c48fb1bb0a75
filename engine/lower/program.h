// The program of one class of devices: first which segments it has and in which order they run, then the instructions
// of each over local buffers, before storage is shared and placed (storage.h).
#pragma once

#include <map>
#include <set>
#include <vector>

#include "lower/localise.h"
#include "lower/lower.h"
#include "lower/tree.h"
#include "rewrite/rewrite.h"
#include "schedule/schedule.h"

namespace whale {

struct SegmentKey {  // of the body
  int32_t stage = -1;
  WorkKind kind{};
  int32_t variant = -1;  // micro-batches of one size: the first of them
  friend auto operator<=>(const SegmentKey&, const SegmentKey&) = default;  // NOLINT(modernize-use-nullptr)
};

// What all programs of an entry share.
struct Lowering {
  Lowering(const ShardedGraph& graph, const LowerOptions& lower_options)
      : lg(graph), options(lower_options), local(graph) {}

  const ShardedGraph& lg;
  const LowerOptions& options;
  Localiser local;
  std::vector<uint64_t> masks;                               // ways in which axes cut the batch: DeviceRow::samples
  std::map<std::pair<const Op*, int32_t>, int32_t> link_of;  // (transfer, first micro-batch of a size)
  std::map<int32_t, int64_t> inside;  // links within a stage (halos): the most elements that a device gets from others
  std::vector<int32_t> size_class;    // per micro-batch: the first one of the same size
  const PipelineSchedule* schedule = nullptr;     // null: no pipeline, or a single micro-batch
  std::map<int64_t, PipelineSchedule> schedules;  // by the number of micro-batches that a replica runs
  std::vector<char> weight_op;                    // per op: may be later than the input gradients (W of zero bubble)
  // Of the graph; there may be as many programs as stages, and each has its own part of it alone to look at.
  Lists readers;                                // per tensor
  std::vector<TensorId> root;                   // per tensor: whose storage it shows, through views
  std::vector<char> kept;                       // per tensor: fetched, or a variable's next value
  std::vector<std::vector<OpId>> ops_of_mesh;   // what its devices run, send or receive, in order
  std::map<TensorId, int32_t> input_number;     // forms of inputs too
  std::map<TensorId, int32_t> variable_number;  // of the plan
  std::vector<char> early_input;                // per tensor: read in the prologue or, whole, in the body

  // Per tensor: made and read in one segment of the body, though of no micro-batch (gathered parameters). Like values
  // of micro-batches it has a buffer for each size of these, none of which is alive beside the others.
  std::vector<char> of_one_segment;

  void index();  // fills these in
  void find_of_one_segment();
  TensorId root_of(TensorId id) const { return root[id]; }
  int32_t mask_number(uint64_t mask) const;
  Queue queue_of_group(int32_t group) const;
  bool timed() const { return lg.micro_batches > 1; }
  WorkKind work_of(const Op& op) const;
  // Sums over micro-batches as trees (exact mode): those of a mesh, and the segments that make what one adds.
  bool is_tree(const Op& op) const { return lg.exact && op.code == OpCode::k_accumulate; }
  SegmentKey maker_of(const Op& tree) const;
  std::vector<const Op*> trees(int32_t mesh, const SegmentKey& maker) const;
};

struct SegmentPlan {
  std::string name;
  Region region{};
  SegmentKey key;
  int32_t adds = kNone;         // exact mode: the segment whose values this one adds to sums,
  std::vector<TreeStep> steps;  // in this way
};
struct TreeUse {
  TreePlan plan;
  size_t behind = 0;  // the segment after which its sums have their places
};
struct ProgramOrder {
  std::vector<SegmentPlan> segments;
  std::vector<ScheduleRow> rows;
  // By segment of a pipeline: micro-batches of its virtual stage that are alive at once; and of all stages of a device
  // together, where one reads what another one made (1: none does).
  std::map<int32_t, int64_t> versions;
  int64_t of_all_stages = 1;
  std::map<SegmentKey, TreeUse> trees;  // exact mode, by what makes the values (of any size)
};
// From the micro-batches of a place and their schedule alone.
ProgramOrder order_of(const Lowering& low, const Place& place);

// Which buffer a tensor has: one in all segments, or one for each SegmentKey::variant (-1: that one in all).
class BufferTable {
 public:
  explicit BufferTable(size_t tensors) : fixed_(tensors, kNone) {}
  BufferId of(TensorId id, int32_t variant) const {  // kNone: none yet
    if (variant < 0) return fixed_[id];
    const auto known = varying_.find({id, variant});
    return known == varying_.end() ? kNone : known->second;
  }
  void set(TensorId id, int32_t variant, BufferId buffer) {
    (variant < 0 ? fixed_[id] : varying_[{id, variant}]) = buffer;
  }
  // Calls body(tensor, variant, buffer) for all.
  template <class Body>
  void each(Body body) const {
    for (size_t t = 0; t < fixed_.size(); ++t)
      if (fixed_[t] != kNone) body(static_cast<TensorId>(t), -1, fixed_[t]);
    for (const auto& [key, buffer] : varying_) body(key.first, key.second, buffer);
  }

 private:
  std::vector<BufferId> fixed_;  // per tensor
  std::map<std::pair<TensorId, int32_t>, BufferId> varying_;
};

// A program under construction: beside each instruction of each segment, the op that it came from (null: feed, fetch).
struct Draft {
  explicit Draft(size_t tensors) : buffers(tensors) {}

  Program program;
  std::vector<std::vector<const Op*>> ops;
  std::vector<Region> regions;                      // per segment
  std::vector<int64_t> micro_batches;               // per segment: the one it was built for, of its size
  std::vector<std::pair<BufferId, BufferId>> next;  // (variable's buffer, buffer of its next value)
  BufferTable buffers;
  std::map<BufferId, BufferId> lies_in;  // views, results in place and parts: in what, before storages were shared
  std::map<const Op*, BufferIds> sums;   // of trees: their places
  std::set<TensorId> fed;                // inputs that the last segment has been given

  Buffer& buffer(BufferId b) { return program.buffers[b]; }
  BufferId add(Buffer b);
  void add(Instruction instruction, const Op* op);  // to the last segment
};
Draft draft_program(const Lowering& low, const Place& place);
// Rows that came with the number of their micro-batch, since their segment's buffers have unlike numbers of versions,
// get the version that this is.
void number_versions(Program& program);

// A device, in one of its segments: what it has of tensors there, and which ops it runs.
struct Site {
  const Lowering& low;
  Place place;  // its micro-batch: one of the segment's size
  Region region{};
  SegmentKey key;

  const ShardedGraph& lg() const { return low.lg; }
  const Graph& graph() const { return low.lg.graph; }
  const std::vector<OpId>& ops() const { return low.ops_of_mesh[place.mesh]; }
  bool here(int32_t stage) const { return lg().tasks.mesh_of_stage[stage] == place.mesh; }
  Dims dims(TensorId id) const { return low.local.dims(id, place); }
  bool empty(TensorId id) const { return low.local.empty(id, place); }
  bool runs(const Op& op) const { return has(op, op.stage); }
  // The sending half of a transfer stands with what makes its operand.
  bool sends(const Op& op) const { return op.code == OpCode::k_transfer && has(op, lg().stage(op.inputs[0])); }

 private:
  bool has(const Op& op, int32_t stage) const;
};

// Bytes from the start of what the view shows to where it begins; 0 for what is no view.
int64_t begin_of_view(const Lowering& low, const Place& place, TensorId id);

// The buffer of a tensor; tensors that differ from micro-batch to micro-batch have one per size of micro-batch.
BufferId buffer_of(Draft& draft, const Site& at, TensorId id);

// program_emit.cc: ops as instructions at the end of the last segment.
void emit(Draft& draft, const Site& at, const Op& op);
void emit_transfer(Draft& draft, const Site& at, const Op& op);

// program_sums.cc: sums over micro-batches as fixed trees. Their places; what a segment adds to them; their results,
// and whether the op is made with them.
void place_sums(Draft& draft, const Site& at, const SegmentKey& maker, int32_t places);
void add_to_sums(Draft& draft, const Site& at, const std::vector<TreeStep>& steps);
void finish_sums(Draft& draft, const Site& at, const std::map<SegmentKey, TreeUse>& trees);
bool stores_sum(const Lowering& low, const Op& op);

}  // namespace whale
