// A case of the property "a plan never changes the result": a model, devices, and everything that a plan may choose, as
// a value and as a line of text:
//   graph tokens#3 split(2){ linear#9 } classes#1 | batch 5 | devices 2 | strategy replica(2) | zero 1 | ...
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "compile/compile.h"
#include "property.h"
#include "prove/prove.h"

namespace whale::test {

struct PlanCase {
  // Blocks of plan_blocks.h, "name#word", the word chooses the details, block i in the name scope "b<i>"; or ops of
  // random_graph, "op.name#word". Between "split(2){" and "}" they are in that scope.
  std::vector<std::string> graph;
  int64_t batch = 4, devices = 1, micro_batches = 1;
  std::string strategy, kind = "ref";  // of its devices; "lag@7": with that seed
  int ranks = 1;                       // that the devices are divided among
  std::string optimizer = "sgd#0";
  int zero = 0;
  std::vector<double> state_shares;
  int recompute = 0;  // of Recompute
  bool exact = false, fusion = true, overlap = true;
  int64_t bucket_bytes = 0;
  int steps = 3;
  int64_t last = 0;             // samples of one more step, a smaller one; 0: none
  int64_t evaluated = 0;        // samples of the evaluation; 0: the batch
  bool gradients = false;       // fetched too
  bool sparse_updates = false;  // updates of the rows that were looked up
  bool sliced = false;          // updates
  int64_t matmul_chunks = 1;
  int64_t prefetch = 0;
  uint32_t offload = 0;
  bool narrow_sums = false;  // over micro-batches, in float32: equal to its rounding
  // 1: small things count as large ones do, so that rewrites for large models happen; 2: and memory is dear.
  int profile = 0;
  int64_t unlike = 0;  // seed of the devices' speeds, by which shares are dealt where none are written; 0: all alike
};

std::string to_string(const PlanCase& c);  // one line; what is at its default is left out
PlanCase parse_case(std::string_view line);

Graph graph_of(const PlanCase& c);
CompileOptions options_of(const PlanCase& c, const Graph& graph);
int64_t micro_batches_of(const PlanCase& c);  // those of its pipeline, or its own
bool splits(const PlanCase& c);
std::string devices_of(const PlanCase& c);  // as a device list

// Of 1 to 8 devices; where `most` is larger, of 9 to about `most`.
PlanCase random_plan_case(Dice& dice, int64_t most = 8);
std::vector<PlanCase> smaller_cases(const PlanCase& c);  // the boldest first; each could fail for the same reason

enum class Outcome {
  kEqual,
  kRefused,    // by a message that says why; nothing ran, or a smaller batch did not
  kNotStable,  // until the model itself left the numbers: what was before is equal
  kRounding,   // no further apart than one device from itself, begun a rounding apart
  kWrong
};
std::string_view name_of(Outcome outcome);

struct Verdict {
  Outcome outcome = Outcome::kEqual;
  std::string text;  // why it is refused, or what is wrong
  int steps = 0;     // that were compared
  // What the prover says of the same plan, without a run; nothing: there was no plan.
  std::optional<ProofVerdict> proof = {};
  std::string construct = {};  // that it has no rule for
};
// Trains some steps on the case's devices and on one reference device, in float64 (semantics.md section 10), then a
// smaller step and an evaluation: losses, outputs, fetched gradients, and every variable; bit by bit in exact mode
// (section 9). A plan that is refuted is wrong, whatever its run gave.
Verdict verdict_on(const PlanCase& c);

}  // namespace whale::test
