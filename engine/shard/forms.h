// Where every value lies while cuts are chosen, and what the reshards of insert.h will make of it for its readers,
// with none inserted: a partial value that was reduced once is reduced for all later readers.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "shard/cut_problem.h"
#include "shard/cuts.h"

namespace whale {

// How whoever reads a tensor now gets it.
struct Form {
  Sharding sharding = {};
  int32_t stage = 0;
  bool late = false;   // it exists only after the body: made of sums over micro-batches
  int reductions = 0;  // a value that was reduced is another one: copies of it are made anew
};

// A value on its way to one reader.
struct ReadForm {
  Form* form = nullptr;  // null: kNone, or a form of this reader's own
  Sharding sharding = {};
  bool late = false;
};

class Forms {
 public:
  // `forms`: per tensor; results of ops are to be set.
  Forms(const CutProblem& problem, std::vector<Form> forms) : p_(problem), forms_(std::move(forms)) {}

  Form& of(TensorId id) { return forms_[id]; }
  const Form& of(TensorId id) const { return forms_[id]; }
  void charge_to(Price& price) { price_ = &price; }  // what moves, until the next call

  ReadForm operand(TensorId id, const Op& reader);  // in the reader's stage
  ReadForm as_made(TensorId id) { return {&of(id), of(id).sharding, false}; }
  // Of an op in the body of micro-batches, what exists only after it is taken whole; behind it, sums are finished.
  void hoist(std::vector<ReadForm>& operands, const Op& op, OpId number) const;
  void to_sharding(ReadForm& operand, TensorId id, const Op& reader, size_t axis, const AxisSharding& want);
  // `form`: for all later readers too; may be null.
  void reduce_over_time(Sharding& sharding, Form* form) const;

 private:
  Form& at_stage(TensorId id, const Op& reader);
  void reduce(ReadForm& operand, TensorId id, const Op& reader, size_t axis);
  void move(ReadForm& operand, TensorId id, const Op& reader, size_t axis, const AxisSharding& to);
  void with_halo(ReadForm& operand, TensorId id, const Op& reader, size_t axis, const AxisSharding& want);
  void sum_in_groups(ReadForm& operand, TensorId id, const Op& reader, size_t axis);
  bool is_summed_over_replicas(const ReadForm& operand, TensorId id, size_t axis) const;  // the gradient of a parameter
  void combine_by_adasum(ReadForm& operand, TensorId id, const Op& reader, size_t axis);
  void sum_over_splits(ReadForm& operand, TensorId id, const Op& reader, size_t axis, const AxisSharding& want);
  void charge(const Price& price) { *price_ += price; }

  const CutProblem& p_;
  Price* price_ = nullptr;
  std::vector<Form> forms_;
  std::map<std::tuple<TensorId, int32_t, int>, Form> copies_;  // in other stages, by reductions before
  using Moved = std::tuple<const Form*, int, size_t, Placement, int, int64_t, int64_t, bool, WindowRead>;
  std::map<Moved, Form> moved_;  // along an axis
};

}  // namespace whale
