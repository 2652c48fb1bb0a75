// Programs that differ only by where along an axis their device is: one is built, with holes for what the place says,
// and rows fill them.
#pragma once

#include <optional>

#include "lower/program.h"
#include "plan/placed.h"

namespace whale {

// Does the place say no more than what an instruction can leave open, or where its result lies in a variable? Otherwise
// it says what is built.
bool is_patched(const ShardedGraph& graph, const Op& op);

class ProgramPattern {
 public:
  // Of a draft whose storage is shared; `place`: where it was built for.
  ProgramPattern(const Lowering& lowering, const Draft& draft, const Place& place);

  // All that a place might say, whether it does or not; what place says it.
  const std::vector<Hole>& holes() const { return holes_; }
  // Their values for a device of the same local sizes. `program`: what was made from the draft. None: something that
  // follows from the place says more, and the device has another program.
  std::optional<Ints> at(const Program& program, const Place& place);

 private:
  // An instruction.
  struct Spot {
    const Op* op = nullptr;
    int64_t micro_batch = 0;
    Attrs attrs;
    Box box;
    double flops = 0, bytes = 0;
  };
  // A buffer that is part of a storage.
  struct Part {
    int64_t at = 0;                                   // besides the views
    std::vector<std::pair<TensorId, int64_t>> views;  // by which it is reached, each with its micro-batch
  };
  // What depends on the place along the same axes of the mesh.
  struct Group {
    std::vector<size_t> axes;
    std::vector<Spot> spots;
    std::vector<Part> parts;
    std::vector<Hole> holes;                    // of the spots, then of the parts
    std::map<Ints, std::optional<Ints>> known;  // values, by coordinates along them
  };

  Group& group_of(const std::vector<size_t>& axes);
  void add_instructions(const Draft& draft, const Place& place);
  void add_parts(const Draft& draft, const Place& place);
  std::optional<Ints> values_of(const Group& group, const Place& place) const;
  bool add_values(const Spot& spot, Place place, Ints& values) const;
  int64_t begin_of_views(const Part& part, Place place) const;

  const Lowering& low_;
  std::vector<Group> groups_;
  std::vector<Hole> holes_;
  std::optional<Overlaps> overlaps_;
  std::map<Ints, bool> overlaps_hold_;  // by the values of the parts
};

}  // namespace whale
