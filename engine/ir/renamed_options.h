// Options of scopes that had another name (docs/words.md). A strategy that uses an old one is refused with its
// successor; graph files of before kGraphFormatVersion 2 are translated (schema/graph_reader.cc).
#pragma once

#include <string>
#include <string_view>

namespace whale {

struct RenamedOption {
  std::string_view scope, before, now;
};
inline constexpr RenamedOption kRenamedOptions[] = {{"pipeline", "chunks", "virtual_stages"},
                                                    {"replica", "layout", "device_order"},
                                                    {"cluster", "layout", "device_order"}};

// Empty: it never had another name.
inline std::string_view renamed_option(std::string_view scope, std::string_view before) {
  for (const RenamedOption& option : kRenamedOptions)
    if (option.scope == scope && option.before == before) return option.now;
  return {};
}

// The strategy with the names of now, whatever else is right or wrong with it: "SCOPE(.., OLD = value, ..)" outside of
// quotes and lists.
inline std::string with_renamed_options(std::string_view strategy) {
  const auto is_word = [](char c) { return (c >= 'a' && c <= 'z') || c == '_'; };
  std::string out;
  std::string_view scope, word;  // of the open parenthesis; the last word
  char quote = 0;
  int depth = 0;
  for (size_t at = 0; at < strategy.size();) {
    const char c = strategy[at];
    if (quote == 0 && depth < 2 && is_word(c)) {
      const size_t begin = at;
      while (at < strategy.size() && is_word(strategy[at])) ++at;
      word = strategy.substr(begin, at - begin);
      size_t behind = at;
      while (behind < strategy.size() && strategy[behind] == ' ') ++behind;
      const bool assigned = depth == 1 && behind < strategy.size() && strategy[behind] == '=';
      const std::string_view now = assigned ? renamed_option(scope, word) : std::string_view{};
      out += now.empty() ? word : now;
      continue;
    }
    if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '(' || c == '[') {
      if (depth++ == 0) scope = word;
    } else if ((c == ')' || c == ']') && depth > 0) {
      --depth;
    }
    out += c;
    ++at;
  }
  return out;
}

}  // namespace whale
