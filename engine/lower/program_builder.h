// The program of one class of devices: instructions over local buffers, before storage is shared and placed
// (storage.h).
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "lower/localise.h"
#include "lower/lower.h"
#include "lower/tree.h"
#include "schedule/schedule.h"

namespace whale {

// A program under construction: beside each instruction of each segment, the op that it came from (null: feed, fetch).
struct Draft {
  Program program;
  std::vector<std::vector<const Op*>> ops;
  std::vector<Region> regions;                      // per segment
  std::vector<int64_t> micro_batches;               // per segment: the one it was built for, of its size
  std::vector<std::pair<BufferId, BufferId>> next;  // (variable's buffer, buffer of its next value)
};

// What all programs of an entry share.
struct Lowering {
  Lowering(const LayoutGraph& graph, const LowerOptions& lower_options)
      : lg(graph), options(lower_options), local(graph) {}

  const LayoutGraph& lg;
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
  std::vector<std::vector<OpId>> readers;       // per tensor
  std::vector<char> kept;                       // per tensor: fetched, or a variable's next value
  std::vector<std::vector<OpId>> ops_of_mesh;   // what its devices run, send or receive, in order
  std::map<TensorId, int32_t> input_number;     // forms of inputs too
  std::map<TensorId, int32_t> variable_number;  // of the plan
  std::vector<char> early_input;                // per tensor: read in the prologue or the body

  void index();  // fills these in
  int32_t mask_number(uint64_t mask) const;
};

class ProgramBuilder {
 public:
  ProgramBuilder(const Lowering& lowering, Place place);
  Draft build();

 private:
  struct SegmentKey {  // of the body
    int32_t stage = -1;
    WorkKind kind{};
    int32_t variant = -1;  // micro-batches of one size: the first of them
    friend auto operator<=>(const SegmentKey&, const SegmentKey&) = default;  // NOLINT(modernize-use-nullptr)
  };
  int32_t build_segment(Region region, const SegmentKey& key, const std::string& name);
  void schedule_accumulation();
  void schedule_pipeline();
  void messages_at_the_ends();
  void assign_slots(const std::map<int32_t, int64_t>& slots_of);  // by segment
  void emit(const Op& op);
  void emit_transfer(const Op& op);
  void emit_identity(const Op& op, size_t output);
  void feed_for(TensorId id);
  void fetch(size_t output);
  void fetch_made_by(const Op& op, bool at_end);
  BufferId buffer(TensorId id);
  int64_t begin_of_view(TensorId id) const;
  Dims dims(TensorId id) const { return low_.local.dims(id, place_); }
  bool empty(TensorId id) const;
  bool reads_nothing(const Op& op) const;
  bool nobody_has_any(const Op& collective, const Instruction& instruction) const;
  void begin_sums();
  bool on_this_mesh(int32_t stage) const;
  bool in_segment(const Op& op) const;
  bool sends_here(const Op& transfer) const;
  // Sums over micro-batches as trees (exact mode).
  bool is_tree(const Op& op) const { return lg_.exact && op.code == OpCode::k_accumulate; }
  std::vector<const Op*> trees(const SegmentKey& key) const;
  void plan_trees(const SegmentKey& key, const std::vector<int64_t>& order);
  void merge_row(const SegmentKey& key, int32_t base, const ScheduleRow& row);  // gives `merged_`
  void finish_trees();
  BufferId flat(const std::string& name, DType dtype, int64_t rows, int64_t elements, BufferId alias = kNone);
  // Sums of a tree that wait in the host's memory: a copy on the device, and back.
  bool offloaded(const Op& op) const;
  BufferId here(const Op& op, BufferId sum);
  void put_away(const Op& op, BufferId value, BufferId sum);
  void move(const Op& op, OpCode code, BufferId from, BufferId to);
  BufferId gather_nodes(const Op& op, std::vector<TreeNode>& rows);
  std::vector<TreeNode> nodes_under(const Place& place, size_t axis) const;
  WorkKind work_of(const Op& op) const;
  bool fed_here(TensorId input) const;
  Instruction& add(Instruction instruction, const Op* op);

  const Lowering& low_;
  const LayoutGraph& lg_;
  const Graph& g_;
  Place place_;  // its micro-batch: the representative one of the segment under construction
  bool timed_;   // more than one micro-batch
  Draft draft_;
  std::map<std::pair<TensorId, int32_t>, BufferId> buffers_;
  std::vector<char> early_input_;  // read in the prologue or, whole, in the body
  // The segment under construction.
  Region region_{};
  SegmentKey key_;
  std::map<TensorId, bool> fed_;
  // Exact mode. By stage and kind of work: the tree, and how many leaves have been added; by op: its places for sums.
  struct TreeUse {
    TreePlan plan;
    size_t next = 0;
  };
  std::map<std::pair<int32_t, WorkKind>, TreeUse> trees_;
  std::map<const Op*, std::vector<BufferId>> sums_;
  std::map<std::pair<SegmentKey, std::vector<TreeStep>>, int32_t> merges_;
  std::optional<ScheduleRow> merged_;
  std::set<const Op*> emitted_;         // before their place
  std::map<int32_t, int32_t> follows_;  // of a segment that adds to sums: the one that makes what it adds
};

}  // namespace whale
