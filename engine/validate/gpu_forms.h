// Forms of rows that were measured on GPUs.
#pragma once

#include "validate/validate.h"

namespace whale {

// Ops of known shape (NeuSight's table): set, op, gpu, torch, B, M, N, K, H, ms.
bool is_ops(const std::string& path);
Json validate_ops(const std::string& path, const ValidateOptions& options);

// Work that runs together (Mist's table): gpu, world, intra, inter, compute_n, m, k, g2g_mb, h2d_mb, d2h_mb,
// latency_ms.
bool is_overlap(const std::string& path);
Json validate_overlap(const std::string& path, const ValidateOptions& options);

// Steps of whole models (NeuSight's table): gpu, model, mode, seq, batch, strategy, fw_ms, bwall_ms, e2e_ms.
bool is_models(const std::string& path);
Json validate_models(const std::string& path, const ValidateOptions& options);

}  // namespace whale
