// Terms of one tensor joined, wherever that is done: by kernels, over micro-batches, by collectives.
#pragma once

#include <optional>

#include "prove/reference.h"
#include "prove/tree.h"
#include "prove/value.h"

namespace whale::proof {

// `sum` with the terms of `x` too. They must be of the same elements of one tensor, combined in the same way, none of
// them whole, and no term in both.
// Gives terms of one sum names that both have, where one's say less than the other's.
void name_alike(const Reference& reference, Terms& a, Terms& b, TensorId sum);
// Does the sum's own name say which terms of it these are? Names by an operand's way matter where it does not.
bool are_told(const Reference& reference, TensorId sum, const Terms& terms);
// As one where their terms are alike: the sum's own name, or one for all of them.
void unite(Reference& reference, TensorId sum, Terms& terms);
// Terms of a sum that one name stands for get the sum's own, where that says which they are.
void name_by_sum(const Reference& reference, TensorId sum, Terms& terms);

Value with_terms(Reference& reference, Tree& tree, const Value& sum, const Value& x);

// Likewise, where `x` is a summand of that sum, or has terms of some. None: it is not, or more than once.
std::optional<Value> with_summands(Reference& reference, const Value& sum, const Value& x);

// What has all terms of some summands, and none of the others, is the sum of those: that one, where the program has it.
std::optional<Value> whole_summands(const Reference& reference, const Value& sum);

// The tensors that a sum is made of, as often as they are in it; none: they are too many.
std::optional<TensorIds> all_summands_of(const Reference& reference, TensorId sum);

std::string describe(const Reference& reference, const Value& value);  // "relu [0:4 x all 32]"

}  // namespace whale::proof
