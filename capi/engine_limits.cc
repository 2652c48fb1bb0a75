#include "engine_limits.h"

#include <algorithm>
#include <filesystem>

#include "guard.h"

namespace whale::capi {
namespace {

int64_t limit(int64_t given, int64_t fallback, int64_t most, const char* what) {
  const auto value = number<int64_t>(given, 0, most, what);
  return value == 0 ? fallback : value;
}

void at_most(int64_t found, int64_t most, const char* option, const std::string& what) {
  if (found > most)
    throw error(Code::kResourceExhausted,
                "{}: {}, engine option {} allows {}; refuse the file, or make the engine with a larger {}", what, found,
                option, most, option);
}

}  // namespace

Limits read_limits(const whale_engine_options& o) {
  Limits out;
  out.init_dir = text(o.init_dir, "options.init_dir");
  out.file_bytes = limit(o.max_file_bytes, out.file_bytes, INT32_MAX, "options.max_file_bytes");
  out.ops = limit(o.max_ops, out.ops, INT64_MAX, "options.max_ops");
  out.tensors = limit(o.max_tensors, out.tensors, INT64_MAX, "options.max_tensors");
  out.elements = limit(o.max_elements, out.elements, INT64_MAX, "options.max_elements");
  out.devices = limit(o.max_devices, out.devices, out.devices, "options.max_devices");
  out.plan_bytes = limit(o.max_plan_bytes, out.plan_bytes, INT64_MAX, "options.max_plan_bytes");
  std::error_code failed;  // of a name that is too long, say: no folder either
  if (!out.init_dir.empty() && !std::filesystem::is_directory(out.init_dir, failed))
    throw error(Code::kNotFound, "argument `options.init_dir` is '{}', which is not a folder", brief(out.init_dir));
  return out;
}

void check_file_bytes(const Limits& limits, int64_t bytes, const std::string& what) {
  at_most(bytes, limits.file_bytes, "max_file_bytes", fmt::format("{}: number of bytes", what));
}

void check_devices(const Limits& limits, size_t devices) {
  at_most(static_cast<int64_t>(devices), limits.devices, "max_devices", "number of devices");
}

void check_limits(const Limits& limits, const Graph& graph) {
  at_most(std::ssize(graph.ops), limits.ops, "max_ops", fmt::format("graph '{}': number of ops", brief(graph.name)));
  at_most(std::ssize(graph.tensors), limits.tensors, "max_tensors",
          fmt::format("graph '{}': number of tensors", brief(graph.name)));
  int64_t elements = 0;
  for (const Tensor& t : graph.tensors)
    if (__builtin_add_overflow(elements, element_count(t.dims), &elements)) elements = INT64_MAX;
  at_most(elements, limits.elements, "max_elements",
          fmt::format("graph '{}': elements of all tensors together", brief(graph.name)));
}

void check_limits(const Limits& limits, const Plan& plan) {
  check_devices(limits, plan.devices.size());
  check_limits(limits, plan.source);
  for (const Entry& entry : plan.entries)
    for (const Program& program : entry.programs) {
      int64_t instructions = 0;
      for (const Segment& segment : program.segments) instructions += std::ssize(segment.instructions);
      at_most(instructions, limits.ops, "max_ops",
              fmt::format("plan '{}': instructions of a device", brief(plan.model)));
      at_most(std::ssize(program.buffers), limits.tensors, "max_tensors",
              fmt::format("plan '{}': buffers of a device", brief(plan.model)));
    }
}

InitFiles init_files_of(const Limits& limits, const std::string& path, const char* what) {
  InitFiles out;
  out.what = what;
  out.bounded = true;
  if (!path.empty()) out.base = std::filesystem::absolute(path).parent_path().lexically_normal().string();
  out.root =
      limits.init_dir.empty() ? out.base : std::filesystem::absolute(limits.init_dir).lexically_normal().string();
  out.given = !limits.init_dir.empty();
  return out;
}

}  // namespace whale::capi
