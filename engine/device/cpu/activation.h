// Activations of a matmul: most are applied by oneDNN before a result leaves the registers. Its relu gives 0 for NaN in
// every form (post-op, clip, maximum), so relu is applied in place, behind the product.
#pragma once

#include <dnnl.hpp>

#include <string_view>

#include "base/error.h"

namespace whale::cpu {

struct Activation {
  std::string_view name;
  bool fused = false;  // by oneDNN
  dnnl::algorithm algorithm = dnnl::algorithm::undef;
  float alpha = 0;
};

inline constexpr Activation kActivations[] = {
    {"", false},
    {"none", false},
    {"relu", false},
    {"gelu", true, dnnl::algorithm::eltwise_gelu_tanh},
    {"gelu_erf", true, dnnl::algorithm::eltwise_gelu_erf},
    {"silu", true, dnnl::algorithm::eltwise_swish, 1.0f},
    {"sigmoid", true, dnnl::algorithm::eltwise_logistic},
    {"tanh", true, dnnl::algorithm::eltwise_tanh},
};

inline Activation activation_of(std::string_view name) {
  for (const Activation& activation : kActivations)
    if (activation.name == name) return activation;
  throw unimplemented("device cpu cannot fuse the activation '{}' into a matmul", name);
}

}  // namespace whale::cpu
