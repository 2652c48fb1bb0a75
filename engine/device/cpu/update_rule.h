// The arithmetic of the optimizers on runs of float: what updates of whole parameters (optimizer.cc) and of rows
// (row_updates.cc) share, so that both give the same bits.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace whale::cpu {

enum class Rule { kSgd, kSgdMomentum, kAdam, kAdagrad, kLambDirection, kLambApply };

// The numbers of one tuple in one step.
struct UpdateNumbers {
  float lr, clip, decay, momentum, beta1, beta2, epsilon;
  float m_new, v_new;      // 1 - beta, rounded once: in float, 1 - 0.999f is 1.3e-5 off
  float m_scale, v_scale;  // 1 / (1 - beta^t)
  bool nesterov, decoupled;
};

// Operands and results of n elements, up to 4 and 3; in the order of ops.def. Results may lie on operands.
struct UpdateTile {
  const float* in[4];
  float* out[3];
  int64_t n;
};
void update_tile(Rule rule, const UpdateTile& tile, const UpdateNumbers& numbers);

// What an op's attributes say, and the numbers of this step.
struct RuleSettings {
  UpdateNumbers numbers{};
  double beta1 = 0, beta2 = 0;
};
RuleSettings rule_settings(Rule rule, const Attrs& attrs);
UpdateNumbers numbers_now(const RuleSettings& settings, const Operand& lr, const Operand& updates,
                          const Operand& scale);
double scalar(const Operand& x, double otherwise);

// Split weights: an fp32 number is its upper 16 bits, a bf16 cut off, and its lower 16.
void join_halves(const uint16_t* high, const uint16_t* low, float* to, int64_t n);
void split_halves(const float* from, uint16_t* high, uint16_t* low, int64_t n);

}  // namespace whale::cpu
