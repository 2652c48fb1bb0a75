// The one error type of the engine. Internally errors are thrown; capi/guard.h turns them into whale_status
// at the door, so that no exception ever leaves the library.
#pragma once

#include <exception>
#include <string>
#include <utility>

#include "base/format.h"

namespace whale {

// The sixteen canonical codes of absl::StatusCode, same numbers.
enum class Code : int {
  kCancelled = 1,
  kUnknown = 2,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kPermissionDenied = 7,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kOutOfRange = 11,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kDataLoss = 15,
  kUnauthenticated = 16,
};

// How far the damage goes: only this call, the current step, the whole session, or a peer process is gone.
enum class Damage : int { kCall = 0, kStep = 1, kSession = 2, kPeerLost = 3 };

// Where it happened. Empty strings and -1 mean "does not apply".
struct Where {
  std::string op;
  std::string scope;
  int rank = -1;
  int device = -1;
};

class Error : public std::exception {
 public:
  Error(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  const Where& where() const { return where_; }
  Damage damage() const { return damage_; }
  // Each adds what the catcher knows and the thrower did not; an answer already there is kept.
  Error& at_op(const std::string& op) {
    if (where_.op.empty()) where_.op = op;
    return *this;
  }
  Error& at_scope(const std::string& scope) {
    if (where_.scope.empty()) where_.scope = scope;
    return *this;
  }
  Error& at_device(int device) {
    if (where_.device < 0) where_.device = device;
    return *this;
  }
  Error& at_rank(int rank) {
    if (where_.rank < 0) where_.rank = rank;
    return *this;
  }
  Error& with_damage(Damage damage) {
    if (damage > damage_) damage_ = damage;
    return *this;
  }

 private:
  Code code_;
  std::string message_;
  Where where_;
  Damage damage_ = Damage::kCall;
};

// throw invalid("input '{}' has {} dimensions, expected {}", name, got, want);
template <class... A>
Error error(Code code, fmt::format_string<A...> format, A&&... args) {
  return Error(code, fmt::format(format, std::forward<A>(args)...));
}
template <class... A>
Error invalid(fmt::format_string<A...> format, A&&... args) {
  return Error(Code::kInvalidArgument, fmt::format(format, std::forward<A>(args)...));
}
template <class... A>
Error unimplemented(fmt::format_string<A...> format, A&&... args) {
  return Error(Code::kUnimplemented, fmt::format(format, std::forward<A>(args)...));
}
template <class... A>
Error internal(fmt::format_string<A...> format, A&&... args) {
  return Error(Code::kInternal, fmt::format(format, std::forward<A>(args)...));
}

// An internal invariant; a failure is our bug, never the caller's.
#define WHALE_CHECK(condition, ...)                                                                   \
  do {                                                                                                \
    if (!(condition)) throw ::whale::internal("internal check failed: " #condition ": " __VA_ARGS__); \
  } while (0)

}  // namespace whale
