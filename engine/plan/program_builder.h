// The program of one class of devices: instructions over local buffers, before storage is shared and placed
// (storage.h).
#pragma once

#include <map>
#include <vector>

#include "plan/localise.h"
#include "plan/lower.h"

namespace whale {

// A program under construction: beside each instruction of each segment, the op that it came from (null: feed, fetch).
struct Draft {
  Program program;
  std::vector<std::vector<const Op*>> ops;
  std::vector<Region> regions;                      // per segment
  std::vector<std::pair<BufferId, BufferId>> next;  // (variable's buffer, buffer of its next value)
};

class ProgramBuilder {
 public:
  ProgramBuilder(const LayoutGraph& graph, const BatchCut& cut, const LowerOptions& options, int64_t device);
  Draft build();

 private:
  struct Variant {  // of the body: micro-batches with the same sizes
    int64_t run = 0, both = 0;
    friend bool operator==(const Variant&, const Variant&) = default;
  };
  void build_segment(Region region, int variant, const std::string& name);
  void emit(const Op& op);
  void emit_identity(const Op& op, size_t output);
  void feed_for(TensorId id);
  void fetch(size_t output);
  void fetch_made_by(const Op& op, bool at_end);
  BufferId buffer(TensorId id);
  Dims dims(TensorId id) const;
  bool empty(TensorId id) const;
  bool in_segment(const Op& op) const;
  bool fed_here(TensorId input) const;
  Instruction& add(Instruction instruction, const Op* op);
  void bridge_attrs(const Op& op, Attrs& attrs) const;

  const LayoutGraph& lg_;
  const Graph& g_;
  const BatchCut& cut_;
  const LowerOptions& options_;
  size_t device_;
  bool timed_;  // more than one micro-batch
  std::vector<Variant> variants_;
  Draft draft_;
  std::map<std::pair<TensorId, int>, BufferId> buffers_;
  std::map<TensorId, int32_t> input_number_, variable_number_;
  std::vector<char> early_input_;  // read in the prologue or, whole, in the body
  // The segment under construction.
  Region region_{};
  int variant_ = 0;
  int32_t micro_batch_ = 0;  // a representative one, for intervals
  std::map<TensorId, bool> fed_;
};

}  // namespace whale
