// Plans that are not their program, and how tests say of them what a proof should.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "own_programs.h"
#include "plan/row_waits.h"
#include "plan_damage.h"
#include "proof_case.h"
#include "unit/caught.h"
#include "unit/small_models.h"

namespace whale::test {

// An undamaged one is proven, the others are refuted, or there is no rule for them where it says so.
inline void say(const char* what, Plan& plan, size_t entry = 0) {
  for (Program& p : plan.entries[entry].programs) add_row_waits(p);
  const EntryProof proof = prove(plan, plan.entries[entry]);
  const ProofVerdict wanted = has(what, "undamaged") ? ProofVerdict::kProven
                              : has(what, "no rule") ? ProofVerdict::kNotCovered
                                                     : ProofVerdict::kRefuted;
  CHECK_MESSAGE(proof.verdict == wanted, std::string(what) << ": " << proof.what);
}

inline std::vector<Instruction>& body(Program& p) { return p.segments[0].instructions; }

inline Dims rows(int64_t n) { return {n, 4}; }
inline Instruction filled(const char* name, BufferId out, double value, int64_t n = 8) {
  return made(OpCode::k_fill, name, {}, {out}, {{"shape", rows(n)}, {"value", value}, {"dtype", std::string("f32")}});
}
inline BufferId buffer(const Program& p, const char* name) {
  for (size_t k = 0; k < p.buffers.size(); ++k)
    if (p.buffers[k].name == name) return BufferId(k);
  throw std::runtime_error(name);
}
inline TensorId number(small::Model& m, const char* name, double value) {
  return m.op(OpCode::k_fill, {}, {{"shape", Ints{8, 4}}, {"value", value}, {"dtype", std::string("f32")}}, name);
}
inline Plan alone(small::Model& m, bool exact = false) {
  return plan_of(m.g, "null:1", "replica(1)", [&](CompileOptions& o) { o.fusion = false, o.exact = exact; });
}
// Ops of these results again, before an instruction, their results in buffers of their own.
inline BufferId again(Program& p, const char* before, OpCode op, const char* name, BufferIds in) {
  const BufferId out = fresh(p, name, rows(8));
  put_before(p, before, made(op, name, std::move(in), {out}));
  return out;
}

// All on one queue, one behind the other.
inline void in_order(Program& p) {
  for (Segment& s : p.segments)
    for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
}

}  // namespace whale::test
