// The larger language-like models: mixtures of experts, multimodal, recurrent.
#pragma once

#include "models.h"

namespace tool {

Value moe_gpt(Builder& builder, const ModelOptions& options);
Value m6(Builder& builder, const ModelOptions& options);
Value gnmt(Builder& builder, const ModelOptions& options);

}  // namespace tool
