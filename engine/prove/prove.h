// Is a plan equal to the one-device program of its source? Found without running it (docs/proof.md).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "plan/fault.h"
#include "plan/plan.h"
#include "prove/symmetry.h"

namespace whale {

enum class ProofVerdict : uint8_t {
  kProven,
  kRefuted,     // some rule says that it is not, or that it cannot be seen to be
  kNotCovered,  // there is no rule for something in it: nothing is said
};
inline constexpr const char* kVerdicts[] = {"proven", "refuted", "not covered"};
inline const char* name_of(ProofVerdict verdict) { return kVerdicts[static_cast<size_t>(verdict)]; }

struct EntryProof {
  std::string entry;
  int64_t batch = 0;
  ProofVerdict verdict = ProofVerdict::kNotCovered;
  std::string what;       // proven: the statement; else what was expected and found, or what no rule is there for
  std::string construct;  // not covered: the op or construct, for counts
  InstructionPlace at;    // where the walk ended; of a device and no instruction: what it ends with or is
  std::vector<std::string> path;  // who made what it reads
  int64_t walked = 0;             // instructions
  // In exact mode, if it is proven: plans of one program that have the same give the same bits, as far as kernels are
  // the same (docs/proof.md). Else "".
  std::string order;
  std::vector<std::pair<std::string, std::string>> orders;  // the same of each variable and output, by name
};

struct Proof {
  ProofVerdict verdict = ProofVerdict::kProven;  // the worst of the entries': refuted before not covered
  std::vector<EntryProof> entries;
  std::string program;  // a hash of the source, whatever the strategy; "": it contradicts itself
};

// The order (waits, reuse of memory, messages, collectives) is verify(plan)'s, which is asked first. shown: how far it
// is (base/progress.h).
Proof prove(const Plan& plan, bool shown = false);
EntryProof prove(const Plan& plan, const Entry& entry, proof::Symmetry::Sought sought = proof::Symmetry::Sought::kYes,
                 bool shown = false);

Proof refutation(const PlanFault& fault);  // of a plan that contradicts itself

std::string text(const Proof& proof);  // for a terminal
std::string to_json(const Proof& proof);

}  // namespace whale
