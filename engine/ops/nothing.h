// Zeros in the place of what an op makes of no elements: their instruction says which op, for the prover's guesses.
#pragma once

#include <string>
#include <string_view>

#include "ops/op.h"

namespace whale {

constexpr std::string_view kOfNothing = ".none.";

// "logits.none.matmul".
inline std::string name_of_nothing(std::string_view tensor, OpCode maker) {
  return std::string(tensor).append(kOfNothing).append(def(maker).name);
}
// The op; OpCode{}: it is no such name.
inline OpCode maker_of_nothing(std::string_view name) {
  const size_t at = name.rfind(kOfNothing);
  if (at == name.npos) return {};
  name.remove_prefix(at + kOfNothing.size());
  return find_op(name) != nullptr ? code_of(name) : OpCode{};
}

}  // namespace whale
