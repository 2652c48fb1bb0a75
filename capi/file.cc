// Whole files and checkpoints, as they come through the ABI.
#include "base/file.h"

#include <algorithm>
#include <filesystem>

#include "checkpoint/describe.h"
#include "guard.h"
#include "handles.h"
#include "schema/graph_file.h"

namespace whale::capi {

std::vector<uint8_t> read_file(const std::string& path, int64_t most, const char* what) {
  const InputFile file(path);
  if (file.size() > static_cast<uint64_t>(most))
    throw error(Code::kResourceExhausted, "{} '{}' has {} bytes, engine option max_file_bytes allows {}", what,
                brief(path), file.size(), most);
  std::vector<uint8_t> out(file.size());
  file.read(0, out.data(), out.size());
  return out;
}

void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  replace_file(path, bytes.data(), bytes.size());
}

namespace {
template <class Variables>
void move_init_files(Variables& variables, const InitFiles& from, const std::string& path) {
  if (from.bounded && from.base.empty()) return;  // from bytes: relative to nothing that is known
  for (auto& v : variables)
    if (v.init.kind == InitKind::kFile)
      v.init.file = rebased(v.init.file, from.base, std::filesystem::path(path).parent_path().string());
}
template <class Whole>
void write_whole(const std::string& path, const Whole& whole) {
  write_file(path, with_checksum(serialize(whole)));
}

template <class Whole>
bool has_init_files(const Whole& whole) {
  return std::any_of(whole.variables.begin(), whole.variables.end(),
                     [](const auto& v) { return v.init.kind == InitKind::kFile; });
}
}  // namespace

void write_to(const std::string& path, const Graph& graph, const InitFiles& from) {
  if (!has_init_files(graph)) return write_whole(path, graph);
  Graph moved = graph;
  move_init_files(moved.variables, from, path);
  write_whole(path, moved);
}

void write_to(const std::string& path, const Plan& plan, const InitFiles& from) {
  if (!has_init_files(plan) && !has_init_files(plan.source)) return write_whole(path, plan);
  Plan moved = plan;
  move_init_files(moved.variables, from, path);
  move_init_files(moved.source.variables, from, path);
  write_whole(path, moved);
}

}  // namespace whale::capi

whale_status* whale_checkpoint_check_target(whale_str directory) {
  using namespace whale;        // NOLINT
  using namespace whale::capi;  // NOLINT
  return guard([&] { check_checkpoint_target(nonempty(directory, "directory")); });
}

namespace {
whale_status* inspect(whale_str directory, std::string (*description)(const whale::Checkpoint&), whale_text* out,
                      const char* call) {
  using namespace whale;        // NOLINT
  using namespace whale::capi;  // NOLINT
  return guard(
      [&] {
        need(out, "out");
        const Checkpoint checkpoint = open_checkpoint(nonempty(directory, "directory"));
        checkpoint.verify();
        *out = make_text(description(checkpoint));
      },
      call);
}
}  // namespace

whale_status* whale_checkpoint_inspect(whale_str directory, whale_text* out) {
  return inspect(directory, whale::describe, out, __func__);
}

whale_status* whale_checkpoint_inspect_json(whale_str directory, whale_text* out) {
  return inspect(directory, whale::describe_json, out, __func__);
}
