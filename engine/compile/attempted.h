// Tries that nobody asked for: other cuts, prices and orders than the options say.
#pragma once

#include <optional>

#include "base/error.h"

namespace whale {

// What a try comes to; none where it cannot be: it does not count then, since there is another answer, and its error is
// none. What passes: a bug (kInternal), and Stopped (base/watch.h), which is no Error.
template <class Try>
auto attempted(Try&& work) -> std::optional<decltype(work())> {
  try {
    return work();
  } catch (const Error& e) {
    if (e.code() == Code::kInternal) throw;
    return std::nullopt;
  }
}

}  // namespace whale
