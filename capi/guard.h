// The fence between C and the engine: what goes in is checked, what is thrown becomes a whale_status, and
// out-parameters are written last, by code that cannot fail.
#pragma once

#include <cstring>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/float_env.h"
#include "base/text.h"
#include "base/utf8.h"
#include "base/watch.h"
#include "whale/whale.h"

struct whale_status {
  whale_code code = WHALE_UNKNOWN;
  whale_damage damage = WHALE_DAMAGE_CALL;
  std::string message;
  whale::Where where;
};

namespace whale::capi {

whale_status* make_status(const Error& error) noexcept;  // out_of_memory() when there is no memory for it
whale_status* make_status(Code code, const char* message) noexcept;
whale_status* refused(const char* why) noexcept;      // by the operating system
whale_status* unexpected(const char* what) noexcept;  // an exception that is no Error: a bug of libwhale
whale_status* out_of_memory() noexcept;               // one constant status; releasing it does nothing
// The same with the call in it, where there is memory for so much.
whale_status* out_of_memory(const char* call) noexcept;

// Runs f; nothing leaves it but a status. NULL: f returned. The caller's rounding mode and traps neither reach f nor
// are changed. call: the function of the C ABI that f does the work of.
template <class F>
whale_status* guard(F&& f, const char* call = __builtin_FUNCTION()) noexcept {
  const DefaultFloatEnv env;
  try {
    f();
    return nullptr;
  } catch (const Error& e) {
    return make_status(e);
  } catch (const Stopped& stopped) {
    return make_status(stopped.error());
  } catch (const std::bad_alloc&) {
    return out_of_memory(call);
  } catch (const std::length_error&) {  // a size that no container can have
    return out_of_memory(call);
  } catch (const std::system_error& e) {  // a path that the system does not take, a working directory that is gone
    return refused(e.code().message().c_str());
  } catch (const std::exception& e) {
    return unexpected(e.what());
  } catch (...) {
    return make_status(Code::kUnknown, "an unknown exception was caught at the C ABI");
  }
}

// What f gives, for a function that returns no status: `none` where f throws.
template <class T, class F>
T answer(T none, F&& f) noexcept {
  const DefaultFloatEnv env;
  try {
    return f();
  } catch (...) {
    return none;
  }
}

// ---- arguments
// ------------------------------------------------------------------------------------------------------------
// Before what is made for it: nobody would free what `need(out, "out") = made()` makes before it looks.
template <class T>
T& need(T* pointer, const char* what) {
  if (pointer == nullptr) throw invalid("argument `{}` is NULL", what);
  return *pointer;
}

template <class T>
std::span<T> array(T* data, size_t count, const char* what) {
  if (count > 0 && data == nullptr) throw invalid("argument `{}` is NULL, but its count is {}", what, count);
  if (count > (size_t{1} << 31)) throw invalid("argument `{}` has a count of {}", what, count);
  return {data, count};
}

inline std::string text(whale_str s, const char* what) {
  if (s.data == nullptr && s.size != 0) throw invalid("argument `{}` is NULL, but its size is {}", what, s.size);
  if (s.size > (size_t{1} << 31)) throw invalid("argument `{}` has a size of {} bytes", what, s.size);
  const std::string_view view(s.data == nullptr ? "" : s.data, s.size);
  if (!is_name(view)) throw invalid("argument `{}` is not UTF-8 text without control characters", what);
  return std::string(view);
}

inline std::string nonempty(whale_str s, const char* what) {
  std::string out = text(s, what);
  if (out.empty()) throw invalid("argument `{}` is empty", what);
  return out;
}

template <class E>
E number(int64_t value, int64_t low, int64_t high, const char* what) {  // an enum's
  if (value < low || value > high) throw invalid("argument `{}` is {}, expected {} to {}", what, value, low, high);
  return static_cast<E>(value);
}

inline bool flag(int32_t value, const char* what) { return number<int>(value, 0, 1, what) == 1; }

// The caller's option struct, which may come from an older header (shorter: the rest keeps its defaults) or from a
// newer one (longer: fine as long as what this library does not know is zero).
template <class T>
T options(const T* given, const T& defaults, const char* what) {
  T out = defaults;
  if (given == nullptr) return out;
  const size_t size = given->struct_size;
  if (size < sizeof(size_t) || size > 4096) {
    throw invalid("`{}`.struct_size is {}; set it to sizeof of the struct, as its _INIT macro does", what, size);
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0)
      throw error(Code::kUnimplemented, "`{}` sets options that this version of libwhale does not know", what);
  }
  std::memcpy(static_cast<void*>(&out), bytes, size < sizeof(T) ? size : sizeof(T));
  out.struct_size = sizeof(T);
  return out;
}

// ---- results
// --------------------------------------------------------------------------------------------------------------
// A struct that the caller gave to be filled: by as much of it as the caller's header has.
template <class T>
void fill(T* to, T value, const char* what) {
  const size_t size = need(to, what).struct_size;
  if (size < sizeof(size_t) || size > 4096)
    throw invalid("`{}`.struct_size is {}; set it to sizeof of the struct, as its _INIT macro does", what, size);
  value.struct_size = size;
  std::memcpy(static_cast<void*>(to), &value, size < sizeof(T) ? size : sizeof(T));
}

whale_text make_text(std::string_view s);  // throws bad_alloc
whale_bytes make_bytes(std::span<const uint8_t> bytes);

}  // namespace whale::capi
