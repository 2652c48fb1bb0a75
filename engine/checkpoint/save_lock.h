// The lock of a checkpoint's directory while one save writes into it. It belongs to the save, not to the process: two
// threads exclude each other as two processes do, and the kernel drops it when the process dies, however that happens.
// The file that carries it says which save is under way, so that what a save that died has left is known by name.
#pragma once

#include <string>

#include "base/file.h"

namespace whale {

class SaveLock {
 public:
  // Throws aborted while another save holds it, failed_precondition where files cannot be locked or where the lock's
  // file is a user's.
  explicit SaveLock(const Directory& folder);
  // Throws what would keep a save from being made in this folder; neither locks it nor leaves anything in it.
  static void check(const Directory& folder);
  ~SaveLock();  // removes the file
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;
  // The id of the save that held the lock before and died; empty: none did. Tidied before claim(), which forgets it.
  const std::string& interrupted() const { return interrupted_; }
  // Removes the empty files that check() of processes that died may have left.
  void remove_trials() const;
  void claim(const std::string& id);

 private:
  bool take();
  const Directory& folder_;
  std::string interrupted_;
  int descriptor_ = -1;
};

}  // namespace whale
