// Settings of the environment for what reads it once, in a process whose other threads read it at any moment.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace whale {

// While this stands, the environment has these too ("NAME=value", which live for ever), but for those that the user has
// set. setenv may free what other threads are reading. This shows them a list of its own, which is never freed, and the
// old one again afterwards, unless somebody has changed the new one meanwhile. One at a time, and few in a process.
class DefaultSettings {
 public:
  explicit DefaultSettings(std::vector<const char*> settings) : settings_(std::move(settings)), before_(environ) {
    size_t n = 0;
    while (before_ != nullptr && before_[n] != nullptr) ++n;
    mine_ = new char*[n + settings_.size() + 1];
    if (n > 0) std::memcpy(mine_, before_, n * sizeof *mine_);
    for (const char* setting : settings_)
      if (std::getenv(name(setting).c_str()) == nullptr)  // NOLINT(concurrency-mt-unsafe)
        mine_[n++] = const_cast<char*>(setting);          // NOLINT(cppcoreguidelines-pro-type-const-cast)
    mine_[n] = nullptr;
    __atomic_store_n(&environ, mine_, __ATOMIC_RELEASE);
  }
  ~DefaultSettings() {
    char** now = mine_;
    if (__atomic_compare_exchange_n(&environ, &now, before_, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    for (const char* setting : settings_) {
      const std::string of = name(setting);
      if (std::getenv(of.c_str()) == setting + of.size() + 1) unsetenv(of.c_str());  // NOLINT(concurrency-mt-unsafe)
    }
  }
  DefaultSettings(const DefaultSettings&) = delete;
  DefaultSettings& operator=(const DefaultSettings&) = delete;

 private:
  static std::string name(std::string_view setting) { return std::string(setting.substr(0, setting.find('='))); }

  std::vector<const char*> settings_;
  char** before_;
  char** mine_;
};

}  // namespace whale
