// Which terms of a sum a value has. Where an op is cut along a factor that it reduces, a part of its result has the
// terms of the factor's positions there alone; what is linear in it passes them on. A value without terms is whole.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ir/graph.h"
#include "prove/set.h"

namespace whale::proof {

// Positions of factors of the one-device program's ops: the terms at all of them together. A factor that is not named
// is there as a whole.
struct FactorKey {
  OpId op = kNone;
  int32_t factor = 0;
  friend auto operator<=>(const FactorKey&, const FactorKey&) = default;  // NOLINT(modernize-use-nullptr)
};
struct FactorSet {
  FactorKey key;
  int64_t extent = 0;
  Set set;
  bool any = false;  // all terms along it are alike: set.size() of them
  friend bool operator==(const FactorSet&, const FactorSet&) = default;
};
using TermBox = std::vector<FactorSet>;  // ascending by key

// The terms of one tensor in a sum that it is a summand of, or the sum itself: disjoint boxes.
struct Summand {
  TensorId tensor = kNone;
  std::vector<TermBox> boxes;
  friend bool operator==(const Summand&, const Summand&) = default;
};

class Terms {
 public:
  const std::vector<Summand>& summands() const { return summands_; }
  static Terms of(std::vector<Summand> ascending);  // whole where each of them is
  std::vector<TensorId> names() const;              // of its summands, ascending
  void name_as(std::vector<TensorId> ascending);    // of one summand: each of these has its terms
  bool whole() const { return summands_.empty(); }
  // A summand of its own with these terms, or all of them.
  void add_summand(TensorId tensor, TermBox box = {});
  // No terms of what this tensor is or may be a sum of; whatever they are called elsewhere.
  static Terms none(TensorId tensor);
  // What is linear in a sum is a sum of as many terms: where it has one summand, that is this tensor now.
  void rename(TensorId tensor);
  bool alike() const;  // several summands of like terms
  // One summand, this tensor, where all that there are have alike terms.
  void unite(TensorId tensor);
  // Likewise of each lot of summands that have alike terms, by a name for the names of the lot.
  void unite_lots(const std::function<TensorId(const std::vector<TensorId>&)>& name);
  // Each summand by another name, which no two of them share.
  void rename_each(const std::function<TensorId(TensorId)>& name);
  // Of one sum, one with this tensor's own terms and one with those of its summands: both with its own, where those are
  // alike and it says which they are (`told`), or both with those of its summands, all of which are named.
  static void name_alike(Terms& a, Terms& b, TensorId tensor, const std::function<bool(const Terms&)>& told);
  bool counted() const;  // of some terms only the number is known
  // Has each box positions of this factor, known ones of so many?
  bool all_have(FactorKey key, int64_t extent) const;
  // The positions of a factor, which all of them have, counted from elsewhere: so many further on, of another extent.
  void count_from(FactorKey key, int64_t further, int64_t extent);
  // Each term at these positions only.
  void restrict(const TermBox& box);
  // Of a product of two sums, one of them of one summand: every term of one with every term of the other. None: they
  // have a factor in common, or both have several summands.
  std::optional<Terms> times(const Terms& other) const;
  // Beside terms of other summands; false: a summand is one of both.
  bool beside(const Terms& other);
  // Are they of the same summands, but for those that one has no terms of? Each names all summands of its sum; those of
  // a sum and those of a summand of it cannot be told apart.
  bool named_as(const Terms& other) const;
  // Terms of the same sum, named as these: returns a summand that both have some of (then nothing is right), or kNone.
  TensorId join(const Terms& other);
  // Likewise, where `other` are terms of some summands of this sum: the rest of them is still missing.
  TensorId join_some(const Terms& other);

  friend bool operator==(const Terms&, const Terms&) = default;

 private:
  void settle();
  bool has_names_of(const Terms& other) const;
  Terms without_none() const;
  std::vector<Summand> summands_;  // ascending
};

// Is it what is combined of nothing? `combine`: by name.
bool is_neutral(std::string_view combine, double value);

}  // namespace whale::proof
