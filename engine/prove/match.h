// A kernel beside one op of the one-device program: what of it the operands are cut to, found in steps.
#pragma once

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "prove/kernel.h"

namespace whale::proof {

// Does it make some rows of a product, which may be no box of its leading dimensions (lower/chunk_products)? Or have
// they been reshaped.
bool makes_rows(const KernelCall& call, const Graph& graph, const Op& op);

// The factor of which the operand's dimension 0 has a row for each group of positions; -1: none.
int group_of(const std::vector<Factor>& list, size_t operand, bool input);

struct Kernels::Match {
  Kernels& kernels;
  Reference& ref;
  const KernelCall& call;
  OpId id;
  const Op& op;
  FactorSplits splits;
  const bool rows;
  const Shape& shape;
  const std::vector<Factor>& list;
  // Of each factor.
  std::vector<std::optional<Digit>> of;
  std::vector<std::optional<Interval>> read;  // through a window
  std::vector<int64_t> anywhere;              // likewise, so many that are all the same
  std::vector<Digit> sets = {};
  std::vector<size_t> partial = {};  // operands with terms
  std::vector<size_t> cut = {};      // factors that are not whole
  std::optional<Interval> groups = {};
  Terms terms = {};                                 // that operands have
  std::set<std::pair<TensorId, size_t>> ways = {};  // of what both operands are made, by which of them terms come
  Joining combine = {};

  Match(Kernels& by, const KernelCall& with, OpId of_op, const FactorSplits& how)
      : kernels(by),
        ref(by.ref_),
        call(with),
        id(of_op),
        op(ref.graph().op(of_op)),
        splits(how),
        rows(makes_rows(with, ref.graph(), op)),
        shape(by.shape_of(of_op, rows, how)),
        list(shape.factors->list),
        of(list.size()),
        read(list.size()),
        anywhere(list.size()) {}

  // As the layout has it.
  Dims local_of(size_t operand) const { return rows ? in_rows(call.in[operand].local) : call.in[operand].local; }
  void take(int f, const Digit& d, size_t operand);
  FactorSplit take_operands();  // or how a factor has to be split first
  void take_constants();
  void take_windows();
  Interval window_of(size_t f) const;
  void take_results();
  void place_any();
  void find_cut();
  Digit looked_up(size_t f, int64_t n) const;
  void find_groups();
  void find_terms();
  void tell_apart(size_t operand, TensorId other);
  Value result(size_t o) const;
  Region region_of(size_t result) const;
  uint64_t order_of(const Value& result) const;
  void name_terms(size_t o, Value& value) const;
  std::optional<size_t> inner_of(size_t f) const;
  std::optional<FactorSet> cut_of(size_t f) const;
  void check_operands() const;
};

}  // namespace whale::proof
