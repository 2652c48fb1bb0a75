// The order in which exact mode adds up micro-batches (semantics.md section 9, condition 4): a binary tree over their
// global numbers. Node [i, i + 2^(k + 1)) with i a multiple of its length, cut off at the last micro-batch, is the sum
// of its halves.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/terms.h"

namespace whale::proof {

class Tree {
 public:
  // Of an entry's micro-batches, which no two devices may cut differently; `exact`: otherwise any order will do.
  Tree(Reference& reference, const Entry& entry, bool exact);
  bool asked() const { return exact_; }
  // Whether parts of a sum with these terms and with those may be added.
  struct Said {
    std::string fault;     // why they are no halves of one node; "": they are, or are not of unlike micro-batches
    bool unknown = false;  // which micro-batches' they are, or only how many
    bool split = false;    // some are of other positions than samples
  };
  Said said_of(TensorId sum, const Terms& a, const Terms& b) const;

 private:
  // Sets of positions that stand for samples, of all terms; each once.
  std::vector<FactorSet> samples_of(const Terms& terms) const;
  bool has_others(const Terms& terms) const;
  std::optional<Interval> numbers(const FactorSet& terms) const;  // of the micro-batches whose terms they are
  Reference& ref_;
  std::vector<Interval> micro_batches_;  // their samples, ascending
  int64_t batch_ = 0;
  bool exact_ = false;
};

}  // namespace whale::proof
