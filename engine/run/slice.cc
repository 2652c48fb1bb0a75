#include "run/slice.h"

#include <set>
#include <string_view>

#include "run/bound.h"

namespace whale {
namespace {

class Slicer {
 public:
  Slicer(const Entry& entry, const std::vector<bool>& outputs_wanted)
      : entry_(entry), outputs_(outputs_wanted), links_(entry.links.size()) {
    for (const Program& program : entry.programs) {
      masks_.emplace_back();
      for (const Segment& segment : program.segments) masks_.back().emplace_back(segment.instructions.size(), 0);
      needed_.emplace_back(program.buffers.size());
    }
  }

  std::vector<Mask> run() {
    do {  // again, because a segment or a peer may read what a later run of another one left
      changed_ = false;
      for (size_t p = 0; p < masks_.size(); ++p)
        for (size_t s = masks_[p].size(); s-- > 0;)
          for (size_t i = masks_[p][s].size(); i-- > 0;)
            if (masks_[p][s][i] == 0 && wanted(p, entry_.programs[p].segments[s].instructions[i])) {
              masks_[p][s][i] = 1;
              take(p, entry_.programs[p].segments[s].instructions[i]);
            }
    } while (changed_);
    return std::move(masks_);
  }

 private:
  size_t root(size_t p, BufferId id) const { return static_cast<size_t>(root_of(entry_.programs[p], id)); }
  static bool is_link(const Instruction& i) {
    return i.kind == InstructionKind::kSend || i.kind == InstructionKind::kReceive;
  }

  bool wanted(size_t p, const Instruction& instruction) const {
    if (instruction.kind == InstructionKind::kFetch) return outputs_[static_cast<size_t>(instruction.ref)];
    if (is_link(instruction) && links_.at(static_cast<size_t>(instruction.ref))) return true;
    if (instruction.kind == InstructionKind::kCollective && collectives_.count({instruction.ref, instruction.name}))
      return true;
    for (const BufferId id : instruction.out)
      if (id != kNone &&
          (needed_[p][root(p, id)] || entry_.programs[p].buffers[root(p, id)].kind == BufferKind::kVariable))
        return true;
    return false;
  }

  void take(size_t p, const Instruction& instruction) {
    changed_ = true;
    for (const BufferId id : instruction.in)
      if (id != kNone) needed_[p][root(p, id)] = true;
    if (is_link(instruction)) links_[static_cast<size_t>(instruction.ref)] = true;
    if (instruction.kind == InstructionKind::kCollective) collectives_.emplace(instruction.ref, instruction.name);
  }

  const Entry& entry_;
  const std::vector<bool>& outputs_;
  std::vector<Mask> masks_;
  std::vector<std::vector<bool>> needed_;  // by storage, so that every write to a needed place is kept
  std::vector<bool> links_;
  std::set<std::pair<int32_t, std::string_view>> collectives_;  // group and name: the same op of the model
  bool changed_ = false;
};

}  // namespace

std::vector<Mask> slice(const Entry& entry, const std::vector<bool>& outputs_wanted) {
  return Slicer(entry, outputs_wanted).run();
}

int missing_input(const Program& program, const Mask& mask, const std::vector<const void*>& inputs) {
  for (size_t s = 0; s < mask.size(); ++s)
    for (size_t i = 0; i < mask[s].size(); ++i) {
      const Instruction& instruction = program.segments[s].instructions[i];
      if (mask[s][i] != 0 && instruction.kind == InstructionKind::kFeed &&
          inputs[static_cast<size_t>(instruction.ref)] == nullptr)
        return instruction.ref;
    }
  return -1;
}

}  // namespace whale
