// Activations that oneDNN applies to a result before it leaves the registers.
#pragma once

#include <dnnl.hpp>

#include <string_view>

#include "base/error.h"

namespace whale::cpu {

struct Activation {
  std::string_view name;
  bool fused = false;
  dnnl::algorithm algorithm = dnnl::algorithm::undef;
  float alpha = 0;
};

inline constexpr Activation kActivations[] = {
    {"", false},
    {"none", false},
    {"relu", true, dnnl::algorithm::eltwise_relu},
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
