// Which expert is the first one here, for the ops between tokens and experts.
#pragma once

#include "device/device.h"

namespace whale {

// Plans say it in the attribute `expert_begin`, or in the box where the result has experts as its first dimension.
inline int64_t expert_begin(const KernelSpec& spec) {
  const int64_t begin = attr_int(*spec.attrs, "expert_begin");
  if (begin == 0 && spec.op == OpCode::k_moe_dispatch && !spec.box.origin.empty()) return spec.box.origin[0];
  return begin;
}

}  // namespace whale
