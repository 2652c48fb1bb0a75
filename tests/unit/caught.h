// What a call throws, for tests of what a user reads.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

#include "base/error.h"

namespace whale {

// The text of the Error that the call throws, whose code is one of these (none given: any); empty: it throws none.
template <class Call>
std::string message_of(Call call, std::initializer_list<Code> codes = {}) {
  try {
    call();
  } catch (const Error& e) {
    CHECK((codes.size() == 0 || std::find(codes.begin(), codes.end(), e.code()) != codes.end()));
    return e.message();
  }
  return "";
}

inline bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

}  // namespace whale
