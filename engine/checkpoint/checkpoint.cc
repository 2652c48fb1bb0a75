#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "checkpoint/save_lock.h"

namespace whale {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kIndexFile = "whale.json";
constexpr const char* kFiles[] = {kModelFile, kOptimizerFile, kIndexFile};
constexpr const char* kIdKey = "whale_save";  // in the metadata of the safetensors files
constexpr size_t kMaxIndexBytes = size_t{1} << 28;
constexpr int kMaxLooks = 1000;  // of a load, while saves replace what it looks at

// The name of a file of save `id` until it has its own.
std::string fresh_name(const char* file, const std::string& id) { return fmt::format("{}.{}", file, id); }

fs::path path_of(const std::string& directory) {
  if (directory.empty()) throw invalid("the checkpoint's directory has no name");
  if (directory.find('\0') != std::string::npos) throw invalid("the checkpoint's directory name holds a NUL byte");
  return directory;
}

// The directory and those above it that are not there, innermost first.
std::vector<fs::path> missing_folders(const fs::path& path) {
  std::error_code failed;
  std::vector<fs::path> missing;
  const fs::file_status there = fs::status(path, failed);  // asked once: another save may be making it
  if (fs::is_directory(there)) return missing;
  if (fs::exists(there))
    throw error(Code::kAlreadyExists, "'{}' is not a directory; give another name for the checkpoint", path.string());
  const fs::path absolute = fs::absolute(path, failed);
  if (failed)
    throw error(
        Code::kNotFound,
        "'{}' is a path from the working directory, and that cannot be found: {}. Change to another one, or name "
        "the checkpoint from /",
        path.string(), failed.message());
  for (fs::path at = absolute.lexically_normal(); !fs::exists(at, failed) && at.has_relative_path();
       at = at.parent_path())
    if (at.has_filename()) missing.push_back(at);
  if (!missing.empty() && fs::is_symlink(missing.back(), failed))
    throw error(Code::kAlreadyExists, "'{}' is a link that leads nowhere; give another name for the checkpoint",
                missing.back().string());
  return missing;
}

// Makes a directory and what is missing above it; what it made goes again, unless it is kept.
class MadeFolders {
 public:
  explicit MadeFolders(const fs::path& path) {
    std::error_code failed;
    std::vector<fs::path> missing = missing_folders(path);
    try {
      for (; !missing.empty(); missing.pop_back()) {
        if (fs::create_directory(missing.back(), failed)) {
          made_.push_back(missing.back());
          Directory(made_.back().parent_path()).sync();
        } else if (failed) {
          errno = failed.value();
          throw_errno("make the directory", missing.back().string());
        }
      }
    } catch (...) {
      undo();
      throw;
    }
  }
  ~MadeFolders() { undo(); }
  void keep() { made_.clear(); }

