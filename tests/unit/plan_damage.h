// Changes to finished plans: instructions put in, left out, made anew.
#pragma once

#include <stdexcept>
#include <string>

#include "ops/op.h"
#include "plan/plan.h"

namespace whale::test {

inline Instruction& named(Program& p, const char* name) {
  for (Segment& s : p.segments)
    for (Instruction& i : s.instructions)
      if (i.name == name) return i;
  throw std::runtime_error(std::string("no instruction ") + name);
}

inline void shift(Segment& s, size_t at, int by) {
  for (Instruction& i : s.instructions)
    for (Wait& w : i.waits)
      if (size_t(w.index) >= at) w.index += by;
}

inline void drop(Program& p, const char* name) {
  for (Segment& s : p.segments)
    for (size_t k = s.instructions.size(); k-- > 0;)
      if (s.instructions[k].name == name) s.instructions.erase(s.instructions.begin() + long(k)), shift(s, k, -1);
}

// `behind`: that many instructions behind the one of that name; 0: before it.
inline Instruction& put(Program& p, const char* name, const Instruction& i, size_t behind) {
  for (Segment& s : p.segments)
    for (size_t k = 0; k < s.instructions.size(); ++k)
      if (s.instructions[k].name == name) {
        shift(s, k + behind, 1);
        return *s.instructions.insert(s.instructions.begin() + std::ptrdiff_t(k + behind), i);
      }
  throw std::runtime_error(name);
}
inline Instruction& put_before(Program& p, const char* name, const Instruction& i) { return put(p, name, i, 0); }
inline Instruction& put_behind(Program& p, const char* name, const Instruction& i) { return put(p, name, i, 1); }

inline BufferId fresh(Program& p, const char* name, Dims dims, DType dtype = DType::kF32) {
  Buffer b;
  b.name = name, b.dtype = dtype, b.dims = dims, b.bytes = element_count(dims) * int64_t(size_of(dtype)),
  b.offset = p.arena_bytes;
  p.arena_bytes += (b.bytes + 63) / 64 * 64;
  p.buffers.push_back(b);
  return BufferId(p.buffers.size()) - 1;
}

inline Instruction made(OpCode op, const char* name, BufferIds in, BufferIds out, Attrs attrs = {}) {
  Instruction i;
  i.work = work::Kernel{.op = op, .attrs = complete_attrs(def(op), std::move(attrs))};
  i.name = name, i.in = in, i.out = out;
  return i;
}

}  // namespace whale::test
