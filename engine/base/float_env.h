// The floating-point environment of a thread: rounding mode, traps, flush-to-zero. The host's is its own affair and
// may be any; everything here is computed under the default one (nearest even, no traps, denormals kept).
#pragma once

#include <cfenv>

namespace whale {

// For threads that belong to the engine, when they start; threads made by them inherit it.
inline void use_default_float_env() { std::fesetenv(FE_DFL_ENV); }

// For the caller's thread while it is inside of a call: afterwards its environment is as it was, flags included.
class DefaultFloatEnv {
 public:
  DefaultFloatEnv() {
    std::fegetenv(&before_);
    use_default_float_env();
  }
  ~DefaultFloatEnv() { std::fesetenv(&before_); }
  DefaultFloatEnv(const DefaultFloatEnv&) = delete;
  DefaultFloatEnv& operator=(const DefaultFloatEnv&) = delete;

 private:
  std::fenv_t before_;
};

}  // namespace whale
