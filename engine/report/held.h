// The tensors that a device holds when it is fullest, named as in the user's graph.
#pragma once

#include <string>
#include <vector>

#include "plan/figures.h"
#include "plan/plan.h"

namespace whale {

// Alike ones (same class, type and local sizes, names that differ in numbers alone) are one.
struct Held {
  std::string name;       // "block*.mlp.up"; state: its parameter's
  std::string state;      // "m, v": names of state; else empty
  const char* kind = "";  // as MemoryClasses has them: "parameters", "activations", ...
  int64_t count = 1;
  DType dtype{};
  Dims dims;             // of the device's part
  int64_t versions = 1;  // micro-batches of which each is held
  int64_t bytes = 0;     // together
  std::string made_by;   // "gelu block*.mlp.gelu in replica/encoder, model.py:12", as far as that is known
};
struct HeldTensors {
  std::vector<Held> list;  // most bytes first
  std::string when;        // it is fullest: "in the backward pass of block3/mlp"; empty: it computes nothing
};
HeldTensors held_tensors(const Plan& plan, const Entry& entry, int32_t device);

}  // namespace whale
