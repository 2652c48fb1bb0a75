// The order of additions, which exact mode promises. Micro-batches are added by a binary tree over their global numbers
// (semantics.md section 9, condition 4): node [i, i + 2^(k + 1)) with i a multiple of its length, cut off at the last
// micro-batch, is the sum of its halves. Everything that else says the bits is told by a number: plans of one program
// that have the same number add the same parts in the same order, and their kernels work on the same shapes.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/shapes.h"
#include "prove/value.h"

namespace whale::proof {

class Tree {
 public:
  // Of an entry's micro-batches, which no two devices may cut differently; `exact`: otherwise any order will do.
  Tree(Reference& reference, const Entry& entry, const Symmetry& symmetry, bool exact);
  bool asked() const { return exact_; }
  // Why parts of a sum with these terms and with those may not be added: they are of micro-batches that are no halves
  // of one node. "": they are, or are not of unlike micro-batches.
  std::string fault_of(TensorId sum, const Terms& a, const Terms& b) const;

  // Value::order of what is ...
  uint64_t added(const Value& a, const Value& b) const;                // both, terms of one sum
  uint64_t beside(const Value& a, const Value& b) const;               // both, terms of summands of their own
  uint64_t made_of(uint64_t order, TensorId of, TensorId made) const;  // an op that is linear in it
  static uint64_t put_together(const std::vector<uint64_t>& orders);
  // All terms are there.
  void close(Value& sum);
  // An op whose bits depend on how much of it is computed at once.
  void compute(int32_t device, const Op& op, const std::vector<Dims>& operands, const Value& result);
  std::string order() const;  // 16 hexadecimal digits

 private:
  // Sets of positions that stand for samples, of all terms; each once.
  std::vector<FactorSet> samples_of(const Terms& terms) const;
  std::optional<Interval> numbers(const FactorSet& terms) const;  // of the micro-batches whose terms they are
  uint64_t hash(const FactorSet& f) const;
  uint64_t hash(const Terms& terms, const Terms& besides) const;
  Reference& ref_;
  std::vector<Interval> micro_batches_;  // their samples, ascending
  int64_t batch_ = 0;
  bool exact_ = false;
  std::map<TensorId, std::map<uint64_t, std::set<uint64_t>>> sums_;  // orders of each, and which elements have it
  Shapes shapes_;
};

// Of elements, as a number that tells them apart from others, beside another one.
uint64_t hash(uint64_t beside, const Region& region);

}  // namespace whale::proof
