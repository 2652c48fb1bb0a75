// The lock of a checkpoint's directory while one save writes into it. It belongs to the save, not to the process: two
// threads exclude each other as two processes do, and the kernel drops it when the process dies, however that happens.
// The file that carries it says which save is under way, so that what a save that died has left is known by name.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"
#include "base/file.h"

namespace whale {

// What a save is about, for who finds that it died.
struct SaveClaim {
  std::string id = {};        // empty: there was no save
  int64_t ranks = 1;          // that write files
  std::string replaced = {};  // id of the checkpoint that it replaces; empty: none, or one without an id
  int64_t replaced_ranks = 1;
};

class SaveLock {
 public:
  // Throws aborted while another save holds it, failed_precondition where files cannot be locked or where the lock's
  // file is a user's.
  explicit SaveLock(const Directory& folder);
  // Throws what would keep a save from being made in this folder; neither locks it nor leaves anything in it.
  static void check(const Directory& folder);
  ~SaveLock();  // removes the file, unless it is left
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;
  // The save that held the lock before and died. Tidied before claim(), which forgets it.
  const SaveClaim& interrupted() const { return interrupted_; }
  // Removes the empty files that check() of processes that died may have left.
  void remove_trials() const;
  void claim(const SaveClaim& claim);
  // As if the process had died: the next save tidies. For a save whose ranks may still be writing.
  void leave(bool leave) { left_ = leave; }
  // Throws unless the save that has claimed the folder, in whatever process, is this one.
  static void check_claimed(const Directory& folder, const std::string& id);
  static Error not_the_directory(const std::string& path, std::string_view why);

 private:
  bool take();
  const Directory& folder_;
  SaveClaim interrupted_;
  int descriptor_ = -1;
  bool left_ = false;
};

}  // namespace whale
