// The one-device program of an entry, made from the plan's source as grad/ makes it and nothing else, in a form in
// which ops are as small as their declarations say (decompose).
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

#include "plan/plan.h"

namespace whale::proof {

// Of programs that are equal by declaration, the one that the plan was made of, as it seems: a wrong guess proves
// nothing that is not so.
struct Form {
  using Names = std::unordered_set<std::string>;  // of ops
  Names unpacked;          // of which the plan runs the form whose operands stand apart (OpDef::unpack)
  Names products;          // that it runs
  Names biased, unbiased;  // of these, with a bias within and without one
  Names active, inactive;  // with an activation within and without one
  bool whole = true;       // false: products are taken apart from their biases and activations all the same
  // Of those with a bias, which become one with it when gradients are there, in 16 bits: the model's scopes guess it.
  enum class Late : uint8_t { kNone, kAll, kInSplits };
  Late late = Late::kNone;
};
Form form_of(const Entry& entry);

// The passes of engine/grad, in the order that its README gives. `rounds_apart`: in 16 bits, a product, its bias and
// its activation that one device has in one kernel, rounded once, are several in the plan, rounded each; so they are in
// this.
struct OneDevice {
  Graph graph;
  bool rounds_apart = false;
};
OneDevice one_device_graph(const Plan& plan, const Entry& entry, const Form& form);

bool same_number(double a, double b);  // NaN is itself, and -0 is not 0
// Types have two names, "f32" and numpy's; NaN is equal to itself here.
bool same_attr(std::string_view name, const Attr& a, const Attr& b);
bool same_attrs(const Attrs& a, const Attrs& b);

// Reading the same, two ops compute the same. A view changes what most ops do, but not what one does of each element.
bool same_op(const Graph& g, const Op& a, const Op& b);

// Each element of its result follows from one of its operand, whatever shape they have.
bool of_each_element(const Op& op);

// All but the last dimension as one.
Dims in_rows(const Dims& dims);

// An equal form of the op in smaller ones, appended: its results; empty: it is in its smallest form.
TensorIds smaller_form(Graph& graph, const Op& op);

}  // namespace whale::proof
