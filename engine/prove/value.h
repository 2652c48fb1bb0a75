// What a range of a device's memory holds, and how a proof ends where something else was wanted.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/format.h"
#include "ir/dtype.h"
#include "prove/region.h"
#include "prove/terms.h"

namespace whale::proof {

// How terms become the sum: as collectives combine, or by an op of their own (Factor::merge).
struct Joining {
  Combine combine = Combine::kSum;
  OpCode merge{};
  Joining() = default;
  Joining(Combine by) : combine(by) {}  // NOLINT(google-explicit-constructor)
  explicit Joining(OpCode by) : merge(by) {}
  friend bool operator==(const Joining&, const Joining&) = default;
};
std::string_view name_of(const Joining& joining);

struct Value {
  TensorId tensor = kNone;  // a root of the one-device program
  DType dtype = DType::kF32;
  Region region = {};
  Terms terms = {};                                 // not whole: what it has of a sum
  Joining combine = {};                             // of terms that are not whole
  OpCode of_nothing{};                              // zeros that this op makes of no elements
  bool signs = false;                               // in exact mode: zeros, each 0 or -0 by what it is made of
  uint64_t order = 0;                               // in exact mode: what says its bits (Tree)
  int32_t device = -1, instruction = -1, row = -1;  // who made it; -1: it was there before the step
  // What the same instruction put there one micro-batch before, or before those that are left out.
  std::shared_ptr<const Value> before = nullptr;
  // Of a sum that lacks terms: those that it was made of, but for what earlier micro-batches had added; null: not kept.
  std::shared_ptr<const std::vector<std::shared_ptr<const Value>>> made_of = nullptr;
  int32_t depth = 0;  // of what is kept
};
using Held = std::shared_ptr<const Value>;

// The walk ends. `covered`: there is a rule, and it says something else; false: there is none for this.
struct Stop {
  bool covered = true;
  std::string what;
  std::vector<size_t> operands = {};  // of the instruction, that it is about; empty: all
  bool lacks = false;                 // it is about a sum without all of its terms
};
template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
  throw Stop{true, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args>
[[noreturn]] void no_rule(fmt::format_string<Args...> text, Args&&... args) {
  throw Stop{false, fmt::format(text, std::forward<Args>(args)...)};
}

}  // namespace whale::proof
