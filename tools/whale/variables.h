// The variables of a session as `verify` looks at them: with their copies, the halves of split weights joined, and
// shifted in their last bits.
#pragma once

#include <set>

#include "runner.h"

namespace tool {

struct Variable {
  std::string name, role;                         // "parameter", "state", "buffer"
  bool halves = false;                            // split-SGD: bf16, and the rest of the float32 in NAME/low
  int64_t low_copies = 1;                         // of that: cut where ZeRO cuts state, so that there are fewer
  std::vector<std::vector<int32_t>> copies = {};  // the devices of each
};
// Those that are compared, in the order of the plan; the second halves of split weights are part of their first.
std::vector<Variable> variables_of(const Runner& runner);

// The state of one kind, such as "m" of all parameters.
std::string kind_of(const Variable& variable);

// The same in a run of more bits, which splits none.
std::vector<Variable> whole_variables(std::vector<Variable> variables);

Tensor read_value(const Runner& runner, const Variable& variable, int64_t copy = 0);
void write_value(Runner& runner, const Variable& variable, const whale_tensor* value);
// Into a run of more bits.
void write_wide(Runner& runner, const Variable& variable, const whale_tensor* value);

// The parameters of one session, moved a little and moved back: each element by amplitude * rms of its tensor * a
// number in [-1, 1] of its own, which `seed` chooses. What is taken off is what was added, so that the parameters do
// not walk away.
class Shake {
 public:
  // alike: parameters that move by amplitude * the largest root mean square of all.
  Shake(double amplitude, uint64_t seed, std::set<std::string> alike = {})
      : amplitude_(amplitude), seed_(seed), alike_(std::move(alike)) {}
  void add(Runner& runner, const std::vector<Variable>& variables);
  void take_off(Runner& runner, const std::vector<Variable>& variables);
  // Float inputs, each element by amplitude * itself * such a number: zeros stay.
  Batch inputs(const Batch& batch) const;

 private:
  void move(Runner& runner, const Variable& variable, size_t index, double scale) const;
  double amplitude_;
  uint64_t seed_, step_ = 0;
  std::set<std::string> alike_;
  std::vector<double> rms_;  // that parameters move by; 0: it does not
};

}  // namespace tool