 private:
  void undo() {
    for (; !made_.empty(); made_.pop_back()) ::rmdir(made_.back().c_str());  // not, if somebody put something there
  }
  std::vector<fs::path> made_;
};

// The id of the checkpoint that is there; empty: none, or one of format 1, or a damaged one. Throws where the names are
// taken by something else.
std::string replaceable(const Directory& folder) {
  for (const char* file : kFiles)
    if (folder.find(file) == Directory::Entry::kOther)
      throw error(Code::kFailedPrecondition,
                  "'{}' is not a regular file, and a checkpoint needs this name; move it away or save to another "
                  "directory",
                  folder.path_of(file));
  if (folder.find(kIndexFile) == Directory::Entry::kAbsent) {
    for (const char* file : {kModelFile, kOptimizerFile})
      if (folder.find(file) != Directory::Entry::kAbsent)
        throw error(Code::kFailedPrecondition,
                    "'{}' is not part of a checkpoint (there is no {} beside it), and is not replaced; save to another "
                    "directory",
                    folder.path_of(file), kIndexFile);
    return {};
  }
  const std::string path = folder.path_of(kIndexFile);
  const std::string text = InputFile(folder, kIndexFile).text(kMaxIndexBytes, "too long for a checkpoint's index");
  if (!looks_like_index(text))
    throw error(Code::kFailedPrecondition,
                "'{}' is not the index of a checkpoint, and is not replaced; save to another directory", path);
  try {
    return parse_index(path, text).id;
  } catch (const Error& e) {
    if (e.code() == Code::kDataLoss) return {};  // replaced by a whole one
    throw;
  }
}

// Gives the files of a save that is in place their own names.
void finish_names(const Directory& folder, const std::string& id) {
  for (const char* file : {kModelFile, kOptimizerFile})
    if (folder.find(fresh_name(file, id)) != Directory::Entry::kAbsent) folder.rename(fresh_name(file, id), file);
}

void remove_fresh(const Directory& folder, const std::string& id) {
  for (const char* file : kFiles) folder.remove(fresh_name(file, id));
}

std::unique_ptr<SafetensorsFile> open_file(const Directory& folder, const char* file, const CheckpointIndex& index) {
  const auto sums = index.files.find(file);
  const uint32_t* header = sums == index.files.end() ? nullptr : &sums->second.header;
  if (!index.id.empty()) {
    try {
      return std::make_unique<SafetensorsFile>(folder, fresh_name(file, index.id), header);
    } catch (const Error& e) {
      if (e.code() != Code::kNotFound) throw;
    }
  }
  return std::make_unique<SafetensorsFile>(folder, file, header);
}

// The file that is not of the index's save; null: none.
const SafetensorsFile* stranger(const Checkpoint& c) {
  for (const SafetensorsFile* file : {c.model.get(), c.optimizer.get()})
    if (file->metadata(kIdKey) != c.index.id) return file;
  return nullptr;
}

// All but the data against the index.
void check_headers(const Checkpoint& c) {
  if (!c.has_checksums()) return;
  for (const auto& [name, file] :
       {std::pair(kModelFile, c.model.get()), std::pair(kOptimizerFile, c.optimizer.get())}) {
    const auto at = c.index.files.find(name);
    if (at == c.index.files.end())
      throw error(Code::kDataLoss, "'{}/{}' does not list {}", c.directory, kIndexFile, name);
    if (at->second.bytes != file->bytes())
      throw error(Code::kDataLoss, "'{}' is damaged: it has {} bytes, {} were written. Load another checkpoint",
                  file->path(), file->bytes(), at->second.bytes);
    if (at->second.header != file->header_checksum())
      throw error(
          Code::kDataLoss,
          "'{}' is damaged: the checksum of its header (names, dtypes and shapes of its tensors) is not the one "
          "in {}. Load another checkpoint",
          file->path(), kIndexFile);
  }
}

void verify_file(const SafetensorsFile& file, const FileChecksums* expected) {
  std::vector<std::string> damaged;
  for (const StoredTensor& tensor : file.tensors()) {
    const uint32_t crc = file.checksum(tensor);
    if (expected == nullptr) continue;
    const auto at = expected->tensors.find(tensor.name);
    if (at == expected->tensors.end() || at->second != crc) damaged.push_back(tensor.name);
  }
  if (damaged.empty()) return;
  throw error(Code::kDataLoss,
              "'{}' is damaged: tensor '{}'{} changed since it was saved (its checksum is not the one in {}). Load "
              "another checkpoint",
              file.path(), damaged[0], damaged.size() > 1 ? fmt::format(" and {} more", damaged.size() - 1) : "",
              kIndexFile);
}

}  // namespace

