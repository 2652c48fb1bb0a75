#include "plan/limits.h"

#include "base/error.h"
#include "base/text.h"

namespace whale {
namespace {

template <class... A>
Error beyond(fmt::format_string<A...> text, A&&... args) {
  return error(Code::kResourceExhausted, text, std::forward<A>(args)...);
}

void check_program(const Entry& entry, const Program& program) {
  for (const Buffer& b : program.buffers)
    if (b.bytes > kMostBytes)
      throw beyond(
          "'{}' takes {} bytes of a device in entry '{}', at most {} (64 TiB) are possible: cut it over more devices",
          brief(b.name), b.bytes, entry.name, kMostBytes);
  for (const auto& [bytes, where] :
       {std::pair{program.arena_bytes, "device's"}, std::pair{program.host_bytes, "host's"}})
    if (bytes > kMostArena)
      throw beyond(
          "the values of entry '{}' take {} bytes of a {} memory, at most {} (1 PiB) are possible: use more devices, "
          "more micro-batches, recompute or a smaller batch",
          entry.name, bytes, where, kMostArena);
}

}  // namespace

void check_limits(const Graph& graph) {
  for (const Tensor& t : graph.tensors) {
    int64_t left = kMostBytes / static_cast<int64_t>(size_of(t.dtype));
    for (const int64_t d : t.dims)
      if (d > kMostBytes || (left = d > 0 ? left / d : left) == 0)
        throw beyond(
            "tensor '{}' of shape {} and type {} has more than {} bytes (64 TiB), the most that a tensor may have",
            brief(t.name), to_string(t.dims), name_of(t.dtype), kMostBytes);
  }
}

void check_limits(const Plan& plan) {
  for (const PlanVariable& v : plan.variables)
    for (const AxisSharding& cut : v.storage_sharding.axes)
      if (cut.sub_axis.outer > kMostRuns)
        throw beyond(
            "variable '{}' would be cut into {} runs a device, at most {} are possible: split another dimension",
            brief(v.name), cut.sub_axis.outer, kMostRuns);
  for (const Entry& entry : plan.entries)
    for (const Program& program : entry.programs) check_program(entry, program);
}

void check_versions(int64_t versions, std::string_view schedule) {
  if (versions > kMostVersions)
    throw beyond(
        "schedule '{}' has {} micro-batches in flight at once, at most {} are possible: give fewer micro-batches, or a "
        "schedule that begins with backward passes earlier, such as 1f1b",
        schedule, versions, kMostVersions);
}

}  // namespace whale
