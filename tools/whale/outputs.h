// What a step hands out beside the loss (declared outputs, fetched tensors), as `verify` compares it: tensor by tensor,
// each of the plan's to that of one device, and dropped.
#pragma once

#include "lockstep.h"

namespace tool {

struct Outputs {
  std::vector<std::string> names;
  std::vector<std::string> left_out;  // rounding may turn them, and nothing would tell (jumps.h)
};
// Of the tensors that a plan hands out: the loss and what is handed out for decisions are not among them.
Outputs outputs_of(const std::vector<std::string>& handed_out, const std::string& graph_json,
                   const std::vector<Decision>& seen);

// An evaluation hands out the others.
std::vector<std::string> without_gradients(std::vector<std::string> names);

class OutputComparison {
 public:
  OutputComparison(std::vector<std::string> names, const Setting& setting);
  const std::vector<std::string>& names() const { return names_; }

  // How far each is from one device's.
  using Apart = std::vector<Distance>;
  Apart apart(const std::vector<Tensor>& run, const std::vector<Tensor>& one) const;
  // By a run that shows what rounding does.
  void widen(const Apart& moved);
  // The plan's in step `number`, `steps` after the variables were alike to the bit, by what so many moved runs show.
  // Integers must be alike. Those of unknown() are left out.
  void judge(const Apart& plan, const std::vector<Tensor>& one, int64_t number, int64_t steps, int64_t runs,
             Compared& into) const;
  // Where moved runs have other infinities: rounding decides what is finite.
  std::vector<std::string> unknown() const;

 private:
  std::vector<std::string> names_;
  const Setting& setting_;
  std::vector<double> envelope_;
};

}  // namespace tool
