// Copies between the memory of a device and that of its host. Made by rewrite/offload.
#include "ops/rules.h"

namespace whale {
namespace {

size_t copies_of(const OpView& v) { return attr_bool(*v.attrs, "into") ? v.inputs.size() / 2 : v.inputs.size(); }

std::vector<TensorType> infer_to_host(const OpView& v) {
  const size_t n = copies_of(v);
  if (attr_bool(*v.attrs, "into")) {
    if (v.inputs.size() != 2 * n) throw invalid("{} operands, expected a place for each value", v.inputs.size());
    for (size_t i = 0; i < n; ++i)
      if (v.inputs[n + i] != v.inputs[i])
        throw invalid("place {} is {}, its value {}", i, to_string(v.inputs[n + i]), to_string(v.inputs[i]));
  }
  return {v.inputs.begin(), v.inputs.begin() + static_cast<std::ptrdiff_t>(n)};
}

std::vector<Alias> aliases_to_host(const OpView& v) {
  std::vector<Alias> all;
  const auto n = static_cast<int>(copies_of(v));
  if (attr_bool(*v.attrs, "into"))
    for (int i = 0; i < n; ++i) all.push_back({i, n + i, true});
  return all;
}

}  // namespace

extern const OpDef op_def_to_host, op_def_to_device;

const OpDef op_def_to_host = {
    .name = "to_host",
    .doc = "Copies values to the host's memory.\nx... -> y..., same; with `into`: x..., place... -> place..., written.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {{.name = "into",
               .type = AttrType::kBool,
               .fallback = false,
               .doc = "the second half of the operands are places in the host's memory that are written over"}},
    .infer = infer_to_host,
    .flags = kMemoryCopy | kInternal,
    .aliases_of = aliases_to_host,
};
const OpDef op_def_to_device = {
    .name = "to_device",
    .doc = "Copies values from the host's memory to the device's.\nx... -> y..., same.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .infer = [](const OpView& v) -> std::vector<TensorType> { return v.inputs; },
    .flags = kMemoryCopy | kInternal,
};

}  // namespace whale
