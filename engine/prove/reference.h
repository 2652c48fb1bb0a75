// The one-device program of an entry as an index: a plan's kernels are looked up in it by what they read.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/factor_table.h"
#include "plan/plan.h"
#include "prove/program.h"

namespace whale::proof {

// Is an op linear in some of its operands, which are zeros each, or keeps zeros? So are its results then.
bool makes_zeros(OpCode code, const Factors& factors, const std::vector<char>& zero);

// Does it make nothing but elements of its first operand?
bool keeps_numbers(OpCode code);

class Reference {
 public:
  Reference(const Plan& plan, const Entry& entry, const Form& form);
  bool rounds_apart() const { return rounds_apart_; }  // OneDevice

  const Graph& graph() const { return g_; }
  const Tensor& tensor(TensorId id) const { return g_.tensor(id); }
  const Factors& factors(const Op& op) { return factors_.of(g_, op); }

  // Of values that are equal by form (views, ops that compute the same of the same, constants of one value) the first.
  TensorId root(TensorId id) const { return id == kNone ? kNone : root_[id]; }
  // The ops of this code that read these roots; null: none.
  const std::vector<OpId>* find(OpCode code, const TensorIds& roots) const;
  // Those of this code, whatever they read.
  const std::vector<OpId>& ops_of(OpCode code) const;

  // A number, of which every tensor that holds nothing else is a part.
  TensorId constant(DType dtype, double value);
  // Null: it is no tensor of one number; NaN: of which one is not known (the exponential of a constant, the loss
  // scale).
  const double* constant(TensorId root) const;
  // Does the op make one number of such?
  bool is_uniform(const Op& op, const TensorIds& roots) const;
  bool is_zero(TensorId root) const;  // or has no elements
  // What is linear in a summand of `sum`, told apart from what is linear in it elsewhere. Itself, if it is that sum.
  TensorId image_of(TensorId summand, TensorId sum);
  TensorId known_image_of(TensorId summand, TensorId sum) const;  // kNone: nobody has asked for it
  bool is_image_in(TensorId id, TensorId sum) const;              // is it one of some summand?
  // A name for these summands of a sum together: the same one for the same names.
  TensorId group_of(TensorId sum, const std::vector<TensorId>& names);
  // Is `fine` the name of a summand of what `coarse` names, or of one of its group, which has gone the same way since?
  bool is_finer(TensorId fine, TensorId coarse) const;
  // Are both operands of this addition sums, or summands, that have a tensor in common?
  bool shares_summands(OpId add) const { return shares_.contains(add); }

  // Is a tensor made of the other one, or of what that is an image of, by whatever way? Or is it that one.
  bool is_made_of(TensorId tensor, TensorId other) const;
  // Does what an op makes go into this tensor by one way alone: does each op between read it by one operand?
  bool is_by_one_way(TensorId tensor, OpId op) const;

  // What was cast to this, a wider type, from the type `to`: cast back it is what it was. kNone: nothing was.
  TensorId before_cast(TensorId wide, DType to) const;

  // What this is cast to by way of a wider type, which rounds nothing. kNone: it is not.
  TensorId cast_by_way(TensorId narrow, DType to) const;

  TensorId input(const std::string& name) const;     // kNone: none
  TensorId variable(const std::string& name) const;  // kNone: none
  TensorId step(StepScalar scalar) const;            // kNone: the program does not ask for it
  TensorId after_step(TensorId variable) const;      // what it becomes
  TensorId output(const std::string& name) const;    // "loss", a fetched name, "grad:NAME"; kNone: none

  // The gradient of a variable, or a summand of one.
  bool is_of_gradients(TensorId root) const { return of_gradients_.contains(root); }
  // A gradient that the loss is made of too (of a learned scale): what an option says of gradients is not said of that.
  bool is_gradient_in_loss(TensorId root) const { return in_loss_.contains(root); }

  // Do positions of an op's factor stand for samples?
  bool is_of_batch(OpId op, int32_t factor);

  // What the user called it, as near as the program knows.
  std::string name(TensorId id) const;

 private:
  struct Reads {
    OpCode code{};
    TensorIds roots;
    friend bool operator==(const Reads&, const Reads&) = default;
  };
  struct Hash {
    size_t operator()(const Reads& reads) const;
  };
  void index();
  std::vector<std::pair<int64_t, uint64_t>> broadcasts(const Op& op) const;
  bool same_elements(const Op& a, const Op& b) const;
  bool same_product(const Op& a, const Op& b) const;
  TensorId zero_like(TensorId id);
  bool makes_another(const Op& op, const TensorIds& roots) const;    // a number that is not zero, or none (0 / 0)
  TensorId beside_zero(const Op& op, const TensorIds& roots) const;  // what zeros are added to; kNone: none are
  void find_gradients();
  void find_batch();
  void find_shared();

  Reference(OneDevice program, bool exact);

  Graph g_;
  bool rounds_apart_ = false, exact_ = false;
  FactorTable factors_;
  std::vector<TensorId> root_;
  std::unordered_map<Reads, std::vector<OpId>, Hash> reads_;
  std::map<OpCode, std::vector<OpId>> of_code_;
  std::map<std::pair<DType, uint64_t>, TensorId> constants_;  // by its bits: -0 is another number than 0
  std::map<TensorId, double> values_;
  std::map<std::pair<TensorId, TensorId>, TensorId> images_;
  std::unordered_set<OpId> shares_;
  std::map<std::pair<TensorId, std::vector<TensorId>>, TensorId> groups_;
  std::unordered_map<TensorId, std::vector<TensorId>> members_;    // of a group
  std::unordered_map<TensorId, TensorId> image_from_, image_in_;   // the summand that it is an image of, and the sum
  mutable std::map<std::pair<TensorId, TensorId>, bool> made_of_;  // once they are asked for
  mutable std::map<std::pair<TensorId, OpId>, bool> one_way_;
  std::unordered_map<std::string, TensorId> inputs_, variables_, steps_;
  std::unordered_map<TensorId, TensorId> next_;
  std::unordered_set<TensorId> of_gradients_, in_loss_;
  std::set<std::pair<OpId, int32_t>> of_batch_;  // once it is asked for
  bool batch_found_ = false;
};

}  // namespace whale::proof
