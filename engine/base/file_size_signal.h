// A write past the file-size limit (ulimit -f) is an error of the write (EFBIG) and not the process' end by SIGXFSZ,
// as long as one of these lives in the writing thread. What the host does with the signal, its mask and one that was
// pending before stay as they are.
#pragma once

#include <csignal>
#include <ctime>

namespace whale {

class FileSizeSignalHeld {
 public:
  FileSizeSignalHeld() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &mask_);
    was_pending_ = pending();
  }
  ~FileSizeSignalHeld() {
    const timespec now{};
    if (!was_pending_ && pending()) sigtimedwait(&signal_, nullptr, &now);  // of a write here: nobody's
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
  }
  FileSizeSignalHeld(const FileSizeSignalHeld&) = delete;
  FileSizeSignalHeld& operator=(const FileSizeSignalHeld&) = delete;

 private:
  static bool pending() {
    sigset_t set;
    return sigpending(&set) == 0 && sigismember(&set, SIGXFSZ) == 1;
  }
  sigset_t signal_{}, mask_{};
  bool was_pending_ = false;
};

}  // namespace whale