void check_checkpoint_target(const std::string& directory) {
  const fs::path path = path_of(directory);
  const std::vector<fs::path> missing = missing_folders(path);
  const Directory folder(missing.empty() ? path : missing.back().parent_path());
  if (missing.empty()) {
    replaceable(folder);
    SaveLock::check(folder);
    return;
  }
  for (const fs::path& each : missing) folder.find(each.filename());  // throws for a name that is too long
  // A file without a name, of which nothing stays if the process is killed, where the file system has such. Never the
  // folders themselves: removing them would fail another program that has found them and goes on inside.
  const int nameless = ::openat(folder.descriptor(), ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  if (nameless >= 0) {
    ::close(nameless);
    return;
  }
  const std::string trial = fmt::format(".whale-{}", random_id());
  if (::mkdirat(folder.descriptor(), trial.c_str(), 0777) != 0)
    throw_errno("make the directory", missing.back().string());
  ::unlinkat(folder.descriptor(), trial.c_str(), AT_REMOVEDIR);
}

void write_checkpoint(const std::string& directory, const CheckpointMeta& meta, const CheckpointPart& model,
                      const CheckpointPart& optimizer, const FaultProbe& probe) {
  const auto point = [&](const char* name) {
    if (probe) probe(name);
  };
  const fs::path path = path_of(directory);
  point("directory");
  MadeFolders made(path);
  const Directory folder(path);
  point("lock");
  SaveLock lock(folder);
  point("locked");
  const std::string there = replaceable(folder);
  if (!there.empty()) finish_names(folder, there);
  if (!lock.interrupted().empty() && lock.interrupted() != there) remove_fresh(folder, lock.interrupted());
  lock.remove_trials();
  point("tidied");
  CheckpointIndex index;
  index.meta = meta;
  index.id = random_id();
  lock.claim(index.id);
  bool in_place = false;
  try {
    for (const auto& [name, part] : {std::pair(kModelFile, &model), std::pair(kOptimizerFile, &optimizer)}) {
      point(name);
      index.files[name] = write_safetensors(folder, fresh_name(name, index.id), part->tensors,
                                            {{"format", "pt"}, {kIdKey, index.id}}, part->source);
    }
    point("index");
    const std::string text = to_text(index);
    if (text.size() > kMaxIndexBytes) throw invalid("an index of {} bytes: too many tensors", text.size());
    OutputFile file(folder, fresh_name(kIndexFile, index.id));
    file.write(text.data(), text.size());
    file.finish();
    point("sync");
    folder.sync();  // the names are on the disk before the index speaks of them
    point("exchange");
    folder.rename(fresh_name(kIndexFile, index.id), kIndexFile);
    in_place = true;
    made.keep();
    point("in place");
    folder.sync();  // and the index, before the previous files go
    point("names");
    finish_names(folder, index.id);
    point("last sync");
    folder.sync();
    point("unlock");
  } catch (...) {
    if (!in_place) remove_fresh(folder, index.id);
    throw;
  }
}

Checkpoint open_checkpoint(const std::string& directory) {
  const fs::path path = path_of(directory);
  std::error_code failed;
  if (!fs::is_directory(path, failed))
    throw error(Code::kNotFound, "there is no checkpoint directory '{}'{}", brief(directory),
                fs::is_directory(directory + ".previous", failed)
                    ? fmt::format("; an older libwhale may have left the checkpoint at '{}.previous'", directory)
                : fs::exists(path, failed) ? ": it is a file; a checkpoint is named by its directory"
                                           : "");
  std::string last;
  for (int look = 0; look < kMaxLooks; ++look) {
    const Directory folder(path);
    if (folder.find(kIndexFile) == Directory::Entry::kAbsent)
      throw error(Code::kNotFound, "'{}' holds no checkpoint: it has no {}", directory, kIndexFile);
    const std::string text = InputFile(folder, kIndexFile).text(kMaxIndexBytes, "too long for a checkpoint's index");
    Checkpoint c;
    c.directory = directory;
    c.index = parse_index(folder.path_of(kIndexFile), text);
    const bool again = text == last;
    try {
      c.model = open_file(folder, kModelFile, c.index);
      c.optimizer = open_file(folder, kOptimizerFile, c.index);
    } catch (const Error& e) {
      if (e.code() != Code::kNotFound) throw;
      // Not NOT_FOUND: who begins anew where there is no checkpoint would write over this one.
      if (again)
        throw error(Code::kDataLoss,
                    "{}: the checkpoint that {} describes has lost it. Put it back, or load another one", e.message(),
                    kIndexFile);
      last = text;
      continue;
    }
    const SafetensorsFile* other = stranger(c);
    if (other == nullptr) {
      check_headers(c);
      return c;
    }
    if (again)
      throw error(Code::kDataLoss,
                  "'{}' is not of the save that {} names: copied while it was being saved, mixed with another "
                  "checkpoint, or damaged in its header. Load another checkpoint",
                  other->path(), kIndexFile);
    last = text;  // a save replaced them meanwhile
  }
  throw error(Code::kUnavailable, "'{}' is replaced faster than it can be opened; load it when nobody saves",
              directory);
}

const FileChecksums* Checkpoint::checksums(const SafetensorsFile& file) const {
  return has_checksums() ? &index.files.at(&file == model.get() ? kModelFile : kOptimizerFile) : nullptr;
}

void Checkpoint::verify() const {
  verify_file(*model, checksums(*model));
  verify_file(*optimizer, checksums(*optimizer));
}

}  // namespace whale
