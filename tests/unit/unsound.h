// Plans that are not their program, and how tests say of them what a proof should.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "plan/row_waits.h"
#include "proof_case.h"
#include "unit/caught.h"

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

// All on one queue, one behind the other.
inline void in_order(Program& p) {
  for (Segment& s : p.segments)
    for (Instruction& i : s.instructions) i.waits.clear(), i.queue = Queue::kCompute;
}

}  // namespace whale::test
