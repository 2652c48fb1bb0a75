#include "checkpoint/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <optional>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/file.h"
#include "base/text.h"
#include "base/watch.h"
#include "checkpoint/save_lock.h"

namespace whale {
namespace {

namespace fs = std::filesystem;

constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kIndexFile = "whale.json";
constexpr const char* kIdKey = "whale_save";  // in the metadata of the safetensors files
constexpr size_t kMaxIndexBytes = size_t{1} << 28;
constexpr int kMaxLooks = 1000;  // of a load, while saves replace what it looks at

// With a directory, until a host sees in it what another one has made there.
class Patience {
 public:
  explicit Patience(const Peers& peers) : until_(Clock::now() + std::chrono::duration<double>(peers.patience())) {}
  bool is_over() const { return Clock::now() > until_; }
  void wait() const {
    Watch::look();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }

 private:
  using Clock = std::chrono::steady_clock;
  std::chrono::time_point<Clock, std::chrono::duration<double>> until_;
};

// The two files of a rank: parameters, state.
std::array<std::string, 2> files_of(int64_t rank, int64_t ranks) {
  if (ranks == 1) return {kModelFile, kOptimizerFile};
  return {fmt::format("model-{:05}-of-{:05}.safetensors", rank + 1, ranks),
          fmt::format("optimizer-{:05}-of-{:05}.safetensors", rank + 1, ranks)};
}
std::vector<std::string> files_of_all(int64_t ranks) {
  std::vector<std::string> all;
  for (int64_t r = 0; r < ranks; ++r)
    for (std::string& file : files_of(r, ranks)) all.push_back(std::move(file));
  return all;
}

// The name of a file of save `id` until it has its own.
std::string fresh_name(const std::string& file, const std::string& id) { return fmt::format("{}.{}", file, id); }

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

// The checkpoint that a save finds.
struct There {
  bool is_there = false;
  bool is_known = true;  // false: its index is damaged
  std::string id;        // empty: none, or one of format 1, or a damaged one
  int64_t ranks = 1;     // that wrote it
};

// Throws for an index of something else, or of a newer format.
There checkpoint_in(const Directory& folder) {
  There there;
  if (folder.find(kIndexFile) != Directory::Entry::kFile) return there;
  there.is_there = true;
  const std::string path = folder.path_of(kIndexFile);
  const std::string text = InputFile(folder, kIndexFile).text(kMaxIndexBytes, "too long for a checkpoint's index");
  if (!looks_like_index(text))
    throw error(Code::kFailedPrecondition,
                "'{}' is not the index of a checkpoint, and is not replaced; save to another directory", path);
  try {
    const CheckpointIndex index = parse_index(path, text);
    there.id = index.id, there.ranks = index.ranks;
  } catch (const Error& e) {
    if (e.code() != Code::kDataLoss) throw;
    there.is_known = false;  // replaced by a whole one
  }
  return there;
}

// Throws where the names that a save of `ranks` needs are taken by something else than the checkpoint that is there.
void check_free(const Directory& folder, const There& there, int64_t ranks) {
  std::vector<std::string> own;
  if (there.is_there) own = files_of_all(there.ranks);
  if (!there.is_known) own = files_of_all(ranks);
  own.emplace_back(kIndexFile);
  std::vector<std::string> needed = files_of_all(ranks);
  needed.emplace_back(kIndexFile);
  for (const std::string& file : needed) {
    const Directory::Entry entry = folder.find(file);
    if (entry == Directory::Entry::kOther)
      throw error(Code::kFailedPrecondition,
                  "'{}' is not a regular file, and a checkpoint needs this name; move it away or save to another "
                  "directory",
                  folder.path_of(file));
    if (entry == Directory::Entry::kAbsent || std::ranges::find(own, file) != own.end()) continue;
    throw error(Code::kFailedPrecondition,
                "'{}' is not part of a checkpoint ({}), and is not replaced; save to another directory",
                folder.path_of(file),
                there.is_there ? fmt::format("that of {} beside it has other files", kIndexFile)
                               : fmt::format("there is no {} beside it", kIndexFile));
  }
}

// Gives the files of a save that is in place their own names.
template <class Named>
void finish_names(const Directory& folder, const std::string& id, int64_t ranks, const Named& named) {
  for (const std::string& file : files_of_all(ranks)) {
    if (folder.find(fresh_name(file, id)) == Directory::Entry::kAbsent) continue;
    folder.rename(fresh_name(file, id), file);
    named();
  }
}

void remove_fresh(const Directory& folder, const std::string& id, int64_t ranks) {
  for (const std::string& file : files_of_all(ranks)) folder.remove(fresh_name(file, id));
  folder.remove(fresh_name(kIndexFile, id));
}

// Of a checkpoint of another number of ranks, whose index is no more: its files, and nothing that was put in their
// place.
template <class Removed>
void remove_replaced(const Directory& folder, const std::string& id, int64_t ranks, int64_t ranks_now,
                     const Removed& removed) {
  if (ranks == ranks_now) return;
  for (const std::string& file : files_of_all(ranks)) {
    try {
      if (SafetensorsFile(folder, file).metadata(kIdKey) != id) continue;
    } catch (const Error&) {  // none, or none of ours
      continue;
    }
    folder.remove(file);
    removed();
  }
}

std::unique_ptr<SafetensorsFile> open_file(const Directory& folder, const std::string& file,
                                           const CheckpointIndex& index) {
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

// All but the data against the index.
void check_header(const std::string& directory, const CheckpointIndex& index, const std::string& name,
                  const SafetensorsFile& file) {
  if (index.format == 1) return;
  const auto at = index.files.find(name);
  if (at == index.files.end()) throw error(Code::kDataLoss, "'{}/{}' does not list {}", directory, kIndexFile, name);
  if (at->second.bytes != file.bytes())
    throw error(Code::kDataLoss, "'{}' is damaged: it has {} bytes, {} were written. Load another checkpoint",
                file.path(), file.bytes(), at->second.bytes);
  if (at->second.header != file.header_checksum())
    throw error(Code::kDataLoss,
                "'{}' is damaged: the checksum of its header (names, dtypes and shapes of its tensors) is not the one "
                "in {}. Load another checkpoint",
                file.path(), kIndexFile);
}

std::string write_index(const Directory& folder, const CheckpointIndex& index) {
  const std::string text = to_text(index), name = fresh_name(kIndexFile, index.id);
  if (text.size() > kMaxIndexBytes) throw invalid("an index of {} bytes: too many tensors", text.size());
  OutputFile file(folder, name);
  file.write(text.data(), text.size());
  file.finish();
  return name;
}

// What one rank does of a save, and rank 0 for all.
class Save {
 public:
  Save(const std::string& directory, const CheckpointMeta& meta, const FaultProbe& probe, Peers* peers)
      : directory_(directory), probe_(probe), peers_(peers) {
    index_.meta = meta;
    index_.ranks = peers == nullptr ? 1 : peers->size();
  }

  void begin() {
    if (index_.ranks > kMostRanks) throw invalid("a checkpoint of {} ranks, at most {}", index_.ranks, kMostRanks);
    const fs::path path = path_of(directory_);
    point("directory");
    made_.emplace(path);
    folder_.emplace(path);
    point("lock");
    lock_.emplace(*folder_);
    point("locked");
    tidy();
    check_free(*folder_, there_, index_.ranks);
    point("tidied");
    index_.id = random_id();
    lock_->claim({index_.id, index_.ranks, there_.id, there_.ranks});
    point("claimed");
  }
  // On another rank than 0: into the directory in which rank 0 has begun.
  void join(const std::string& id) {
    index_.id = id;
    const Patience patience(*peers_);
    for (;;) {
      try {
        folder_.emplace(path_of(directory_));
        return SaveLock::check_claimed(*folder_, id);
      } catch (const Error& e) {
        folder_.reset();
        const bool absent = e.code() == Code::kNotFound;
        if (!absent && (e.code() != Code::kFailedPrecondition || patience.is_over())) throw;
        if (absent && patience.is_over())
          throw SaveLock::not_the_directory(directory_, "it is not there for this rank");
      }
      patience.wait();
    }
  }

  // The files of this rank; what the index is to say of them.
  std::string write(const CheckpointPart& model, const CheckpointPart& optimizer) {
    const std::array<std::string, 2> names = files_of(peers_ == nullptr ? 0 : peers_->rank(), index_.ranks);
    CheckpointIndex mine;
    mine.ranks = index_.ranks;
    try {
      for (const size_t f : {0, 1}) {
        const CheckpointPart& part = f == 0 ? model : optimizer;
        point(f == 0 ? kModelFile : kOptimizerFile);
        mine.files[names[f]] = write_safetensors(*folder_, fresh_name(names[f], index_.id), part.tensors,
                                                 {{"format", "pt"}, {kIdKey, index_.id}}, part.source);
        mine.parts[names[f]] = part.parts;
      }
      if (peers_ != nullptr) folder_->sync();
      point("written");
    } catch (...) {
      for (const std::string& name : names) folder_->remove(fresh_name(name, index_.id));
      throw;
    }
    return files_to_text(mine);
  }

  void commit(const std::vector<std::string>& files) {
    for (const std::string& each : files) add_files(index_, each);
    for (const auto& [name, sums] : index_.files)
      if (InputFile(*folder_, fresh_name(name, index_.id)).size() != sums.bytes)
        throw error(Code::kUnavailable, "'{}' is not as long as its rank wrote it",
                    folder_->path_of(fresh_name(name, index_.id)));
    point("index");
    const std::string written = write_index(*folder_, index_);
    point("sync");
    folder_->sync();  // the names are on the disk before the index speaks of them
    point("exchange");
    folder_->rename(written, kIndexFile);
    in_place_ = true;
    made_->keep();
    point("in place");
    folder_->sync();  // and the index, before the previous files go
    point("names");
    finish_names(*folder_, index_.id, index_.ranks, [&] { point("named"); });
    if (there_.is_there && there_.is_known)
      remove_replaced(*folder_, there_.id, there_.ranks, index_.ranks, [&] { point("removed"); });
    point("last sync");
    folder_->sync();
    point("unlock");
  }

  void leave_lock(bool leave) { lock_->leave(leave); }
  void end() noexcept {
    if (lock_ && !in_place_) remove_fresh(*folder_, index_.id, index_.ranks);
    lock_.reset();
    made_.reset();
  }
  const std::string& id() const { return index_.id; }
  std::string meta() const {
    CheckpointIndex alone;
    alone.meta = index_.meta;
    return to_text(alone);
  }

 private:
  void point(const char* name) const {
    if (probe_) probe_(name);
  }
  // What a dead save has left goes first: the files of a checkpoint that it replaced would be strangers.
  void tidy() {
    there_ = checkpoint_in(*folder_);
    if (!there_.id.empty()) finish_names(*folder_, there_.id, there_.ranks, [&] { point("tidied name"); });
    const SaveClaim& dead = lock_->interrupted();
    if (!dead.id.empty() && dead.id == there_.id)
      remove_replaced(*folder_, dead.replaced, dead.replaced_ranks, there_.ranks, [&] { point("tidied file"); });
    else if (!dead.id.empty())
      remove_fresh(*folder_, dead.id, dead.ranks);
    lock_->remove_trials();
  }

  const std::string& directory_;
  const FaultProbe& probe_;
  Peers* const peers_;
  CheckpointIndex index_;
  std::optional<MadeFolders> made_;
  std::optional<Directory> folder_;
  std::optional<SaveLock> lock_;
  There there_;
  bool in_place_ = false;
};

void check_alike(const std::vector<std::string>& metas) {
  const auto lines = [](const std::string& text) {
    std::vector<std::string> out;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) out.push_back(line);
    return out;
  };
  const std::vector<std::string> first = lines(metas[0]);
  for (size_t r = 1; r < metas.size(); ++r) {
    const std::vector<std::string> other = lines(metas[r]);
    for (size_t l = 0; l < std::min(first.size(), other.size()); ++l)
      if (first[l] != other[l])
        throw error(Code::kFailedPrecondition,
                    "rank 0 is at '{}', rank {} at '{}': all ranks make the same calls before they save",
                    std::string_view(first[l]).substr(2), r, std::string_view(other[l]).substr(2))
            .at_rank(static_cast<int>(r));
  }
}

// Rank 0 begins and, once it has heard that all have written, commits.
void save_with_peers(Save& save, const CheckpointPart& model, const CheckpointPart& optimizer, Peers& peers) {
  const std::vector<std::string> metas = peers.collect(save.meta());
  const std::string id = lead(peers, [&] {
    check_alike(metas);
    save.begin();
    save.leave_lock(true);  // a rank may be writing until it has been heard, also when another one is lost
    return save.id();
  });
  const std::string mine = told(peers.rank(), [&] {
    if (peers.rank() != 0) save.join(id);
    return save.write(model, optimizer);
  });
  const std::vector<std::string> all = peers.collect(mine);
  lead(peers, [&] {
    save.leave_lock(false);
    std::vector<std::string> files;
    for (const std::string& each : all) files.push_back(heard(each));
    save.commit(files);
    save.end();
    return std::string();
  });
}

}  // namespace

void check_checkpoint_target(const std::string& directory) {
  const fs::path path = path_of(directory);
  const std::vector<fs::path> missing = missing_folders(path);
  const Directory folder(missing.empty() ? path : missing.back().parent_path());
  if (missing.empty()) {
    check_free(folder, checkpoint_in(folder), 1);
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
                      const CheckpointPart& optimizer, const FaultProbe& probe, Peers* peers) {
  Save save(directory, meta, probe, peers);
  try {
    if (peers != nullptr) return save_with_peers(save, model, optimizer, *peers);
    save.begin();
    save.commit({save.write(model, optimizer)});
    save.end();
  } catch (...) {
    save.end();
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
    std::array<std::vector<std::string>, 2> names;
    std::array<std::vector<std::unique_ptr<SafetensorsFile>>, 2> files;
    try {
      for (int64_t r = 0; r < c.index.ranks; ++r)
        for (const size_t f : {0, 1}) {
          names[f].push_back(files_of(r, c.index.ranks)[f]);
          files[f].push_back(open_file(folder, names[f].back(), c.index));
        }
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
    const SafetensorsFile* other = nullptr;  // that is not of the index's save
    for (const auto& list : files)
      for (const auto& file : list)
        if (other == nullptr && file->metadata(kIdKey) != c.index.id) other = file.get();
    if (other == nullptr) {
      for (const size_t f : {0, 1})
        for (size_t r = 0; r < files[f].size(); ++r) check_header(directory, c.index, names[f][r], *files[f][r]);
      c.model = std::make_unique<StoredTensors>(c.index, names[0], std::move(files[0]));
      c.optimizer = std::make_unique<StoredTensors>(c.index, names[1], std::move(files[1]));
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

Checkpoint open_checkpoint(const std::string& directory, Peers& peers) {
  std::optional<Checkpoint> mine;
  const std::string id = lead(peers, [&] {
    mine = open_checkpoint(directory);
    return mine->index.id;
  });
  const Patience patience(peers);
  agree(peers, [&] {
    while (!mine || mine->index.id != id) {
      try {
        mine = open_checkpoint(directory);
      } catch (const Error& e) {
        if (e.code() != Code::kNotFound || patience.is_over()) throw;
      }
      if (mine && mine->index.id == id) break;
      if (patience.is_over())
        throw error(Code::kAborted,
                    "'{}' holds another checkpoint than rank 0 found there: it was replaced meanwhile, or is not the "
                    "same directory; load when nobody saves, from a directory that all ranks share",
                    directory);
      patience.wait();
    }
  });
  return std::move(*mine);
}

void Checkpoint::verify() const {
  for (const StoredTensors* tensors : {model.get(), optimizer.get()})
    for (const StoredTensor& tensor : tensors->tensors()) tensors->verify(tensor);
}

}  // namespace whale
