#include "run/slice.h"

#include "run/bound.h"

namespace whale {

Mask slice(const Program& program, const std::vector<bool>& outputs_wanted) {
  Mask mask(program.segments.size());
  for (size_t s = 0; s < mask.size(); ++s) mask[s].assign(program.segments[s].instructions.size(), 0);
  std::vector<bool> needed(program.buffers.size());  // by storage, so that every write to a needed place is kept
  const auto root = [&](BufferId id) { return static_cast<size_t>(root_of(program, id)); };
  for (bool changed = true; changed;) {  // again, because a segment may read what a later run of another one left
    changed = false;
    for (size_t s = mask.size(); s-- > 0;)
      for (size_t i = mask[s].size(); i-- > 0;) {
        const Instruction& instruction = program.segments[s].instructions[i];
        bool wanted =
            instruction.kind == InstructionKind::kFetch && outputs_wanted[static_cast<size_t>(instruction.ref)];
        for (const BufferId id : instruction.out) {
          if (id == kNone) continue;
          wanted = wanted || needed[root(id)] || program.buffers[root(id)].kind == BufferKind::kVariable;
        }
        if (!wanted || mask[s][i] != 0) continue;
        mask[s][i] = 1;
        changed = true;
        for (const BufferId id : instruction.in)
          if (id != kNone) needed[root(id)] = true;
      }
  }
  return mask;
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
