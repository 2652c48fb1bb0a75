#include "checkpoint/checkpoint.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "checkpoint/file.h"

namespace whale {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFormat = 1;
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kIndexFile = "whale.json";
constexpr size_t kMaxIndexBytes = 1 << 20;
constexpr unsigned kExchange = 1 << 1;  // RENAME_EXCHANGE

std::string index_text(const CheckpointMeta& meta) {
  nlohmann::ordered_json json = {{"format", kFormat},           {"model", meta.model},     {"seed", meta.seed},
                                 {"iteration", meta.iteration}, {"updates", meta.updates}, {"learning_rate", nullptr}};
  if (meta.learning_rate) json["learning_rate"] = *meta.learning_rate;
  if (meta.loss_scale) {
    json["loss_scale"] = *meta.loss_scale;
    json["steps_at_scale"] = meta.steps_at_scale;
  }
  return json.dump(2) + "\n";
}

CheckpointMeta parse_index(const std::string& path, const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  const auto bad = [&](const char* what) {
    return error(Code::kDataLoss, "'{}' is not the index of a checkpoint: {}", path, what);
  };
  if (!json.is_object()) throw bad("not a JSON object");
  const auto natural = [&](const char* key) -> uint64_t {
    if (!json.contains(key) || !json[key].is_number_unsigned()) throw bad(key);
    return json[key].get<uint64_t>();
  };
  const uint64_t format = natural("format");
  if (format != static_cast<uint64_t>(kFormat))
    throw error(Code::kFailedPrecondition, "'{}' has checkpoint format {}, this library reads format {}", path, format,
                kFormat);
  CheckpointMeta meta;
  if (!json.contains("model") || !json["model"].is_string()) throw bad("model");
  meta.model = json["model"].get<std::string>();
  meta.seed = natural("seed");
  const uint64_t iteration = natural("iteration"), updates = natural("updates");
  if (iteration > static_cast<uint64_t>(INT64_MAX) || updates > iteration) throw bad("iteration and updates");
  meta.iteration = static_cast<int64_t>(iteration);
  meta.updates = static_cast<int64_t>(updates);
  if (json.contains("learning_rate") && !json["learning_rate"].is_null()) {
    if (!json["learning_rate"].is_number()) throw bad("learning_rate");
    meta.learning_rate = json["learning_rate"].get<double>();
    if (!std::isfinite(*meta.learning_rate) || *meta.learning_rate < 0) throw bad("learning_rate");
  }
  if (json.contains("loss_scale")) {
    if (!json["loss_scale"].is_number()) throw bad("loss_scale");
    meta.loss_scale = json["loss_scale"].get<double>();
    if (!std::isfinite(*meta.loss_scale) || *meta.loss_scale <= 0) throw bad("loss_scale");
    const uint64_t steps = natural("steps_at_scale");
    if (steps > iteration) throw bad("steps_at_scale");
    meta.steps_at_scale = static_cast<int64_t>(steps);
  }
  return meta;
}

// Removes a folder that holds a checkpoint or a part of one; anything else in it is moved to `keep`, when that is
// given.
void remove_checkpoint(const fs::path& folder, const fs::path* keep) {
  std::error_code ignored;
  for (const char* file : {kModelFile, kOptimizerFile, kIndexFile}) fs::remove(folder / file, ignored);
  if (keep != nullptr)
    for (fs::directory_iterator it(folder, ignored), end; it != end; it.increment(ignored))
      if (!fs::exists(*keep / it->path().filename(), ignored))
        fs::rename(it->path(), *keep / it->path().filename(), ignored);
  fs::remove(folder, ignored);
}

// The folder must be one that may be replaced: absent, empty, or a checkpoint.
void check_target(const fs::path& target) {
  std::error_code failed;
  if (!fs::exists(target, failed)) return;
  if (!fs::is_directory(target, failed))
    throw error(Code::kAlreadyExists, "'{}' is not a directory; give another name for the checkpoint", target.string());
  if (fs::is_empty(target, failed) && !failed) return;
  if (!fs::exists(target / kIndexFile, failed))
    throw error(Code::kFailedPrecondition,
                "'{}' is a directory that is not a checkpoint (it has no {}); it is not replaced", target.string(),
                kIndexFile);
}

// Puts `fresh` in the place of `target`; the previous one, if any, ends at `fresh`. Atomic where the file system can
// exchange.
void exchange(const fs::path& fresh, const fs::path& target) {
  std::error_code ignored;
  if (!fs::exists(target, ignored)) {
    if (std::rename(fresh.c_str(), target.c_str()) != 0) throw_errno("rename the new checkpoint to", target.string());
    return;
  }
  if (syscall(SYS_renameat2, AT_FDCWD, fresh.c_str(), AT_FDCWD, target.c_str(), kExchange) == 0) return;
  if (errno != EINVAL && errno != ENOSYS && errno != EOPNOTSUPP) throw_errno("replace", target.string());
  // Two renames; between them the previous checkpoint is at `aside`, where open_checkpoint looks for it.
  const fs::path aside = target.string() + ".previous";
  fs::remove_all(aside, ignored);
  if (std::rename(target.c_str(), aside.c_str()) != 0) throw_errno("replace", target.string());
  if (std::rename(fresh.c_str(), target.c_str()) != 0) {
    const int number = errno;
    std::rename(aside.c_str(), target.c_str());
    errno = number;
    throw_errno("rename the new checkpoint to", target.string());
  }
  std::rename(aside.c_str(), fresh.c_str());
}

// The real folder behind the name: links followed, no slash at the end.
fs::path resolve(const std::string& directory) {
  if (directory.empty()) throw invalid("the checkpoint's directory has no name");
  if (directory.find('\0') != std::string::npos) throw invalid("the checkpoint's directory name holds a NUL byte");
  std::error_code failed;
  fs::path path = fs::weakly_canonical(fs::absolute(directory, failed), failed);
  if (failed) throw invalid("cannot resolve '{}': {}", directory, failed.message());
  return path.has_filename() ? path : path.parent_path();
}

}  // namespace

