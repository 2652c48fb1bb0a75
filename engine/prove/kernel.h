// The rule of kernels: ops of the one-device program that read what the operands hold, on the part of each factor that
// the operands are cut to.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "prove/reference.h"
#include "prove/sum.h"
#include "prove/tree.h"
#include "prove/value.h"

namespace whale::proof {

struct Operand {
  const Value* value = nullptr;  // null: absent
  Dims local;
  std::string_view name = {};  // of its buffer, if it has one
};
struct Result {
  Dims local;
  DType dtype = DType::kF32;
};

struct KernelCall {
  OpCode code{};
  Attrs attrs = {};
  uint64_t key = 0;
  const Box* box = nullptr;
  Interval samples = {};  // those of the batch that the device works on
  int32_t device = -1;
  std::string name = {};   // of the instruction
  bool forward = true;     // false: the ops of the program that it may be of have names of their own
  std::string whole = {};  // the kernel that it is a part of, as the device runs it; "": it is the kernel
  std::vector<Operand> in = {};
  std::vector<Result> out = {};  // as the plan has them

  TensorIds roots() const;               // what operands hold, kNone where one is absent
  std::vector<uint64_t> orders() const;  // of operands, 0 of one that is absent
};

// A factor as two: the inner one, behind all others, is of this extent. Where an operand is the same all along a part
// of it.
struct FactorSplit {
  int factor = -1;  // none
  int64_t inner = 1;
  friend auto operator<=>(const FactorSplit&, const FactorSplit&) = default;  // NOLINT(modernize-use-nullptr)
};
using FactorSplits = std::vector<FactorSplit>;  // one after the other

class Kernels {
 public:
  // `sum_dtypes`: types that the plan's options ask for sums of gradients.
  Kernels(Reference& reference, std::vector<DType> sum_dtypes, Tree& tree)
      : ref_(reference), sum_dtypes_(std::move(sum_dtypes)), tree_(tree) {}
  std::vector<Value> run(const KernelCall& call);
  // Where rounding is another one than the program's, in words.
  const std::set<std::string>& exemptions() const { return exemptions_; }
  // Was a place taken for another one that would do? What is refused after that may be for it.
  bool guessed() const { return guessed_; }
  void exempt(std::string what) { exemptions_.insert(std::move(what)); }

 private:
  // The digits of an operand or result that factors own, outermost first; -1: no factor's.
  struct Layout {
    Dims dims, digits;
    std::vector<int> owner, dim;
  };
  struct Shape {
    const Factors* factors = nullptr;
    Factors own = {};  // where they are not the op's
    std::vector<Layout> in, out;
  };
  // `rows`: of a product's leading dimensions as one.
  const Shape& shape_of(OpId op, bool rows, const FactorSplits& splits);
  struct Match;
  struct Windows {
    Interval read, made;
  };
  static FactorSplit split_of(const Region& region, const Layout& layout, const std::vector<Factor>& list);

  bool is_whole(const KernelCall& call) const;
  std::optional<Value> wide_bias(const KernelCall& call);
  std::vector<Value> fused(const KernelCall& call);
  std::vector<Value> updates(const KernelCall& call);
  std::vector<Value> parts(const KernelCall& call, const Graph& scratch, const TensorIds& results);
  std::vector<Value> accumulate(const KernelCall& call, std::string_view combine);
  // Two pieces of what a factor of kind kStream reads.
  std::vector<Value> merge(const KernelCall& call);
  void check_lines(const KernelCall& call, const Factors& factors) const;
  std::vector<Value> slice(const KernelCall& call);
  std::optional<Value> cast(const KernelCall& call);
  bool is_asked_sum(const Value& value) const;  // a gradient in a type that an option asks for
  void exempt_sum(const Value& value);
  // More terms of a sum, beside those that it has.
  std::optional<std::vector<Value>> of_whole_summands(const KernelCall& call);
  std::optional<Value> more_terms(const KernelCall& call);
  std::optional<Value> two_of_sum(const KernelCall& call);
  std::optional<std::vector<Value>> of_summand(const KernelCall& call);
  std::optional<Value> part_of_one(const KernelCall& call);
  Value constant(const Result& result, double value);
  bool has(const KernelCall& call) const;
  std::optional<Value> as_number(const KernelCall& call);
  std::vector<Value> zeros(const KernelCall& call);
  std::vector<Value> one(const KernelCall& call);
  std::vector<Value> without_elements(const KernelCall& call);
  std::vector<Value> nothing(const KernelCall& call);
  std::vector<Value> match(const KernelCall& call, OpId op, const FactorSplits& splits = {});
  Interval made_through(const KernelCall& call, const Op& op, const Factor& factor, Interval held,
                        const std::optional<Digit>& said) const;
  std::optional<Value> of_numbers(const KernelCall& call);
  std::optional<std::vector<Value>> with_asked_zeros(const KernelCall& call);
  std::optional<std::vector<Value>> of_own_zeros(const KernelCall& call);
  // Which sums: any, those of the instruction's name, or where the op that makes those zeros makes a summand.
  enum class Like : uint8_t { kAny, kName, kMaker };
  std::optional<std::vector<Value>> with_zeros(const KernelCall& call, Like like = Like::kAny);
  std::optional<std::vector<Value>> uniform(const KernelCall& call, const std::vector<OpId>& found);
  std::optional<std::vector<Value>> beside_zeros(const KernelCall& call, const std::vector<OpId>& found);
  // `windows`: of each factor, whether its padding has been looked at.
  void check_attrs(const KernelCall& call, const Op& op, const Shape& shape, const std::vector<Digit>& sets,
                   const std::vector<bool>& windows, const Dims& first_result);
  void check_box(const KernelCall& call, const Op& op, const std::vector<Value>& results);
  std::string unlike(const KernelCall& call) const;

  Reference& ref_;
  std::vector<DType> sum_dtypes_;
  Tree& tree_;
  std::map<std::tuple<OpId, bool, FactorSplits>, Shape> shapes_;
  std::set<std::string> exemptions_;
  bool guessed_ = false;
  std::map<std::tuple<int32_t, OpCode, TensorIds>, int64_t> seen_;  // by device: what is made of constants
  // By device, spatial dimension, extents of what is read and of what is made: what was last read and made through a
  // window.
  std::map<std::tuple<int32_t, size_t, int64_t, int64_t>, Windows> windows_;
  // By device, extent and size: the part of such a dimension that it last made.
  std::map<std::tuple<int32_t, int64_t, int64_t>, Interval> parts_;
};

// Does it add what devices have sent of a sum, each the terms that it has?
bool is_of_reshard(const KernelCall& call);
// Results must have the dims that operands of these make.
void check_shapes(const KernelCall& call);
// Of an op that draws by place or asks where it lies: the dimensions that it asks of (bit d: d), and whether they are
// operand 0's.
uint32_t placed_dims(const Graph& graph, const Op& op);
bool box_is_of_input(const Graph& graph, const Op& op);
// The positions of a dimension that a box says.
Set positions(const Box& box, Interval samples, size_t dim, int64_t extent, int64_t local);

}  // namespace whale::proof
