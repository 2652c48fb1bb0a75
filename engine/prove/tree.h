// What says the bits, in exact mode. Micro-batches are added by a binary tree over their global numbers (semantics.md
// section 9, condition 4): node [i, i + 2^(k + 1)) with i a multiple of its length, cut off at the last micro-batch, is
// the sum of its halves. Everything else (which parts of a sum are added first, what is made of them before the next,
// how much a kernel makes at once) goes on with each value as a number, Value::order: of one tensor of one program,
// values of one order have the same bits.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "prove/reference.h"
#include "prove/value.h"

namespace whale::proof {

class Tree {
 public:
  static constexpr uint64_t kUntold = ~uint64_t{0};  // nothing says its bits; so it is of all that is made of it
  // Of an entry's micro-batches, which no two devices may cut differently; `exact`: otherwise any order will do.
  Tree(Reference& reference, const Entry& entry, bool exact);
  bool asked() const { return exact_; }
  // Why parts of a sum with these terms and with those may not be added: they are of micro-batches that are no halves
  // of one node. "": they are, or are not of unlike micro-batches.
  std::string fault_of(TensorId sum, const Terms& a, const Terms& b) const;

  // Value::order of ...
  uint64_t added(const Value& a, const Value& b) const;  // both, terms of one sum
  // Zeros added to it, 0 or -0: -0 and 0 is 0.
  uint64_t beside_zero(const Value& v, const Value& zeros, double zero) const;
  uint64_t cast(const Value& v, DType to) const;  // it, in another type than the program has it
  // What an op makes of values of these orders; `kernel`: what makes it, `dims`: of operands, where it matters how much
  // is made at once.
  uint64_t made(const Value& result, std::string_view kernel, const std::vector<uint64_t>& orders,
                const std::vector<Dims>& dims) const;
  // Parts of one value, each in this place of the tensor. kUntold: they were made in unlike ways, and a place is not
  // said.
  static uint64_t put_together(const std::vector<uint64_t>& orders, const std::vector<Region>& places);

  // What a step leaves, or hands out, under this name.
  void deliver(const std::string& name, const Dims& dims, const Value& value);
  // Of all that was delivered, by name; empty: copies of some are not alike.
  std::map<std::string, uint64_t> orders() const;

 private:
  // Sets of positions that stand for samples, of all terms; each once.
  std::vector<FactorSet> samples_of(const Terms& terms) const;
  std::optional<Interval> numbers(const FactorSet& terms) const;  // of the micro-batches whose terms they are
  uint64_t hash(const FactorSet& f) const;
  uint64_t hash(const Terms& terms, const Terms& besides) const;
  struct Delivered {
    Region region;
    uint64_t order = 0;
  };
  Reference& ref_;
  std::vector<Interval> micro_batches_;  // their samples, ascending
  int64_t batch_ = 0;
  bool exact_ = false;
  std::map<std::string, std::vector<Delivered>> delivered_;  // each part once
  bool alike_ = true;
};

}  // namespace whale::proof