void write_checkpoint(const std::string& directory, const CheckpointMeta& meta, const CheckpointPart& model,
                      const CheckpointPart& optimizer, const FaultProbe& probe) {
  const auto point = [&](const char* name) {
    if (probe) probe(name);
  };
  const fs::path target = resolve(directory);
  check_target(target);
  const fs::path fresh = target.string() + ".saving";
  std::error_code ignored;
  fs::remove_all(fresh, ignored);  // left by a process that died
  std::error_code failed;
  fs::create_directories(target.parent_path(), failed);
  errno = failed.value();
  if (failed) throw_errno("make the directory", target.parent_path().string());
  if (!fs::create_directory(fresh, failed)) {
    errno = failed ? failed.value() : EEXIST;
    throw_errno("make the directory", fresh.string());
  }
  try {
    point("model");
    write_safetensors(fresh / kModelFile, model.tensors, {{"format", "pt"}}, model.source);
    point("optimizer");
    write_safetensors(fresh / kOptimizerFile, optimizer.tensors, {{"format", "pt"}}, optimizer.source);
    point("index");
    write_file(fresh / kIndexFile, index_text(meta));
    point("sync");
    sync_directory(fresh);
    point("exchange");
    exchange(fresh, target);
  } catch (...) {
    fs::remove_all(fresh, ignored);
    throw;
  }
  // From here on the new checkpoint is in place; what is left is tidying.
  if (fs::exists(fresh, ignored)) remove_checkpoint(fresh, &target);
  sync_directory(target.parent_path());
}

Checkpoint open_checkpoint(const std::string& directory) {
  fs::path folder = resolve(directory);
  std::error_code ignored;
  if (!fs::exists(folder, ignored) && fs::exists(folder.string() + ".previous", ignored))
    folder = folder.string() + ".previous";
  if (!fs::is_directory(folder, ignored))
    throw error(Code::kNotFound, "there is no checkpoint directory '{}'", folder.string());
  Checkpoint checkpoint;
  const std::string index = folder / kIndexFile;
  checkpoint.meta = parse_index(index, read_file(index, kMaxIndexBytes));
  checkpoint.model = std::make_unique<SafetensorsFile>(folder / kModelFile);
  checkpoint.optimizer = std::make_unique<SafetensorsFile>(folder / kOptimizerFile);
  return checkpoint;
}

}  // namespace whale
